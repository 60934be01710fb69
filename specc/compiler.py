"""Compile a target and its draft into one engine directory: trace, rewrite, fuse, emit."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specc import __version__
from specc.artifact import BACKENDS, EngineWriter, available_memory_bytes, torch_version
from specc.config import OFF, CompileConfig, SpecPlan
from specc.errors import ConfigError, TreeError
from specc.files import format_bytes
from specc.manifest import (
    LayerEntry,
    LimitsEntry,
    Manifest,
    MemoryEntry,
    ModelEntry,
    NativeEntry,
    PlanEntry,
    SlabEntry,
    TokenizerEntry,
)
from specc.passes import hf_model, lower_aot_cuda, lower_cpu
from specc.passes.emit import program_to_json
from specc.passes.fit_vocabulary import FitVocabulary
from specc.passes.fuse_step import fuse_step
from specc.passes.lower_cuda import CUDA_PHASES
from specc.passes.model_source import ModelSource
from specc.passes.pipeline import PHASES, PassRecord, Pipeline
from specc.passes.pipeline import Phases as Layout
from specc.passes.plan_memory import ModelMemory, PassShape, plan_memory
from specc.passes.position_limit import position_limit
from specc.passes.program import Program
from specc.passes.trace import trace
from specc.progress import Phases, ProgressEvent
from specc.tokens import TokenMap
from specc.weights import write_weights

DEFAULT_MAX_SEQ_LEN = 4096
DEFAULT_CHAIN = 4
_BACKEND_OF = {lower_aot_cuda.BACKEND: "cuda"}
_TOKENIZER_FILES = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")


@dataclass
class CompiledModel:
    """A model after its last pass, and what the manifest says about it."""

    source: ModelSource
    program: Program
    entry: ModelEntry
    memory: ModelMemory | None = None

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
    target: str | Path | nn.Module,
    draft: str | Path | nn.Module | None,
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
        draft: likewise, with the target's token map; None makes an engine with the off plan only.
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
    dtype = getattr(torch, config.dtype)
    plans = engine_plans(config, draft is not None)
    backend, fallback = choose_backend(config.backend)
    # an engine for cuda, with compiled code beside its programs
    with_packages, backend = backend == lower_aot_cuda.BACKEND, _BACKEND_OF.get(backend, backend)
    if config.dtype == "float16" and backend != "cuda":
        raise ConfigError(
            "dtype float16 for a CPU",
            "float32 or bfloat16, or the backend cuda",
            "pass --dtype bfloat16, or --backend cuda to compile for a GPU",
        )
    with EngineWriter(output, force=force) as writer:
        with phases.phase("load models"):
            sources = [ModelSource.load("target", target, dtype)]
            if draft is not None:
                sources.append(ModelSource.load("draft_0", draft, dtype))
            warnings, token_entry, tokenizer_file = _check_tokenizers(sources, tokenizer)
            warnings += fallback
        limits = _limits(sources, plans, config)  # what can be refused before tracing
        lowering = {"cuda": CUDA_PHASES, "cpu": lower_cpu.LAYOUT_PHASES}.get(backend, ())
        models, records = _compile_models(
            sources, plans, limits.max_seq_len, lowering, dump_graphs, phases
        )
        limits = _limits(sources, plans, config)  # the graphs may hold fewer positions
        for model in models:
            model.memory = _plan_model_memory(model, limits, dtype)
        with phases.phase("write programs"):
            steps = _write_programs(writer, models, plans)
        native = None
        if backend == "cpu":
            with phases.phase("compile programs"):
                lowered, native = _compile_programs(writer, models, dump_graphs)
            records += lowered
        if with_packages:
            with phases.phase("compile packages"):
                lowered_models = [(model.entry, model.program) for model in models]
                lower_aot_cuda.lower_aot_cuda(lowered_models, plans, limits, writer)
        for model in models:
            with phases.phase(f"write {model.name} weights") as advance:
                _write_model_weights(writer, model, advance)
        _write_extras(writer, models, records, phases, tokenizer_file)
        manifest = Manifest(
            specc_version=__version__,
            torch_version=torch_version(),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            backend=backend,
            device="cuda" if backend == "cuda" else "cpu",
            dtype=config.dtype,
            models=tuple(model.entry for model in models),
            plans=steps,
            default_plan=plans[0].name,
            limits=limits,
            tokenizer=token_entry,
            memory_plan={
                model.name: MemoryEntry(**model.memory.to_json())
                for model in models
                if model.memory is not None
            },
            native=native,
        )
        result = None
        available = available_memory_bytes()
        if probe is None or not config.probe or tokenizer_file is None:
            pass
        elif backend == "cuda" and not torch.cuda.is_available():
            warnings.append("no probe: this machine has no GPU that torch can use")
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
    """
    wanted = wanted or os.environ.get("SPECC_BACKEND") or None
    if wanted == lower_aot_cuda.BACKEND:
        lower_aot_cuda.check_machine()
        return wanted, []
    if wanted is not None and wanted not in BACKENDS:
        raise ConfigError(
            f"backend {wanted}", " or ".join(BACKENDS), "choose one of them, or leave it out"
        )
    # never by itself, GPU or not, until one has shown it
    if wanted == "cuda":
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


