"""Compile a target and its drafts into one engine directory: trace, rewrite, fuse, emit."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specc.artifact.backends import LATENT_ROWS, VALUE_WIDTH, BackendFacts
from specc.artifact.directory import available_memory_bytes, torch_version
from specc.artifact.engine_writer import EngineWriter
from specc.artifact.manifest import Manifest
from specc.artifact.manifest_entries import (
    MemoryEntry,
    ParallelEntry,
    PlanEntry,
    SegmentsEntry,
)
from specc.artifact.mla_cache import AUTO, EXPANDED
from specc.compiler.backends.base import CompilerBackend, Emitted, UnfinishedEngine
from specc.compiler.backends.registry import check_options, choose_backend
from specc.compiler.candidate import ModelLike, as_drafts
from specc.compiler.checked_models import CheckedModels
from specc.compiler.checks import check_dump
from specc.compiler.compiled_model import compile_models
from specc.compiler.engine_files import (
    told_of_sampling,
    write_configurations,
    write_programs,
    write_report,
    write_steps,
)
from specc.compiler.engine_plans import (
    check_blocks,
    check_budgets,
    check_kv_windows,
    check_outgrown,
    check_taps,
    check_views,
    check_voters,
    chosen_blocks,
    engine_plans,
    reached_positions,
    tile_plans,
    tokens_of_passes,
)
from specc.compiler.heads import taps_of, trained_lengths, with_heads
from specc.compiler.model_entries import engine_limits, fit_prefill_chunk, plan_model_memory
from specc.compiler.quantized_models import (
    check_activation_bits,
    check_cut_integers,
    check_used_bits,
    describe_quantization,
    told_of_quantized,
)
from specc.compiler.self_drafts import self_draft_programs, write_self_drafts
from specc.compiler.stages import make_stages, stage_entries
from specc.compiler.tokenizer import TokenizerFiles
from specc.compiler.weights import write_model_weights
from specc.config import CompileConfig
from specc.passes.base import Pass
from specc.passes.frontend.model_source import ModelSource
from specc.passes.lower.cpu.phases import with_layers_apart
from specc.passes.lower.cpu.quantize_linear import quantize_phases
from specc.passes.pipeline import PassRecord, Phases
from specc.passes.rewrite.absorb_latent import AbsorbLatent
from specc.passes.rewrite.require_supported import RequireAttention, RequireLayouts
from specc.passes.segments.cut_segments import cut_segments
from specc.passes.segments.places import layer_places
from specc.progress import PhaseTimer, ProgressEvent
from specc.speculation.plans import SpecPlan
from specc.speculation.taps import Taps
from specc.system.files import format_bytes
from specc.system.garbage import rare_collections
from specc.version import __version__


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
    config.check_draft_ranks(len(draft_models))
    plans = engine_plans(config, len(draft_models))
    backend, told = choose_backend(config.backend, config)
    check_options(config, backend)
    check_views(plans, config, backend.facts)
    check_kv_windows(config, len(draft_models), backend.facts)
    check_taps(taps, config, backend.facts)
    config = backend.adapt(config)
    with (
        rare_collections(),
        EngineWriter(output, force=force) as writer,
        contextlib.ExitStack() as beside,
    ):
        check_dump(dump_graphs)
        with phases.phase("check models"):
            checked = CheckedModels.check(target, draft_models, config, backend, tokenizer)
        heads = taps_of(checked.candidates)
        taps, plans = heads or taps, with_heads(plans, checked.candidates)
        check_blocks(plans, backend.facts)
        check_taps(taps, config, backend.facts)
        beside.enter_context(backend.ahead())
        with phases.phase("load models"):
            sources = checked.load()
        engine, records = _compile(
            sources, plans, config, backend, writer, phases, dump_graphs, taps
        )
        memory = plan_engine_memory(engine, backend)
        parallel = ranks_of(engine, backend.facts)
        with phases.phase("write programs"):
            write_programs(writer, engine.models)
            write_self_drafts(writer, engine.self_drafts)
            slabs = {model.name: model.entry.num_slabs for model in engine.models}
            sizes = (backend.facts.is_padded, engine.limits.block_size)
            is_cut = engine.models[0].program.shard is not None or bool(engine.models[0].stages)
            windowed = {item.entry.name for item in engine.self_drafts if item.entry.is_windowed}
            steps = write_steps(writer, engine.plans, slabs, *sizes, is_cut, windowed)
        # before minutes of compiling: what is wrong with a checkpoint is found here
        said = [text for source in sources for text in source.warnings]
        lengths = trained_lengths(checked.candidates, engine.limits.max_seq_len)
        said += told_of_sampling(checked.tokens)
        warnings = [*checked.warnings, *said, *lengths, *told, *told_of_quantized(engine.models)]
        warnings += write_engine_weights(engine)
        emitted = backend.emit(engine)
        records += emitted.records
        warnings += emitted.warnings
        write_configurations(writer, engine.models, checked.tokens)
        write_report(writer, records, phases.seconds)
        manifest = _describe(engine, backend, emitted, steps, memory, checked.tokens, parallel)
        if probe is not None and config.probe and checked.tokens.file is not None:
            manifest, refused = probe_staged(manifest, backend, writer, probe, phases)
            warnings += refused
        manifest = writer.commit(manifest)
    return Compilation(manifest, records, warnings, phases.seconds)


def _compile(
    sources: Sequence[ModelSource],
    plans: list[SpecPlan],
    config: CompileConfig,
    backend: CompilerBackend,
    writer: EngineWriter,
    phases: PhaseTimer,
    dump: Path | None,
    taps: Taps | None,
) -> tuple[UnfinishedEngine, list[PassRecord]]:
    """Trace and rewrite the models; sizes and plans of the engine follow from their graphs."""
    # what can be refused before tracing
    limits = engine_limits(sources, plans, config, backend.prefill_chunk)
    check_budgets(plans, limits.block_size, limits.max_seq_len)
    check_outgrown([source.kv_window for source in sources], limits.max_seq_len)
    keeps_integers = any(source.is_quantized for source in sources)
    check_cut_integers(config, backend.facts, plans, keeps_integers)
    check_activation_bits(config, plans, keeps_integers)
    integers = backend.facts.quantizes_experts, config.activation_bits
    rounded, kept = (
        quantize_phases(name, keeps_integers, *integers) for name in (config.quantization, None)
    )
    lowered_for = reached_positions(plans, limits.max_seq_len)
    lowering: Phases = (
        *required_phases(backend.facts),
        *backend.phases(lowered_for, tokens_of_passes(plans, limits.prefill_chunk)),
    )
    ranks = config.tensor_parallel_size, config.draft_tensor_parallel_size
    models, records = compile_models(
        sources,
        plans,
        limits.max_seq_len,
        (*rounded, *lowering),
        phases,
        dump,
        *ranks,
        config.kv_cache_dtype,
        latent_pass(config, plans, backend.facts),
        backend.phase_of_stages(config.pipeline_parallel_size, limits.max_seq_len),
        taps,
        backend.facts.expands_prompts,
        lowering_of_heads=(*kept, *lowering),
        layers_apart=(layers_apart := cuts_layers(config, backend)),
    )
    # of modules without a configuration it is not known earlier
    widest = max(models[0].entry.layers, key=lambda layer: layer.head_dim, default=None)
    if widest is not None:
        rows = "latents" if widest.values_in_keys else "heads"
        check_voters(plans, [widest.head_dim], models[0].entry.dtype, backend.facts, rows)
    lowering = with_layers_apart(lowering) if layers_apart else lowering
    sizes = (plans, limits.max_seq_len, lowering, phases, dump, config.kv_cache_dtype)
    drafts, told = self_draft_programs(models[0], *sizes, config.quantization, *integers)
    records += told
    check_used_bits(config, [*(x.program for x in models), *(x.program for x in drafts)])
    for model in models:
        model.entry = describe_quantization(model, config.quantization)
    # the graphs may hold fewer positions
    limits = engine_limits(sources, plans, config, backend.prefill_chunk)
    typed = [(model.program, model.source.dtype) for model in models]
    limits = fit_prefill_chunk(limits, config, typed, backend.facts)
    plans = tile_plans(plans, [model.program for model in models], config)
    if config.pipeline_parallel_size > 1:
        own = backend.phases(lowered_for)
        records += make_stages(models[0], config.pipeline_parallel_size, own, dump)
    if config.segments:
        models[0].segments = cut_segments(models[0].program, layer_places(models[0].program))
    engine = UnfinishedEngine(writer, models, plans, limits, config, phases, dump, drafts)
    return engine, records


def cuts_layers(config: CompileConfig, backend: CompilerBackend) -> bool:
    """Whether the target is cut between its layers after the phases of the backend."""
    is_cut = config.segments or config.pipeline_parallel_size > 1
    return is_cut and not backend.cuts_first


def required_phases(facts: BackendFacts) -> Phases:
    """What refuses models that a backend does not run, before anything slow is done for them."""
    kinds = (RequireAttention, RequireLayouts)
    return (("backend", tuple(functools.partial(kind, facts) for kind in kinds)),)


def latent_pass(
    config: CompileConfig, plans: Sequence[SpecPlan], facts: BackendFacts
) -> Callable[[int], Pass] | None:
    """What has caches hold latents, of a number of ranks; None where that is not to be."""
    computes = LATENT_ROWS in facts.attention_extras
    if config.mla_cache == EXPANDED or (config.mla_cache == AUTO and not computes):
        return None
    return functools.partial(
        AbsorbLatent,
        config.mla_cache,
        config.kv_cache_dtype,
        most=facts.most_latent,
        takes_two_widths=VALUE_WIDTH in facts.attention_extras,
        most_voting=facts.most_voting_dim if chosen_blocks(plans) else None,
    )


def plan_engine_memory(
    engine: UnfinishedEngine, backend: CompilerBackend
) -> dict[str, MemoryEntry]:
    """Model name → memory; of the graphs before the backend changes them for its own compiler."""
    found = {}
    for model in engine.models:
        sizes = (engine.limits, model.source.dtype, engine.plans, backend.facts)
        memory = plan_model_memory(model.program, *sizes)
        copies = sum(
            math.prod(copy.stored_shape) * copy.stored_dtype.itemsize
            for copy in model.copies.values()
        )
        copies += sum(table.nbytes for table in model.tables.values())
        memory = dataclasses.replace(memory, weights=memory.weights + copies)
        memory = backend.model_memory(memory, engine.limits, engine.plans)
        found[model.name] = MemoryEntry(**memory.to_json())
        if model.stages:
            # no rank has more
            stages = stage_entries(engine, backend.facts)
            found[model.name] = max((stage.memory for stage in stages), key=lambda m: m.total)
    return found


def write_engine_weights(engine: UnfinishedEngine) -> list[str]:
    """Write the weights of all models; returns what the user should know."""
    warnings = []
    for model in engine.models:
        with engine.phases.phase(f"write {model.name} weights") as advance:
            warnings += write_model_weights(engine.writer, model, engine.config, advance)
    return warnings


def _describe(
    engine: UnfinishedEngine,
    backend: CompilerBackend,
    emitted: Emitted,
    steps: tuple[PlanEntry, ...],
    memory: Mapping[str, MemoryEntry],
    tokens: TokenizerFiles,
    parallel: ParallelEntry | None,
) -> Manifest:
    return Manifest(
        specc_version=__version__,
        torch_version=torch_version(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        backend=backend.facts.name,
        device=backend.facts.device,
        models=tuple(model.entry for model in engine.models),
        plans=steps,
        default_plan=engine.plans[0].name,
        policy=engine.config.policy,
        limits=engine.limits,
        tokenizer=tokens.entry,
        memory_plan=dict(memory),
        rectangle=emitted.rectangle,
        tensorrt=emitted.tensorrt,
        parallel=parallel,
        self_drafts=tuple(item.entry for item in engine.self_drafts),
        segments=_segments(engine),
        kv_cache_dtype=engine.config.kv_cache_dtype,
        activation_bits=engine.config.activation_bits,
    )


def _segments(engine: UnfinishedEngine) -> SegmentsEntry | None:
    segments = engine.models[0].segments
    if segments is None:
        return None
    return SegmentsEntry(len(segments), len({item.kind for item in segments}))


def ranks_of(engine: UnfinishedEngine, facts: BackendFacts) -> ParallelEntry | None:
    """What the manifest says of ranks and stages; None where there is one of each."""
    cut = tuple(
        model.name for model in engine.models if model.program.shard is not None or model.stages
    )
    if not cut:
        return None
    config, stages = engine.config, stage_entries(engine, facts)
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
    return dataclasses.replace(manifest, probe=result), []
