"""Compile shapes without weights, in memory: what `specc bench --synthetic` runs.

Models go the way of `specc compile`; nothing is written, and no weight exists meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specc.artifact.backends import BackendFacts
from specc.artifact.in_memory import BenchModel, BenchPrograms, HeadShape
from specc.artifact.manifest_entries import LimitsEntry, MemoryEntry
from specc.artifact.weights import MemoryReader
from specc.compile_request import CompileRequest
from specc.compiler.backends.registry import compiler_backend
from specc.compiler.candidate import Candidate
from specc.compiler.compiled_model import CompiledModel, compile_models, describe_quantization
from specc.compiler.context import (
    CompileContext,
    check_budgets,
    plan_model_memory,
)
from specc.compiler.heads import taps_of, with_confidence, with_heads
from specc.compiler.model_entries import draft_states
from specc.compiler.self_drafts import self_draft_programs
from specc.config import DEFAULT_MAX_LOGITS_MB, CompileConfig
from specc.errors import ConfigError, NotCausalLMError
from specc.passes.drafters.head_source import shape_of_head
from specc.passes.drafters.head_spec import TargetFacts
from specc.passes.drafters.recognise import fit_head
from specc.passes.drafters.registry import drafter_of_config, drafters_of_files
from specc.passes.frontend import hf_model
from specc.passes.frontend.model_source import ModelSource
from specc.passes.program import constant_key
from specc.passes.program_json import program_to_json
from specc.passes.step.draw_acceptance import draw_acceptance
from specc.passes.step.fuse_step import StepProgram, fuse_step
from specc.progress import PhaseTimer
from specc.refusals import refuse
from specc.speculation.plans import OFF, SpecPlan
from specc.system.json_file import read_json

_NAMES = ("target", "draft_0")


@dataclass(frozen=True)
class ShapeOptions:
    """What the programs are compiled for.

    Args:
        plans: the default first; off is added.
        dtype: of weights and caches.
        batch_size: sequences of a step.
        context: tokens of a prompt.
        tokens: output tokens of a prompt.
        backend: whose phases the programs go through.
        acceptance: probabilities by sibling rank, drawn inside of steps; None is real acceptance.
        block_size: rows of a KV cache block.
        prefill_chunk: prompt tokens of a pass; None is the default of the backend.
        quantization: name of the layout of projections' weights, but a head's; None leaves them in
            `dtype`.
        draft_quantization: the same for the draft, a head too, or `off`; None is as the target's,
            and a head in `dtype`.
        weight_fragments: quantized weights are in the order of fragments where they may be.
    """

    plans: tuple[SpecPlan, ...]
    dtype: str
    batch_size: int
    context: int
    tokens: int
    backend: str = "eager"
    acceptance: tuple[float, ...] | None = None
    block_size: int = 16
    prefill_chunk: int | None = None
    quantization: str | None = None
    draft_quantization: str | None = None
    weight_fragments: bool = False

    @property
    def max_seq_len(self) -> int:
        return self.context + self.tokens


def load_config(directory: Path) -> Any:
    """The configuration in a directory, checked; see `hf_model.load_config`.

    Raises:
        ConfigError: it is that of a draft head.
    """
    file = directory / "config.json"
    # where it is missing, the error is that of every model
    raw = read_json(file, NotCausalLMError, "an object", "correct it") if file.is_file() else None
    if isinstance(raw, dict) and (what := _head_of(raw, str(directory))):
        raise ConfigError(
            f"--synthetic and {what} {directory}",
            "models that read tokens alone; heads are named, and made for the target's shape",
            "pass --synthetic TARGET --draft eagle3, or another name that specc bench --help"
            " has; or compile an engine with the draft and measure that",
        )
    return hf_model.load_config(directory)


def _head_of(raw: Mapping[str, Any], name: str) -> str | None:
    """What people call a draft that reads hidden states; None of what reads tokens alone."""
    return next(
        (f"the {kind.called}" for kind in drafters_of_files() if kind.says(raw, name)), None
    )


def check_positions(labels: Sequence[str], configs: Sequence[Any], options: ShapeOptions) -> None:
    """Raises ConfigError: context and output are longer than a model has positions."""
    for label, config in zip(labels, configs, strict=True):
        limit = hf_model.max_position(config)
        if limit is not None and options.max_seq_len > limit:
            raise ConfigError(
                f"--context {options.context} and --tokens {options.tokens};"
                f" {label} has {limit} positions",
                f"at most {limit} together",
                "lower --context or --tokens",
            )


def compile_shapes(
    labels: Sequence[str],
    configs: Sequence[Any],
    options: ShapeOptions,
    phases: PhaseTimer,
    head: HeadShape | None = None,
) -> BenchPrograms:
    """Compile a target, and its draft where there is one.

    Args:
        labels: what the user called the models.
        configs: of transformers; the target first.
        options: what to compile for.
        phases: tells the listener how far this is.
        head: a draft that reads the target's hidden states, in place of a second configuration.
    Raises:
        SpeccError: a model that specc does not compile, a head of another target, or too many
            positions.
    """
    check_positions(labels, configs, options)
    plans = tuple(dict.fromkeys([*options.plans, OFF]))
    backend = compiler_backend(options.backend)
    candidates = [] if head is None else [_candidate(head, labels[0], configs[0], options.dtype)]
    candidates = with_confidence(candidates, backend.facts, plans)
    asked = {
        name: own
        for name, label, config in zip(_NAMES[1:], labels[1:], configs[1:], strict=False)
        if (own := drafter_of_config(config, label)) is not None
    }
    taps, plans = taps_of(candidates), tuple(with_heads(plans, candidates))
    plans = tuple(plan.with_drafters(asked) for plan in plans) if asked else plans
    refuse(CompileRequest(CompileConfig(), plans, backend.facts, backend.options))
    limits = LimitsEntry(
        max_batch_size=options.batch_size,
        max_seq_len=_max_seq_len(configs, options, plans),
        block_size=options.block_size,
        prefill_chunk=options.prefill_chunk or backend.prefill_chunk,
        max_nodes=max(plan.num_rows for plan in plans),
        max_logits_mb=DEFAULT_MAX_LOGITS_MB,
    )
    dtype = getattr(torch, options.dtype)
    sources = [
        ModelSource.of_shape(name, label, config, dtype)
        for name, label, config in zip(_NAMES, labels, configs, strict=False)
    ]
    for candidate in candidates:
        assert candidate.head is not None
        sources.append(shape_of_head(candidate.head, sources[0], dtype, candidate.name))
    rounded = (options.draft_quantization,) if options.draft_quantization else ()
    given = CompileConfig(draft_quantize=tuple(x.partition("-g")[0] for x in rounded))
    given.rounded_drafts(len(sources) - 1)
    for draft in sources[1:]:
        draft.quantize = options.draft_quantization
    check_budgets(plans, limits.block_size, limits.max_seq_len)
    quantize, _, group = (options.quantization or "").partition("-g")
    config = CompileConfig(
        quantize=quantize or None,
        quantize_group=int(group) if group else None,
        weight_fragments=options.weight_fragments,
    )
    # layouts that weights of shapes have been measured in
    context = CompileContext(config, backend, plans, limits, phases, taps=taps, has_zeros=False)
    compiled, _ = compile_models(context, sources)
    for source in sources:
        _check_rows(source, limits.max_seq_len)
    second, _ = self_draft_programs(context, compiled[0])
    if second:
        raise ConfigError(
            f"{second[0].entry.name}, which runs a second program of the target",
            "one that runs the target's own program: its layers attend to all rows",
            "compile a checkpoint with --draft self:…, or choose another shape",
        )
    for model in compiled:
        model.entry = describe_quantization(model, context.layout_of(model.source))
    models = tuple(_bench_model(model, limits, plans, backend.facts) for model in compiled)
    steps = {plan.name: _step(plan, models, options).to_json() for plan in plans}
    return BenchPrograms(models, steps, plans, limits, options.dtype)


def _candidate(head: HeadShape, label: str, config: Any, dtype: str) -> Candidate:
    """A head that fits the target of this configuration.

    Raises:
        HeadError: it does not.
    """
    directory, target = Path(head.label), TargetFacts.of_config(label, config)
    reader = MemoryReader(head.tensors, head.label)
    spec = fit_head(reader, dict(head.config), directory, directory, target)
    assert spec is not None, "its configuration says that it is a head"
    return Candidate(_NAMES[1], directory, directory, spec.config, dtype, head=spec)


def _max_seq_len(configs: Sequence[Any], options: ShapeOptions, plans: Sequence[SpecPlan]) -> int:
    """Context, output, and the draft tokens of a last step, as far as models have positions.

    Without room for these an engine decodes the last tokens plainly: no step of the plan's.
    """
    limits = (hf_model.max_position(config) for config in configs)
    depth = max(plan.max_depth for plan in plans)
    return min([options.max_seq_len + depth, *(limit for limit in limits if limit is not None)])


def _step(plan: SpecPlan, models: Sequence[BenchModel], options: ShapeOptions) -> StepProgram:
    slabs = {model.entry.name: model.entry.num_slabs for model in models}
    entries = [model.entry for model in models]
    step = fuse_step(
        plan,
        slabs,
        block_size=options.block_size,
        states=entries[0].state_slabs,
        draft_states=draft_states(entries),
    )
    if options.acceptance is None or not plan.speculates:
        return step
    return draw_acceptance(
        step,
        options.acceptance,
        max_batch=options.batch_size,
        period=options.tokens,
        dtype=models[0].logits_dtype,
        start=options.context,
    )


def _bench_model(
    model: CompiledModel, limits: LimitsEntry, plans: Sequence[SpecPlan], facts: BackendFacts
) -> BenchModel:
    program, source = model.program, model.source
    (result,) = program.graph.find_nodes(op="output")
    constants = {constant_key(name): value for name, value in program.constants.items()}
    constants |= model.tables
    copies = {
        key: torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        for key, weight in model.copies.items()
    }
    planned = plan_model_memory(program, limits, source.dtype, plans, facts)
    beside = sum(tensor.nbytes for tensor in (*copies.values(), *model.tables.values()))
    memory = MemoryEntry(**replace(planned, weights=planned.weights + beside).to_json())
    return BenchModel(
        model.entry,
        source.module,
        program_to_json(program),
        constants,
        memory,
        result.args[0].meta["val"].dtype,
        copies,
    )


def _check_rows(source: ModelSource, needed: int) -> None:
    rows = source.position_rows
    if rows is not None and needed > rows:
        raise ConfigError(
            f"--context and --tokens of {needed} together; {source.label} has {rows} positions",
            f"at most {rows} together",
            "lower --context or --tokens",
        )
