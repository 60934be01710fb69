"""Compile shapes without weights, in memory: what `specc bench --synthetic` runs.

The passes are those of `specc compile`; nothing is written, and no weight exists while they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specc.artifact.in_memory import BenchModel, BenchPrograms
from specc.artifact.manifest import LimitsEntry, MemoryEntry, ModelEntry
from specc.compiler.model_entries import cache_layout, default_prefill_chunk, plan_model_memory
from specc.config import DEFAULT_MAX_LOGITS_MB
from specc.errors import ConfigError
from specc.passes.frontend import hf_model
from specc.passes.frontend.position_limit import position_limit
from specc.passes.frontend.trace_flat import trace
from specc.passes.lower.cuda.phases import cuda_phases
from specc.passes.lower.emit import constant_key, program_to_json
from specc.passes.pipeline import PHASES, Pipeline
from specc.passes.program import Program
from specc.passes.rewrite.fit_vocabulary import FitVocabulary
from specc.passes.step.draw_acceptance import draw_acceptance
from specc.passes.step.fuse_step import StepProgram, fuse_step
from specc.progress import Phases
from specc.speculation.plans import OFF, SpecPlan

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
        is_lowered: run the phases before capture on a GPU.
        acceptance: probabilities by sibling rank, drawn inside of steps; None is real acceptance.
        block_size: rows of a KV cache block.
        prefill_chunk: prompt tokens of a pass; None is the default of the backend.
    """

    plans: tuple[SpecPlan, ...]
    dtype: str
    batch_size: int
    context: int
    tokens: int
    is_lowered: bool = False
    acceptance: tuple[float, ...] | None = None
    block_size: int = 16
    prefill_chunk: int | None = None

    @property
    def max_seq_len(self) -> int:
        return self.context + self.tokens


def load_config(directory: Path) -> Any:
    """The configuration in a directory, checked; see `hf_model.load_config`."""
    return hf_model.load_config(directory)


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
    labels: Sequence[str], configs: Sequence[Any], options: ShapeOptions, phases: Phases
) -> BenchPrograms:
    """Compile a target, and its draft where there is one.

    Args:
        labels: what the user called the models.
        configs: of transformers; the target first.
        options: what to compile for.
        phases: tells the listener how far this is.
    Raises:
        SpeccError: a model that specc does not compile, or too many positions.
    """
    check_positions(labels, configs, options)
    plans = tuple(dict.fromkeys([*options.plans, OFF]))
    limits = LimitsEntry(
        max_batch_size=options.batch_size,
        max_seq_len=_max_seq_len(configs, options, plans),
        block_size=options.block_size,
        prefill_chunk=options.prefill_chunk
        or default_prefill_chunk("cuda" if options.is_lowered else "eager"),
        max_nodes=max(plan.num_rows for plan in plans),
        max_logits_mb=DEFAULT_MAX_LOGITS_MB,
    )
    dtype = getattr(torch, options.dtype)
    models: list[BenchModel] = []
    for name, label, config in zip(_NAMES, labels, configs, strict=False):
        module = hf_model.build_on_meta(config, dtype)
        with phases.phase(f"trace {name}"):
            program = trace(module, name)
        _check_rows(label, position_limit(program), limits.max_seq_len)
        layout = list(PHASES)
        if models:
            num_ids = models[0].entry.vocab_size
            layout.append(("vocabulary", (partial(FitVocabulary, num_ids),)))
        layout += cuda_phases(limits.max_seq_len) if options.is_lowered else ()
        with phases.phase(f"rewrite {name}"):
            Pipeline(tuple(layout)).run(program)
        models.append(_model(label, config, module, program, limits, dtype, plans))
    steps = {plan.name: _step(plan, models, options).to_json() for plan in plans}
    return BenchPrograms(tuple(models), steps, plans, limits, options.dtype)


def _max_seq_len(configs: Sequence[Any], options: ShapeOptions, plans: Sequence[SpecPlan]) -> int:
    """Context, output, and the draft tokens of a last step, as far as models have positions.

    Without room for these an engine decodes the last tokens plainly: no step of the plan's.
    """
    limits = (hf_model.max_position(config) for config in configs)
    depth = max(plan.max_depth for plan in plans)
    return min([options.max_seq_len + depth, *(limit for limit in limits if limit is not None)])


def _step(plan: SpecPlan, models: Sequence[BenchModel], options: ShapeOptions) -> StepProgram:
    step = fuse_step(plan, {model.entry.name: len(model.entry.slabs) for model in models})
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


def _model(
    label: str,
    config: Any,
    module: Any,
    program: Program,
    limits: LimitsEntry,
    dtype: torch.dtype,
    plans: Sequence[SpecPlan],
) -> BenchModel:
    (result,) = program.graph.find_nodes(op="output")
    logits = result.args[0].meta["val"]
    layers, slabs = cache_layout(program)
    entry = ModelEntry(
        name=program.name,
        dir=program.name,
        architecture=type(module).__name__,
        model_type=config.model_type,
        vocab_size=int(logits.shape[-1]),
        num_parameters=program.num_parameters,
        max_position=hf_model.max_position(config) or limits.max_seq_len,
        layers=layers,
        slabs=slabs,
        source=label,
        dtype=str(dtype).removeprefix("torch."),
    )
    constants = {constant_key(name): value for name, value in program.constants.items()}
    memory = MemoryEntry(**plan_model_memory(program, limits, dtype, plans).to_json())
    return BenchModel(entry, module, program_to_json(program), constants, memory, logits.dtype)


def _check_rows(label: str, rows: int | None, needed: int) -> None:
    if rows is not None and needed > rows:
        raise ConfigError(
            f"--context and --tokens of {needed} together; {label} has {rows} positions",
            f"at most {rows} together",
            "lower --context or --tokens",
        )
