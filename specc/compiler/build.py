"""Compile a target and its drafts into one engine directory: trace, rewrite, fuse, emit."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specc.artifact.directory import available_memory_bytes, torch_version
from specc.artifact.engine_writer import EngineWriter
from specc.artifact.manifest import Manifest
from specc.artifact.manifest_entries import (
    MemoryEntry,
    ParallelEntry,
    PlanEntry,
    SegmentsEntry,
)
from specc.compile_request import CompileRequest
from specc.compiler.adapters import adapter_entries, check_plans, named, open_adapters
from specc.compiler.backends.base import CompilerBackend, Emitted, UnfinishedEngine
from specc.compiler.backends.registry import choose_backend
from specc.compiler.calibration import calibration_windows
from specc.compiler.candidate import ModelLike, as_drafts
from specc.compiler.checked_models import CheckedModels, check_dump
from specc.compiler.compiled_model import (
    check_used_bits,
    compile_models,
    describe_quantization,
    told_of_quantized,
)
from specc.compiler.context import (
    CompileContext,
    check_voters,
    engine_plans,
    make_context,
    plan_model_memory,
    settle,
)
from specc.compiler.engine_files import (
    told_of_sampling,
    write_configurations,
    write_model_weights,
    write_programs,
    write_report,
    write_steps,
)
from specc.compiler.heads import trained_lengths
from specc.compiler.lent_weights import lend_weights
from specc.compiler.model_entries import draft_states
from specc.compiler.self_drafts import self_draft_programs
from specc.compiler.stages import make_stages, stage_entries
from specc.compiler.tokenizer import TokenizerFiles
from specc.config import CompileConfig
from specc.passes.frontend.model_source import ModelSource
from specc.passes.pipeline import PassRecord
from specc.passes.quantize.scale_search import use_native_search
from specc.passes.segments.cut_segments import cut_segments
from specc.passes.segments.places import layer_places
from specc.progress import PhaseTimer, ProgressEvent
from specc.refusals import refuse
from specc.speculation.plans import OFF
from specc.speculation.taps import Taps
from specc.system.files import format_bytes
from specc.system.garbage import rare_collections
from specc.version import __version__

# of plain decoding's speed: a plan below it is not made the default; so few steps tell no more
LOSING = 0.9


@dataclass
class Compilation:
    """Result of `build`.

    Args:
        manifest: as written.
        records: what each pass did.
        warnings: what the user should know.
        seconds: time of each phase.
    """

    manifest: Manifest
    records: list[PassRecord]
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def build(
    target: ModelLike,
    drafts: ModelLike | Sequence[ModelLike] | None,
    output: str | Path,
    config: CompileConfig,
    *,
    tokenizer: str | Path | None = None,
    force: bool = False,
    dump_graphs: Path | None = None,
    listen: Callable[[ProgressEvent], None] = lambda event: None,
    probe: Callable[[Path], dict[str, Any]] | None = None,
    taps: Taps | None = None,
) -> Compilation:
    """Compile and write an engine.

    Args:
        target: Hugging Face directory or id, or a module (input_ids, position_ids) → logits.
        drafts: likewise, one or several; where their tokens are other ones than the target's, they
            propose what both have. None: lookups alone, or no plan but off.
        output: engine directory to make.
        config: options.
        tokenizer: directory or tokenizer.json, where the target is a module.
        force: replace an existing engine.
        dump_graphs: directory that gets each program's graph after each phase.
        listen: called as phases begin, advance and end.
        probe: called with the finished engine, before it gets its name; what it returns is stored.
        taps: hidden states of the target that are kept; None: those that its heads read.
    Raises:
        SpeccError: found / needed / do; nothing is left behind.
    """
    phases = PhaseTimer(listen)
    draft_models = as_drafts(drafts)
    config.dtypes_of(len(draft_models))
    config.rounded_drafts(len(draft_models))
    config.check_draft_ranks(len(draft_models))
    plans = engine_plans(config, len(draft_models))
    backend, told = choose_backend(config.backend, config)
    num_drafts, keeps_hidden = len(draft_models), taps is not None
    request = CompileRequest(
        config, plans, backend.facts, backend.options, num_drafts, keeps_hidden
    )
    refuse(request)
    use_native_search()
    config = backend.adapt(config)
    with (
        rare_collections(),
        EngineWriter(output, force=force) as writer,
        contextlib.ExitStack() as beside,
    ):
        check_dump(dump_graphs)
        with phases.phase("check models"):
            adapters = open_adapters(config)
            check_plans(plans, adapters)
            checked = CheckedModels.check(target, draft_models, config, backend, tokenizer, request)
        beside.enter_context(backend.ahead())
        with phases.phase("load models"):
            sources = checked.load()
        taps = checked.taps or taps
        context = make_context(sources, checked.plans, config, backend, phases, dump_graphs, taps)
        windows = _windows(context, checked, sources[0])
        context = dataclasses.replace(context, windows=windows, adapters=adapters)
        engine, records = _compile(context, sources, writer)
        memory, parallel = plan_engine_memory(engine), ranks_of(engine)
        with phases.phase("write programs"):
            write_programs(writer, engine.models, engine.self_drafts)
            slabs = {model.name: model.entry.num_slabs for model in engine.models}
            sizes = (backend.facts.is_padded, engine.context.limits.block_size)
            windowed = {item.entry.name for item in engine.self_drafts if item.entry.is_windowed}
            is_cut = parallel is not None
            states = engine.models[0].entry.state_slabs
            kept = engine.context.plans
            of_drafts = draft_states([model.entry for model in engine.models])
            own = named(adapters, engine.models[0].entry.vocab_size)
            steps = write_steps(
                writer, kept, slabs, *sizes, is_cut, windowed, states, of_drafts, own
            )
        # before minutes of compiling: what is wrong with a checkpoint is found here
        said = [text for source in sources for text in source.warnings]
        lengths = trained_lengths(checked.candidates, engine.context.limits.max_seq_len)
        said += told_of_sampling(checked.tokens)
        warnings = [*checked.warnings, *said, *lengths, *told, *told_of_quantized(engine.models)]
        warnings += write_engine_weights(engine)
        emitted = backend.emit(engine)
        records += emitted.records
        warnings += emitted.warnings
        write_configurations(writer, engine.models, checked.tokens)
        write_report(writer, records, phases.seconds)
        manifest = _describe(engine, emitted, steps, memory, checked.tokens, parallel)
        if probe is not None and config.probe and checked.tokens.file is not None:
            manifest, refused = probe_staged(manifest, backend, writer, probe, phases)
            warnings += refused
        manifest = writer.commit(manifest)
    return Compilation(manifest, records, warnings, phases.seconds)


def _windows(
    context: CompileContext, checked: CheckedModels, target: ModelSource
) -> tuple[list[int], ...]:
    """Token ids of the texts that the target is rounded for; none without `--calibration`.

    Raises:
        InputFileError: see `calibration_windows`.
    """
    path, tokens = context.config.calibration, checked.tokens
    if path is None:
        return ()
    entry = tokens.entry
    first = entry.bos_token_id if entry.add_bos else None
    size = getattr(target.config, "vocab_size", None)
    return calibration_windows(Path(path), tokens.data, first, size, context.limits.max_seq_len)


def _compile(
    context: CompileContext, sources: Sequence[ModelSource], writer: EngineWriter
) -> tuple[UnfinishedEngine, list[PassRecord]]:
    """Trace and rewrite the models; sizes and plans of the engine follow from their graphs."""
    config, plans, facts = context.config, context.plans, context.facts
    models, records = compile_models(context, sources)
    # of modules without a configuration it is not known earlier
    widest = max(models[0].entry.layers, key=lambda layer: layer.head_dim, default=None)
    if widest is not None:
        rows = "latents" if widest.values_in_keys else "heads"
        check_voters(plans, [widest.head_dim], models[0].entry.dtype, facts, rows)
    drafts, told = self_draft_programs(context, models[0])
    records += told
    check_used_bits(config, [*(x.program for x in models), *(x.program for x in drafts)])
    for model in models:
        model.entry = describe_quantization(model, context.layout_of(model.source))
    lend_weights(context, models)
    if config.pipeline_parallel_size > 1:
        records += make_stages(context, models[0])
    if config.segments:
        models[0].segments = cut_segments(models[0].program, layer_places(models[0].program))
    context = settle(context, sources, [model.program for model in models])
    return UnfinishedEngine(context, writer, models, drafts), records


def plan_engine_memory(engine: UnfinishedEngine) -> dict[str, MemoryEntry]:
    """Model name → memory; of the graphs before the backend changes them for its own compiler."""
    found, context = {}, engine.context
    for model in engine.models:
        sizes = (context.limits, model.source.dtype, context.plans, context.facts)
        memory = plan_model_memory(model.program, *sizes)
        copies = sum(
            math.prod(copy.stored_shape) * copy.stored_dtype.itemsize
            for copy in model.copies.values()
        )
        copies += sum(table.nbytes for table in model.tables.values())
        memory = dataclasses.replace(memory, weights=memory.weights + copies)
        memory = context.backend.model_memory(memory, context.limits, context.plans)
        found[model.name] = MemoryEntry(**memory.to_json())
        if model.stages:
            # no rank has more
            stages = stage_entries(context, model)
            found[model.name] = max((stage.memory for stage in stages), key=lambda m: m.total)
    return found


def write_engine_weights(engine: UnfinishedEngine) -> list[str]:
    """Write the weights of all models; returns what the user should know."""
    warnings = []
    for model in engine.models:
        with engine.context.timer.phase(f"write {model.name} weights") as advance:
            config = engine.context.config
            warnings += write_model_weights(engine.writer, model, config, advance)
    return warnings


def _describe(
    engine: UnfinishedEngine,
    emitted: Emitted,
    steps: tuple[PlanEntry, ...],
    memory: Mapping[str, MemoryEntry],
    tokens: TokenizerFiles,
    parallel: ParallelEntry | None,
) -> Manifest:
    context, facts = engine.context, engine.context.facts
    return Manifest(
        specc_version=__version__,
        torch_version=torch_version(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        backend=facts.name,
        device=facts.device,
        models=tuple(model.entry for model in engine.models),
        plans=steps,
        default_plan=context.plans[0].name,
        policy=context.config.policy,
        limits=context.limits,
        tokenizer=tokens.entry,
        memory_plan=dict(memory),
        rectangle=emitted.rectangle,
        tensorrt=emitted.tensorrt,
        parallel=parallel,
        self_drafts=tuple(item.entry for item in engine.self_drafts),
        segments=_segments(engine),
        kv_cache_dtype=context.config.kv_cache_dtype,
        activation_bits=context.config.activation_bits,
        batch_invariant=context.config.batch_invariant,
        adapters=adapter_entries(context.adapters),
    )


def _segments(engine: UnfinishedEngine) -> SegmentsEntry | None:
    segments = engine.models[0].segments
    if segments is None:
        return None
    return SegmentsEntry(len(segments), len({item.kind for item in segments}))


def ranks_of(engine: UnfinishedEngine) -> ParallelEntry | None:
    """What the manifest says of ranks and stages; None where there is one of each."""
    cut = tuple(
        model.name for model in engine.models if model.program.shard is not None or model.stages
    )
    if not cut:
        return None
    config, stages = engine.context.config, stage_entries(engine.context, engine.models[0])
    return ParallelEntry(
        config.tensor_parallel_size, cut, draft_ranks=config.draft_ranks, stages=stages
    )


def probe_staged(
    manifest: Manifest,
    backend: CompilerBackend,
    writer: EngineWriter,
    probe: Callable[[Path], dict[str, Any]],
    phases: PhaseTimer,
) -> tuple[Manifest, list[str]]:
    """Try the engine, or say why not; returns the manifest with what was found, and warnings."""
    refusal, available = backend.probe_refusal(manifest), available_memory_bytes()
    needed = manifest.memory_of(range(manifest.num_ranks))
    if refusal is None and available is not None and needed > available:
        refusal = (
            f"the engine needs {format_bytes(needed)}, {format_bytes(available)} are free here"
        )
    if refusal is not None:
        return manifest, [f"no probe: {refusal}"]
    with phases.phase("probe"):
        writer.seal(manifest)
        result = probe(writer.staging)
    default, told = default_plan(manifest, result.get("speed_ups", {}))
    return dataclasses.replace(manifest, probe=result, default_plan=default), told


def default_plan(manifest: Manifest, speed_ups: Mapping[str, float]) -> tuple[str, list[str]]:
    """The first plan that does not lose against plain decoding, and what is to be said of others.

    Args:
        manifest: of the engine.
        speed_ups: plan → times as fast as plain decoding, of those that were compared.
    """
    losing = {name for name, ratio in speed_ups.items() if ratio < LOSING}
    if manifest.default_plan not in losing:
        return manifest.default_plan, []
    names = [entry.name for entry in manifest.plans if entry.name not in losing]
    (first, *_) = [*(name for name in names if name != OFF.name), OFF.name]
    lost = ", ".join(
        f"{name} at {speed_ups[name]:.2f} times" for name in speed_ups if name in losing
    )
    return first, [
        f"plans that decode more slowly than plain decoding in the probe: {lost}; the default plan"
        f" is {first}. Pass --plan to run another one"
    ]
