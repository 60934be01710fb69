"""An engine of another number of ranks, made of an engine: no checkpoint and no model is needed.

The graph of the whole target is in every engine: beside a cut one as `whole.json`, else it is the
program itself. It is cut anew, goes through the phases of the backend that follow a cut, and gets
its weights from the files of the ranks. What does not depend on the ranks, as drafts and the
tokenizer, is taken over as it is.
"""

from __future__ import annotations

import dataclasses
import datetime
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from specc.artifact.backends import backend_names, facts_of
from specc.artifact.directory import check_hashes, open_engine, read_manifest, torch_version
from specc.artifact.engine_writer import EngineWriter
from specc.artifact.manifest import MANIFEST_FILE, PROFILE_FILE, Manifest
from specc.artifact.model_entry import ModelEntry
from specc.compile_request import CompileRequest
from specc.compiler.backends.base import CompilerBackend, UnfinishedEngine
from specc.compiler.backends.registry import compiler_backend
from specc.compiler.build import (
    Compilation,
    plan_engine_memory,
    probe_staged,
    ranks_of,
)
from specc.compiler.compiled_model import CompiledModel, KeptGraphs, WholeGraph
from specc.compiler.context import (
    CompileContext,
    tile_plans,
)
from specc.compiler.engine_files import (
    write_model_weights,
    write_programs,
    write_report,
    write_steps,
)
from specc.compiler.lent_weights import is_lending, move_shared
from specc.compiler.model_entries import cache_layout, draft_states, state_layout
from specc.compiler.phases import BEFORE_CUT, cut_phases, stored_phases, vote_phases
from specc.compiler.self_drafts import cut_and_lower
from specc.compiler.stages import make_stages
from specc.compiler.stored_models import in_rows, open_models, read_self_draft, read_stored
from specc.config import CompileConfig
from specc.drafters.registry import drafter_of
from specc.errors import ConfigError
from specc.passes.lower.cpu.phases import CPU
from specc.passes.pipeline import PassRecord, Pipeline
from specc.passes.segments.cut_segments import cut_segments
from specc.passes.segments.places import layer_places
from specc.passes.step.step_graph import TARGET
from specc.progress import PhaseTimer, ProgressEvent
from specc.refusals import refuse
from specc.version import __version__

_REPORT = "report.json"


