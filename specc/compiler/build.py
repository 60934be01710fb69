"""Compile a target and its draft into one engine directory: trace, rewrite, fuse, emit."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specc import __version__
from specc.artifact.directory import BACKENDS, EngineWriter, available_memory_bytes, torch_version
from specc.artifact.manifest import (
    ON_GPU,
    RECTANGULAR,
    Manifest,
    MemoryEntry,
    ModelEntry,
    NativeEntry,
    PlanEntry,
)
from specc.compiler.checks import (
    ModelLike,
    advice_for,
    check_dump,
    check_lengths,
    check_logits,
    choose_dtypes,
    errors_of,
    open_models,
)
from specc.compiler.model_entries import (
    check_windows,
    describe_model,
    engine_limits,
    fit_prefill_chunk,
    plan_model_memory,
)
from specc.compiler.rectangular import (
    dense,
    lower_rectangular,
    native_operators,
    rectangle_of,
    with_rim,
)
from specc.compiler.tensorrt import build_engines, check_tensorrt
from specc.compiler.tokenizer import EngineTokenizer, check_tokenizers
from specc.compiler.weights import write_model_weights
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.passes.frontend.model_source import ModelSource
from specc.passes.frontend.position_limit import position_limit
from specc.passes.frontend.trace_flat import trace
from specc.passes.lower.cpu import lower as lower_cpu
from specc.passes.lower.cuda import aot as lower_aot_cuda
from specc.passes.lower.cuda.phases import cuda_phases
from specc.passes.lower.emit import program_to_json
from specc.passes.lower.inductor.directory import inductor_directory
from specc.passes.lower.tensorrt import torch_tensorrt_engine as lower_torch_tensorrt
from specc.passes.memory import ModelMemory, logit_row_bytes
from specc.passes.pipeline import PHASES, PassRecord, Pipeline
from specc.passes.pipeline import Phases as Layout
from specc.passes.program import Program
from specc.passes.rewrite.fit_vocabulary import FitVocabulary
from specc.passes.step.fuse_step import fuse_step
from specc.passes.step.tiles import tile_plan
from specc.progress import Phases, ProgressEvent
from specc.speculation.plans import OFF, SpecPlan
from specc.system.files import format_bytes

DEFAULT_CHAIN = 4
# backends that are another form of one
_BACKEND_OF = {lower_aot_cuda.BACKEND: "cuda", lower_torch_tensorrt.BACKEND: "tensorrt"}
# as people and other programs call them
_BACKEND_ALIASES = {"gpu": "cuda", "trt": "tensorrt", "onnxruntime": "onnx", "torch": "eager"}
_TOKENIZER_FILES = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")


@dataclass
class CompiledModel:
    """A model after its last pass, and what the manifest says about it."""

    source: ModelSource
    program: Program
    entry: ModelEntry
    memory: ModelMemory | None = None
    # over rectangles, where the backend takes those
    rectangular: Program | None = None

    @property
    def name(self) -> str:
        return self.entry.name


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
) -> Compilation:
    """Compile and write an engine.

    Args:
        target: Hugging Face directory or id, or a module (input_ids, position_ids) → logits.
        drafts: likewise, with the target's token map: one or several. None: lookups alone, or no
            plan but off.
        output: engine directory to make.
        config: options.
        tokenizer: directory or tokenizer.json, where the target is a module.
        force: replace an existing engine.
        dump_graphs: directory that gets each program's graph after each phase.
        listen: called as phases begin, advance and end.
        probe: called with the finished engine, before it gets its name; what it returns is stored.
    Raises:
        SpeccError: found / needed / do; nothing is left behind.
    """
    phases = Phases(listen)
    draft_models = as_drafts(drafts)
    config.dtypes_of(len(draft_models))
    plans = engine_plans(config, len(draft_models))
    chosen, warnings = choose_backend(config.backend)
    backend = _BACKEND_OF.get(chosen, chosen)
    is_rectangular = backend in RECTANGULAR
    if is_rectangular:
        config = dense(config)
    # an engine for cuda, with compiled code beside its programs
    with_packages = chosen == lower_aot_cuda.BACKEND
    with inductor_directory(), EngineWriter(output, force=force) as writer:
        check_dump(dump_graphs)
        with phases.phase("check models"):
            candidates = open_models(target, draft_models)
            dtypes, told = choose_dtypes(config, candidates, backend)
            tensorrt = check_tensorrt(config, dtypes) if backend == "tensorrt" else None
            check_lengths(config, candidates)
            check_logits(config, candidates[0], dtypes[0])
            tokens = check_tokenizers(candidates, tokenizer)
            warnings = [*tokens.warnings, *told, *warnings]
        with phases.phase("load models"):
            sources = []
            for candidate, dtype in zip(candidates, dtypes, strict=True):
                with errors_of(candidate.name), advice_for(candidate.model):
                    kind = getattr(torch, dtype)
                    sources.append(ModelSource.load(candidate.name, candidate.model, kind))
        # what can be refused before tracing
        limits = engine_limits(sources, plans, config, backend)
        phases_of = {"cuda": cuda_phases(limits.max_seq_len), "cpu": lower_cpu.LAYOUT_PHASES}
        lowering = phases_of.get(backend, ())
        models, records = _compile_models(
            sources, plans, limits.max_seq_len, lowering, dump_graphs, phases
        )
        # the graphs may hold fewer positions
        limits = engine_limits(sources, plans, config, backend)
        typed = [(m.program, s.dtype) for m, s in zip(models, sources, strict=True)]
        limits = fit_prefill_chunk(limits, config, typed)
        row_bytes = {model.name: logit_row_bytes(model.program) for model in models}
        batch, limit_mb = config.max_batch_size, config.max_logits_mb
        plans = [tile_plan(plan, row_bytes, batch, limit_mb) for plan in plans]
        for model, source in zip(models, sources, strict=True):
            model.memory = plan_model_memory(model.program, limits, source.dtype, plans)
        rectangle = rectangle_of(limits, plans) if is_rectangular else None
        for model in models:
            if rectangle is not None and model.memory is not None:
                model.memory = with_rim(model.memory, rectangle)
        with phases.phase("write programs"):
            steps = _write_programs(writer, models, plans, is_rectangular)
        # before minutes of compiling: what is wrong with a checkpoint is found here
        for model in models:
            with phases.phase(f"write {model.name} weights") as advance:
                warnings += write_model_weights(writer, model, config, advance)
        native = None
        if backend == "cpu":
            with phases.phase("compile programs") as advance:
                lowered, native = _compile_programs(writer, models, dump_graphs, advance)
            records += lowered
        if with_packages:
            with phases.phase("compile packages"):
                lowered_models = [(model.entry, model.program) for model in models]
                lower_aot_cuda.lower_aot_cuda(lowered_models, plans, limits, writer)
        if rectangle is not None:
            records += lower_rectangular(writer, models, rectangle, dump_graphs, phases)
            if backend == "onnx":
                native = native_operators(writer)
            if tensorrt is not None:
                by_torch = chosen == lower_torch_tensorrt.BACKEND
                warnings += build_engines(writer, models, plans, limits, config, phases, by_torch)
        _write_extras(writer, models, records, phases, tokens)
        manifest = Manifest(
            specc_version=__version__,
            torch_version=torch_version(),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            backend=backend,
            device="cuda" if backend in ON_GPU else "cpu",
            models=tuple(model.entry for model in models),
            plans=steps,
            default_plan=plans[0].name,
            policy=config.policy,
            limits=limits,
            tokenizer=tokens.entry,
            memory_plan={
                model.name: MemoryEntry(**model.memory.to_json())
                for model in models
                if model.memory is not None
            },
            native=native,
            rectangle=rectangle,
            tensorrt=tensorrt,
        )
        result = None
        available = available_memory_bytes()
        if probe is None or not config.probe or tokens.file is None:
            pass
        elif backend in ON_GPU and not torch.cuda.is_available():
            warnings.append("no probe: this machine has no GPU that torch can use")
        elif backend == "onnx" and "bfloat16" in dtypes:
            warnings.append(
                "no probe: onnxruntime's CPU provider does not compute in bfloat16, so that"
                " specc run needs --backend eager; the ONNX files are for other readers"
            )
        elif available is not None and manifest.total_memory > available:
            warnings.append(
                f"no probe: the engine needs {format_bytes(manifest.total_memory)},"
                f" {format_bytes(available)} are free here"
            )
        else:
            with phases.phase("probe"):
                writer.seal(manifest)
                result = probe(writer.staging)
        manifest = writer.commit(_with_probe(manifest, result))
    return Compilation(manifest, records, warnings, phases.seconds)


def choose_backend(wanted: str | None) -> tuple[str, list[str]]:
    """The backend of an engine, and warnings: where none is named, what this machine can build.

    Raises:
        CompilerError: the backend cpu is asked for, and there is no C++ compiler; or
            aot-inductor, and no GPU.
        TensorRTError: torch-tensorrt is asked for, and it cannot build here.
    """
    given = wanted
    wanted = wanted or os.environ.get("SPECC_BACKEND") or None
    if wanted == lower_aot_cuda.BACKEND:
        lower_aot_cuda.check_machine()
        return wanted, []
    if wanted == lower_torch_tensorrt.BACKEND:
        lower_torch_tensorrt.check_machine()
        return wanted, []
    if wanted is not None and wanted not in BACKENDS:
        close = difflib.get_close_matches(wanted, BACKENDS, n=1)
        meant = _BACKEND_ALIASES.get(wanted, close[0] if close else None)
        by_option = "--backend " if given else "SPECC_BACKEND="
        raise ConfigError(
            f"{by_option}{wanted}",
            " or ".join(BACKENDS),
            f"say {by_option}{meant}" if meant else "choose one of them, or leave it out",
        )
    # never by itself: cuda until a GPU has shown it, and what is for other runtimes
    if wanted in ("cuda", *RECTANGULAR):
        return wanted, []
    missing = None if wanted == "eager" else lower_cpu.missing_compiler()
    if missing is None:
        return wanted or "cpu", []
    if wanted == "cpu":
        raise missing
    return "eager", [
        f"{missing.found}, so the engine runs its graphs operator by operator, which is several"
        f" times slower; for compiled code: {missing.do.split(', or ')[0]}"
    ]


def as_drafts(drafts: ModelLike | Sequence[ModelLike] | None) -> list[ModelLike]:
    """None, one draft or several as a list."""
    if drafts is None:
        return []
    return [drafts] if isinstance(drafts, (str, Path, nn.Module)) else list(drafts)


def engine_plans(config: CompileConfig, num_drafts: int) -> list[SpecPlan]:
    """Plans of an engine, the default first; off is always there.

    Raises:
        ConfigError: a plan asks for a draft that there is not.
    """
    plans = [plan for plan in config.plans if plan.speculates]
    known = [f"draft_{number}" for number in range(num_drafts)]
    for plan in plans:
        if missing := [model for model in plan.models if model not in known]:
            raise ConfigError(
                f"plan {plan.name} without a draft"
                if not known
                else f"plan {plan.name} of {missing[0]}, and {num_drafts} drafts",
                "a draft model that proposes tokens",
                "pass --draft, or leave out --tree and --num-speculative-tokens",
            )
    if not plans and not config.plans and known:
        plans = [SpecPlan.from_widths((1,) * DEFAULT_CHAIN)]
    return list(dict.fromkeys([*plans, OFF]))


def _compile_models(
    sources: Sequence[ModelSource],
    plans: list[SpecPlan],
    max_seq_len: int,
    lowering: Layout,
    dump: Path | None,
    phases: Phases,
) -> tuple[list[CompiledModel], list[PassRecord]]:
    models, records = [], []
    num_ids = 0
    for source in sources:
        # a directory's module is not the user's own
        own = source.label if source.directory is not None else source.module
        with phases.phase(f"trace {source.name}"), advice_for(own):
            program = trace(source.module, source.name)
            source.position_rows = position_limit(program)
        layout = PHASES
        if source.name != "target":
            layout = (*layout, ("vocabulary", (partial(FitVocabulary, num_ids),)))
        with phases.phase(f"rewrite {source.name}"), advice_for(own):
            records += Pipeline((*layout, *lowering), dump).run(program)
        entry = describe_model(source, program, max_seq_len)
        num_ids = num_ids or entry.vocab_size
        models.append(CompiledModel(source, program, entry))
        check_windows(entry, plans)
    return models, records


def _write_programs(
    writer: EngineWriter,
    models: Sequence[CompiledModel],
    plans: Sequence[SpecPlan],
    is_rectangular: bool,
) -> tuple[PlanEntry, ...]:
    for model in models:
        writer.write_json(model.entry.program_file, program_to_json(model.program))
    entries = []
    slabs = {model.name: len(model.entry.slabs) for model in models}
    for plan in plans:
        file = f"steps/{plan.name}.json"
        writer.write_json(file, fuse_step(plan, slabs, is_rectangular).to_json())
        entries.append(PlanEntry.of(plan, file))
    return tuple(entries)


def _compile_programs(
    writer: EngineWriter,
    models: Sequence[CompiledModel],
    dump: Path | None,
    advance: Callable[[int, int], None],
) -> tuple[list[PassRecord], NativeEntry]:
    packages = [
        lower_cpu.CpuPackage(model.program, writer.path(model.entry.package_file))
        for model in models
    ]
    library = lower_cpu.LIBRARY_FILE
    records, isa_flags = lower_cpu.lower_cpu(packages, writer.path(library), dump, advance)
    return records, NativeEntry(library, isa_flags)


def _write_extras(
    writer: EngineWriter,
    models: Sequence[CompiledModel],
    records: Sequence[PassRecord],
    phases: Phases,
    tokens: EngineTokenizer,
) -> None:
    for model in models:
        if model.source.directory is not None:
            config = model.source.directory / "config.json"
            writer.copy_file(config, f"{model.entry.dir}/config.json")
    if tokens.file is not None:
        writer.write_bytes(tokens.file.name, tokens.data)
        for name in _TOKENIZER_FILES:
            if (tokens.file.parent / name).is_file():
                writer.copy_file(tokens.file.parent / name, name)
    report = {
        "passes": [record.to_json() for record in records],
        "phases": {name: round(value, 3) for name, value in phases.seconds.items()},
    }
    writer.write_json("report.json", report)


def _with_probe(manifest: Manifest, probe: dict[str, Any] | None) -> Manifest:
    return dataclasses.replace(manifest, probe=probe)