def engine_plans(config: CompileConfig, has_draft: bool) -> list[SpecPlan]:
    """Plans of an engine, the default first; off is always there.

    Raises:
        ConfigError: speculation is asked for without a draft.
    """
    plans = [plan for plan in config.plans if plan.widths]
    if not has_draft:
        if plans:
            raise ConfigError(
                f"plan {plans[0].name} without a draft",
                "a draft model that proposes tokens",
                "pass --draft, or leave out --tree and --num-speculative-tokens",
            )
        return [OFF]
    if not plans and not config.plans:
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
        with phases.phase(f"trace {source.name}"):
            program = trace(source.module, source.name)
            source.position_rows = position_limit(program)
        layout = PHASES
        if source.name != "target":
            layout = (*layout, ("vocabulary", (partial(FitVocabulary, num_ids),)))
        with phases.phase(f"rewrite {source.name}"):
            records += Pipeline((*layout, *lowering), dump).run(program)
        entry = _describe(source, program, max_seq_len)
        num_ids = num_ids or entry.vocab_size
        models.append(CompiledModel(source, program, entry))
        _check_windows(entry, plans)
    return models, records


def _describe(source: ModelSource, program: Program, max_seq_len: int) -> ModelEntry:
    geometries = list(dict.fromkeys((x.num_kv_heads, x.head_dim) for x in program.layers))
    counts = [0] * len(geometries)
    layers = []
    for layer in program.layers:
        slab = geometries.index((layer.num_kv_heads, layer.head_dim))
        layers.append(
            LayerEntry(
                layer.name,
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_dim,
                layer.window,
                slab,
                counts[slab],
            )
        )
        counts[slab] += 1
    (result,) = program.graph.find_nodes(op="output")
    return ModelEntry(
        name=source.name,
        dir=source.name.replace("_", "-"),
        architecture=source.architecture,
        model_type=source.model_type,
        vocab_size=int(result.args[0].meta["val"].shape[-1]),
        num_parameters=program.num_parameters,
        max_position=source.max_position or max_seq_len,
        layers=tuple(layers),
        slabs=tuple(
            SlabEntry(count, heads, dim)
            for count, (heads, dim) in zip(counts, geometries, strict=True)
        ),
        source=source.label,
    )


def _check_windows(entry: ModelEntry, plans: list[SpecPlan]) -> None:
    for layer in entry.layers:
        for plan in plans:
            if layer.window and plan.tree.max_depth >= layer.window:
                raise TreeError(
                    f"plan {plan.name} of depth {plan.tree.max_depth}; layer {layer.name} of"
                    f" {entry.name} has a sliding window of {layer.window}",
                    f"a tree of depth {layer.window - 1} or less",
                    "choose fewer levels",
                )


def _limits(
    sources: Sequence[ModelSource], plans: list[SpecPlan], config: CompileConfig
) -> LimitsEntry:
    longest = {source.name: source.max_position for source in sources if source.max_position}
    most = min(longest.values(), default=DEFAULT_MAX_SEQ_LEN)
    max_seq_len = config.max_seq_len or min(most, DEFAULT_MAX_SEQ_LEN)
    if longest and max_seq_len > most:
        name = min(longest, key=lambda key: longest[key])
        raise ConfigError(
            f"--max-seq-len {max_seq_len}; the {name.replace('_', ' ')} model has {most} positions",
            f"{most} or less",
            f"pass --max-seq-len {most}",
        )
    return LimitsEntry(
        max_batch_size=config.max_batch_size,
        max_seq_len=max_seq_len,
        block_size=config.block_size,
        prefill_chunk=config.prefill_chunk,
        max_nodes=max(plan.tree.num_nodes for plan in plans),
    )