def reshard_engine(
    engine: str | Path,
    output: str | Path,
    num_ranks: int,
    *,
    num_stages: int | None = None,
    force: bool = False,
    listen: Callable[[ProgressEvent], None] = lambda event: None,
    probe: Callable[[Path], dict[str, Any]] | None = None,
) -> Compilation:
    """Write the engine that compiling the checkpoints for so many ranks would write.

    Args:
        engine: directory of the one that there is, with the files of all of its ranks.
        output: engine directory to make.
        num_ranks: that share each stage of the new one's target; 1 makes it whole.
        num_stages: of the new one's target; None is as many as the old one's.
        force: replace an existing engine.
        listen: called as phases begin, advance and end.
        probe: called with the finished engine, before it gets its name; what it returns is stored.
    Raises:
        SpeccError: found / needed / do; nothing is left behind.
    """
    engine, phases = Path(engine), PhaseTimer(listen)
    # within the ranges of the options
    asked = CompileConfig(
        tensor_parallel_size=num_ranks,
        pipeline_parallel_size=1 if num_stages is None else num_stages,
    )
    with EngineWriter(output, force=force) as writer:
        with phases.phase("check engine"):
            old, backend = _check(engine, asked, num_stages is None)
        num_stages = max(1, len(old.stages)) if num_stages is None else num_stages
        config = _config_of(old, backend, num_ranks, num_stages)
        keeps_hidden = old.models[0].kept_taps is not None
        facts, options = backend.facts, backend.options
        request = CompileRequest(config, None, facts, options, reads_hidden=keeps_hidden)
        keeps_states = bool(old.models[0].state_layers)
        stateful = tuple(draft_states(old.models))
        refuse(dataclasses.replace(request, keeps_states=keeps_states, stateful_drafts=stateful))
        context = CompileContext(config, backend, config.plans, old.limits, phases)
        with open_models(engine, old, phases) as models:
            # a draft that was cut is cut again; one that was whole stays with rank 0
            cut = [m for m in models if m.name == TARGET or old.is_cut(m.entry)]
            records = []
            for model in cut:
                with phases.phase(f"rewrite {model.name}"):
                    records += _cut_anew(context, model)
            if num_stages > 1:
                records += make_stages(context, models[0])
            if config.segments:
                program = models[0].program
                models[0].segments = cut_segments(program, layer_places(program))
            own = []
            for stored in old.self_drafts:
                with phases.phase(f"rewrite {stored.name}"):
                    draft = read_self_draft(engine, old, stored, models[0])
                    has_integers = bool(draft.program.integers)
                    last = stored_phases(context, is_target=True, keeps_integers=has_integers)
                    records += cut_and_lower(context, draft, models[0], (), last)
                own.append(draft)
            plans = [dataclasses.replace(entry.plan, tile=None) for entry in old.plans]
            plans = tile_plans(plans, [model.program for model in models], config)
            new = UnfinishedEngine(dataclasses.replace(context, plans=plans), writer, models, own)
            memory, parallel = plan_engine_memory(new), ranks_of(new)
            kept = [model.name for model in models if model not in cut]
            for name in kept:
                # its file is taken over, with what steps alone read of it
                weights = old.memory_plan[name].weights
                memory[name] = dataclasses.replace(memory[name], weights=weights)
            lends, moved = is_lending(config, facts), []
            for model in models:
                shares = model.name in kept and model.program.of_target
                if shares and model.program.is_lent != lends:
                    moved.append(model.entry)
            with phases.phase("check files") as advance:
                # altered graphs have been met by now, what is left is long
                check_hashes(engine, {x: old.files[x] for x in old.weights_files}, advance)
            with phases.phase("write programs"):
                _take_over(engine, old, writer, moved)
                for entry in moved:
                    grown = move_shared(engine, old, entry, writer, lends)
                    before = memory[entry.name]
                    memory[entry.name] = dataclasses.replace(before, weights=before.weights + grown)
                write_programs(writer, cut, own)
                slabs = {model.name: model.entry.num_slabs for model in models}
                of_cache = (backend.facts.is_padded, old.limits.block_size)
                is_cut = parallel is not None
                states = models[0].entry.state_slabs, draft_states(old.models)
                steps = write_steps(writer, plans, slabs, *of_cache, is_cut, old.windowed, *states)
            warnings = []
            for model in cut:
                with phases.phase(f"write {model.name} weights") as advance:
                    warnings += write_model_weights(writer, model, config, advance)
        emitted = backend.emit(new)
        records += emitted.records
        anew = {(record.program, record.phase) for record in records}
        write_report(writer, records, phases.seconds, _earlier_passes(engine, kept, anew))
        for model, entry in zip(models, old.models, strict=True):
            model.entry = dataclasses.replace(model.entry, unread_tensors=entry.unread_tensors)
        manifest = dataclasses.replace(
            old,
            specc_version=__version__,
            torch_version=torch_version(),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            models=tuple(model.entry for model in models),
            plans=steps,
            memory_plan=memory,
            parallel=parallel,
            probe=None,
            files={},
        )
        warnings += emitted.warnings
        if PROFILE_FILE in old.files:
            warnings.append(
                "what specc tune measured holds for the other number of ranks: run it again"
            )
        if probe is not None and manifest.tokenizer.file is not None:
            manifest, refused = probe_staged(manifest, backend, writer, probe, phases)
            warnings += refused
        manifest = writer.commit(manifest)
    return Compilation(manifest, records, warnings, phases.seconds)


def _check(
    engine: Path, asked: CompileConfig, keeps_stages: bool
) -> tuple[Manifest, CompilerBackend]:
    """The manifest of an engine that can be made anew here, and the backend of both.

    Args:
        engine: the directory.
        asked: ranks and stages.
        keeps_stages: there are to be as many as there are.
    Raises:
        SpeccError: it cannot; no weight has been read.
    """
    manifest = read_manifest(engine)
    num_ranks = asked.tensor_parallel_size
    backend = compiler_backend(manifest.backend)
    takers = [x for x in backend_names() if _takes_ranks(x)]
    if backend.name not in takers:
        raise ConfigError(
            f"{engine}, an engine for the backend {backend.name}",
            f"one for {' or '.join(takers)}, which run several ranks",
            f"compile it with --backend {takers[0]} --tensor-parallel-size {num_ranks}",
        )
    _check_quantized(engine, manifest, num_ranks)
    if manifest.adapters:
        names = ", ".join(entry.name for entry in manifest.adapters)
        raise ConfigError(
            f"{engine}, an engine with adapters ({names})",
            "one without: adapters are beside the products of a target that one rank has",
            "compile the checkpoint without --lora, for as many ranks",
        )
    stages = max(1, len(manifest.stages))
    if num_ranks == manifest.tensor_parallel_size and (
        keeps_stages or asked.pipeline_parallel_size == stages
    ):
        what = f"an engine of {num_ranks} rank" + "s" * (num_ranks > 1)
        what += f" in each of {stages} stages" if stages > 1 else ""
        raise ConfigError(
            f"--tensor-parallel-size {num_ranks}, and {engine}, {what}",
            "another number of ranks than the engine has",
            "use the engine as it is, or choose another --tensor-parallel-size",
        )
    if manifest.parallel is None and facts_of(backend.name).is_on_gpu:
        raise ConfigError(
            f"{engine}, an engine of one rank for the backend {backend.name}",
            "one that was compiled for several: the graph of this one has kernels for a GPU in it,"
            " and cannot be cut any more",
            f"compile it with --backend {backend.name} {_options(asked)}",
        )
    backend.check_machine()
    # code is compiled anew, and nothing is run: any processor and any amount of memory will do
    open_engine(engine, backend="eager", available_memory=sys.maxsize)
    return manifest, backend


def _options(asked: CompileConfig) -> str:
    """Of `specc compile`, for so many ranks and stages."""
    sizes = {
        "--tensor-parallel-size": asked.tensor_parallel_size,
        "--pipeline-parallel-size": asked.pipeline_parallel_size,
    }
    return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def _check_quantized(engine: Path, manifest: Manifest, num_ranks: int) -> None:
    """Raises ConfigError: weights of the target or rounded for a draft cannot be cut anew."""
    target = manifest.models[0]
    # layout, and the file with the graph before weights were quantized
    held: list[tuple[str | None, str]] = [(target.quantization, target.whole_file)]
    for entry in manifest.self_drafts:
        draft = drafter_of(entry.name)
        held.append((None if draft is None else draft.quantization, entry.whole_file))
    for layout, whole_file in held:
        if layout is None:
            continue
        if not facts_of(manifest.backend).cuts_quantized:
            takers = [name for name in backend_names() if facts_of(name).cuts_quantized]
            raise ConfigError(
                f"{engine}, an engine of weights in {layout} for the backend {manifest.backend}",
                f"one for {' or '.join(takers)}, or weights that are not quantized",
                "compile the checkpoint anew; there, ranks of a stage do not share quantized"
                " weights",
            )
        if whole_file not in manifest.files:
            raise ConfigError(
                f"{engine}, an engine of weights in {layout} without {whole_file}, its graph before"
                " that",
                "an engine of this version of specc",
                f"compile the model with --tensor-parallel-size {num_ranks}",
            )


def _takes_ranks(backend: str) -> bool:
    """Whether engines of a backend can be cut anew.

    Padded programs are traced from a model's module, which engines do not hold.
    """
    can_cut = "tensor_parallel_size" in facts_of(backend).options
    return can_cut and not facts_of(backend).is_padded