def _plan_model_memory(
    model: CompiledModel, limits: LimitsEntry, dtype: torch.dtype
) -> ModelMemory:
    block = limits.block_size or limits.max_seq_len + limits.max_nodes
    blocks = -(-(limits.max_seq_len + limits.max_nodes) // block)
    batch, nodes = limits.max_batch_size, limits.max_nodes
    context = blocks * block
    chunk = min(limits.prefill_chunk, limits.max_seq_len * batch)
    prefill = PassShape(chunk, batch, batch, min(chunk, limits.max_seq_len), context)
    step = PassShape(batch * nodes, batch * nodes, batch, nodes, context)
    return plan_memory(model.program, dtype, batch * context, [prefill, step])


def _check_tokenizers(
    sources: Sequence[ModelSource], tokenizer: str | Path | None
) -> tuple[list[str], TokenizerEntry, Path | None]:
    """Compare token maps; returns warnings, the manifest's entry and the tokenizer's file."""
    target = sources[0]
    file = Path(tokenizer) if tokenizer else None
    if file is None and target.directory is not None:
        file = target.directory
    if file is not None and file.is_dir():
        file = file / "tokenizer.json"
    directory = file.parent if file else None
    eos = tuple(hf_model.eos_token_ids(directory, target.config))
    if file is None:
        return [], TokenizerEntry(None, hashlib.sha256(b"").hexdigest(), eos, None, False), None
    target_map = TokenMap.from_file(file)
    warnings = []
    for source in sources[1:]:
        if source.directory is not None:
            warnings += target_map.require_same(
                TokenMap.from_file(source.directory / "tokenizer.json")
            )
    bos = getattr(target.config, "bos_token_id", None)
    entry = TokenizerEntry(file.name, target_map.sha256(), eos, bos, _adds_bos(file, bos))
    return warnings, entry, file


def _adds_bos(file: Path, bos: int | None) -> bool:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(file)).encode("a").ids
    return bos is not None and ids[:1] == [bos]


def _write_programs(
    writer: EngineWriter, models: Sequence[CompiledModel], plans: Sequence[SpecPlan]
) -> tuple[PlanEntry, ...]:
    for model in models:
        writer.write_json(model.entry.program_file, program_to_json(model.program))
    entries = []
    slabs = {model.name: len(model.entry.slabs) for model in models}
    for plan in plans:
        file = f"steps/{plan.name}.json"
        writer.write_json(file, fuse_step(plan, slabs).to_json())
        entries.append(PlanEntry(plan.name, plan.widths, file))
    return tuple(entries)


def _compile_programs(
    writer: EngineWriter, models: Sequence[CompiledModel], dump: Path | None
) -> tuple[list[PassRecord], NativeEntry]:
    packages = [
        lower_cpu.CpuPackage(model.program, writer.path(model.entry.package_file))
        for model in models
    ]
    library = lower_cpu.LIBRARY_FILE
    records, isa_flags = lower_cpu.lower_cpu(packages, writer.path(library), dump)
    return records, NativeEntry(library, isa_flags)


def _write_model_weights(
    writer: EngineWriter,
    model: CompiledModel,
    advance: Callable[[int, int], None],
) -> None:
    file = model.entry.weights_file
    reader = model.source.reader
    specs = model.source.weight_specs(model.program)
    writer.record(file, *write_weights(specs, reader, writer.path(file), progress=advance))


def _write_extras(
    writer: EngineWriter,
    models: Sequence[CompiledModel],
    records: Sequence[PassRecord],
    phases: Phases,
    tokenizer: Path | None,
) -> None:
    for model in models:
        if model.source.directory is not None:
            config = model.source.directory / "config.json"
            writer.copy_file(config, f"{model.entry.dir}/config.json")
    if tokenizer is not None:
        writer.copy_file(tokenizer, tokenizer.name)
        for name in _TOKENIZER_FILES:
            if (tokenizer.parent / name).is_file():
                writer.copy_file(tokenizer.parent / name, name)
    report = {
        "passes": [record.to_json() for record in records],
        "phases": {name: round(value, 3) for name, value in phases.seconds.items()},
    }
    writer.write_json("report.json", report)


def _with_probe(manifest: Manifest, probe: dict[str, Any] | None) -> Manifest:
    return dataclasses.replace(manifest, probe=probe)