def _config_of(
    manifest: Manifest, backend: CompilerBackend, num_ranks: int, num_stages: int
) -> CompileConfig:
    """The options that an engine was compiled with, as far as they count after its trace."""
    limits, target = manifest.limits, manifest.models[0]
    config = CompileConfig(
        plans=tuple(entry.plan for entry in manifest.plans),
        dtype=target.dtype,
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        block_size=limits.block_size,
        prefill_chunk=limits.prefill_chunk,
        backend=manifest.backend,
        policy=manifest.policy,
        max_logits_mb=limits.max_logits_mb,
        kv_cache_tokens=limits.kv_cache_tokens,
        kv_cache_dtype=manifest.kv_cache_dtype,
        allow_nonfinite_weights=target.nonfinite_weights > 0,
        tensor_parallel_size=num_ranks,
        pipeline_parallel_size=num_stages,
        draft_ranks=_draft_ranks(manifest, num_ranks),
        segments=manifest.segments is not None,
        activation_bits=manifest.activation_bits,
        batch_invariant=manifest.batch_invariant,
    )
    return backend.adapt(config)


def _draft_ranks(old: Manifest, num_ranks: int) -> int:
    """As many as before, as far as there are."""
    return min(num_ranks, old.parallel.draft_ranks if old.parallel else 1)


def _cut_anew(context: CompileContext, model: CompiledModel) -> list[PassRecord]:
    """From the whole graph to that of a rank; what the backend did to weights begins anew, too."""
    program, is_target = in_rows(model.program), model.name == TARGET
    num_ranks, is_rounded = context.config.tensor_parallel_size, bool(program.integers)
    layout = (
        *cut_phases(num_ranks),
        *stored_phases(
            context,
            is_target=is_target,
            keeps_integers=is_rounded,
            looks_up=model.entry.embedding is not None,
        ),
        *(vote_phases(context) if is_target else ()),
    )
    staged_at = context.cuts_at if is_target else None
    is_lowered = any(phase == CPU for phase, _ in layout)
    keeps_whole = num_ranks > 1 or staged_at or is_lowered or (is_rounded and is_target)
    whole = WholeGraph(program, is_rounded)
    kept = KeptGraphs(program, layout, staged_at=staged_at)
    records = Pipeline(layout, before=kept.before).run(program)
    model.unlowered = kept.unlowered
    model.whole = whole.to_json(program) if keeps_whole else None
    layers, slabs = cache_layout(program)
    states, state_slabs = state_layout(program)
    model.entry = dataclasses.replace(
        model.entry, layers=layers, slabs=slabs, state_layers=states, state_slabs=state_slabs
    )
    return records


def _take_over(
    engine: Path, manifest: Manifest, writer: EngineWriter, moved: Sequence[ModelEntry]
) -> None:
    """Link what is the same for any number of ranks; nothing of it is written to afterwards.

    `moved` are models that are written anew, though they are not cut.
    """
    made = {MANIFEST_FILE, PROFILE_FILE, _REPORT}
    made |= {name for x in moved for name in (x.program_file, manifest.weights_file(x, 0))}
    for model in (m for i, m in enumerate(manifest.models) if i == 0 or manifest.is_cut(m)):
        made |= {model.program_file, model.shard_file, model.whole_file}
        made |= {manifest.weights_file(model, rank) for rank in range(manifest.num_ranks)}
    for rank in range(manifest.num_ranks if manifest.stages else 0):
        part = manifest.of_rank(rank).models[0]
        made.add(part.program_file)
    if manifest.segments is not None:
        made.add(manifest.models[0].segments_file)
    made |= {x for draft in manifest.self_drafts for x in (draft.program_file, draft.whole_file)}
    made |= {*manifest.step_files.values(), *manifest.winners_files.values()}
    for name, entry in manifest.files.items():
        if name not in made:
            writer.link_file(engine / name, name, entry)


def _earlier_passes(
    engine: Path, kept: Container[str], anew: Container[tuple[str, str]]
) -> list[dict[str, Any]]:
    """What was done to the models before they were cut, and to those that are not.

    Args:
        engine: the directory; of one without a report nothing is known.
        kept: names of models that are taken over.
        anew: programs and phases of them that a backend runs again all the same.
    """
    if not (engine / _REPORT).is_file():
        return []
    passes = read_stored(engine / _REPORT).get("passes", ())

    def stays(record: Mapping[str, Any]) -> bool:
        program, phase = record.get("program", ""), record.get("phase", "")
        return phase in BEFORE_CUT or (program in kept and (program, phase) not in anew)

    return list(filter(stays, passes))
