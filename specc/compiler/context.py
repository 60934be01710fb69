"""What every step of a compilation knows: options, backend, plans, sizes, and where to report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from specc.artifact.backends import ZERO_POINTS, BackendFacts
from specc.artifact.manifest_entries import LimitsEntry
from specc.artifact.state_entry import kept_states
from specc.compiler.state_checkpoints import with_checkpoints
from specc.config import CompileConfig
from specc.drafters.views import View
from specc.errors import ConfigError
from specc.lora.peft_files import LoraFiles
from specc.passes.frontend.model_source import ModelSource
from specc.passes.memory import (
    ModelMemory,
    PassShape,
    StateCounts,
    logit_row_bytes,
    plan_memory,
)
from specc.passes.pipeline import Phases
from specc.passes.program import Program
from specc.passes.step.step_graph import TARGET
from specc.passes.step.tiles import logit_rows, pass_rows, tile_plan
from specc.progress import PhaseTimer
from specc.quantize_options import layout_of
from specc.speculation.choose_plans import DEFAULT_CHAIN
from specc.speculation.kv_window import KVWindow
from specc.speculation.plans import OFF, SpecPlan, replay_rows
from specc.speculation.taps import Taps

DEFAULT_MAX_SEQ_LEN = 4096
LEAST_PREFILL_CHUNK = 512


class Lowering(Protocol):
    """What is asked of a backend before the engine is written: a part of `CompilerBackend`."""

    facts: BackendFacts
    prefill_chunk: int
    cuts_first: bool

    def phases(self, max_seq_len: int, pass_tokens: int | None = None) -> Phases: ...

    def invariant_phases(self, phases: Phases) -> Phases: ...

    def phase_of_stages(self, num_stages: int, max_seq_len: int) -> str | None: ...

    def model_memory(
        self, memory: ModelMemory, limits: LimitsEntry, plans: Sequence[SpecPlan]
    ) -> ModelMemory: ...


@dataclass(frozen=True)
class CompileContext:
    """What every step of a compilation knows.

    Args:
        config: options, as the backend has adapted them.
        plans: of the engine, the default first; in tiles once the logits of the models are known.
        timer: tells the listener how far this is.
        dump: directory that gets each program's graph after each phase, or None.
        taps: hidden states that the target keeps for drafts.
        keeps_integers: a checkpoint is quantized, and its integers are kept.
        windows: token ids of texts that the target's weights are rounded for.
        has_zeros: weights in 4 bits get zero points, where the backend reads them.
        adapters: of the target, in the order of their numbers.
    """

    config: CompileConfig
    backend: Lowering
    plans: Sequence[SpecPlan]
    limits: LimitsEntry
    timer: PhaseTimer
    dump: Path | None = None
    taps: Taps | None = None
    keeps_integers: bool = False
    windows: tuple[list[int], ...] = ()
    has_zeros: bool = True
    adapters: tuple[LoraFiles, ...] = ()

    @property
    def facts(self) -> BackendFacts:
        return self.backend.facts

    @property
    def quantization(self) -> str | None:
        """How `--quantize` stores projections here; None in the engine's dtype."""
        return self._layout(self.config.quantize)

    def rounded_to(self, model: ModelSource) -> str | None:
        """The format that a model is rounded to, as options name it; None is none, as is `off`."""
        if model.quantize is not None:
            return model.quantize
        return None if model.head is not None else self.config.quantize

    def layout_of(self, model: ModelSource) -> str | None:
        """How projections of a model are stored; None in its dtype."""
        return self._layout(self.rounded_to(model))

    def _layout(self, kind: str | None) -> str | None:
        asked = layout_of(kind, self.config.quantize_group)
        takes = self.has_zeros and ZERO_POINTS in self.facts.quantized_extras
        return f"{asked}-zeros" if takes and kind == "int4" else asked

    @property
    def positions(self) -> int:
        """Rows of passes are at positions 0 … positions - 1."""
        return reached_positions(self.plans, self.limits.max_seq_len)

    @property
    def cuts_layers(self) -> bool:
        """Whether the target is cut between its layers after the phases of the backend."""
        is_cut = self.config.segments or self.config.pipeline_parallel_size > 1
        return is_cut and not self.backend.cuts_first

    @property
    def cuts_at(self) -> str | None:
        """See `CompilerBackend.phase_of_stages`."""
        return self.backend.phase_of_stages(self.config.pipeline_parallel_size, self.positions)

    def lowering(self) -> Phases:
        """Phases of the backend."""
        tokens = tokens_of_passes(self.plans, self.limits.prefill_chunk)
        return self.backend.phases(self.positions, tokens)


def make_context(
    sources: Sequence[ModelSource],
    plans: Sequence[SpecPlan],
    config: CompileConfig,
    backend: Lowering,
    timer: PhaseTimer,
    dump: Path | None = None,
    taps: Taps | None = None,
) -> CompileContext:
    """What is known before anything is traced; sizes that cannot be are refused.

    Raises:
        ConfigError: see `engine_limits`, `check_budgets` and `check_outgrown`.
    """
    limits = engine_limits(sources, plans, config, backend.prefill_chunk)
    check_budgets(plans, limits.block_size, limits.max_seq_len)
    check_outgrown([source.kv_window for source in sources], limits.max_seq_len)
    keeps_integers = any(source.is_quantized for source in sources)
    return CompileContext(config, backend, plans, limits, timer, dump, taps, keeps_integers)


def settle(
    context: CompileContext, sources: Sequence[ModelSource], programs: Sequence[Program]
) -> CompileContext:
    """With the limits and plans that programs have after their last phase.

    Raises:
        ConfigError: see `engine_limits` and `tile_plans`.
    """
    config, plans = context.config, tile_plans(context.plans, programs, context.config)
    # the graphs may hold fewer positions
    limits = engine_limits(sources, context.plans, config, context.backend.prefill_chunk)
    typed = [(program, x.dtype) for program, x in zip(programs, sources, strict=True)]
    limits = fit_prefill_chunk(limits, config, typed, context.facts)
    limits = with_checkpoints(limits, config, *typed[0])
    return replace(context, limits=limits, plans=plans)


def engine_plans(config: CompileConfig, num_drafts: int) -> list[SpecPlan]:
    """Plans of an engine, the default first; off is always there.

    Raises:
        ConfigError: a plan asks for a draft that there is not.
    """
    plans = [plan for plan in config.plans if plan.speculates]
    known = [f"draft_{number}" for number in range(num_drafts)]
    for plan in plans:
        if missing := [model for model in plan.model_names if model not in known]:
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


def reached_positions(plans: Sequence[SpecPlan], max_seq_len: int) -> int:
    """Positions 0 … n - 1 that passes may have.

    Nodes of trees stay below `max_seq_len`; a block is as long as ever, and may reach beyond.

    Args:
        max_seq_len: tokens of a sequence.
    """
    written = (x.num_written(plan.max_depth) for plan in plans for x in plan.models)
    return max_seq_len + max(written, default=0)


def tokens_of_passes(plans: Sequence[SpecPlan], prefill_chunk: int) -> int:
    """Tokens that one sequence brings to a pass of a model, at most.

    Programs of block drafters whose layers differ have words for as many, and an engine may get
    deeper trees later (`specc tune`): theirs are counted for the deepest one, which is at most
    `2 * MOST_ROWS + 1` tokens, of two words.

    Args:
        prefill_chunk: tokens of a pass over prompts.
    """
    models = {(plan, model) for plan in plans for model in (TARGET, *plan.model_names)}
    deepest = [drafter.most_rows for plan in plans for drafter in plan.models]
    return max(prefill_chunk, *deepest, *(pass_rows(plan, model) for plan, model in models))


def check_voters(
    plans: Sequence[SpecPlan],
    head_dims: Sequence[int],
    dtype: str,
    backend: BackendFacts,
    rows: str = "heads",
) -> None:
    """Whether the target's queries can vote on blocks, where a draft of some plan chooses them.

    Args:
        head_dims: of the target's layers, as far as they are known.
        rows: what is as wide: `heads`, or `latents`.
    Raises:
        ConfigError: they are wider than the backend's operator takes.
    """
    choosing, most = chosen_blocks(plans), backend.most_voting_dim(dtype)
    if choosing is None or most is None or not head_dims or max(head_dims) <= most:
        return
    roomy = (x for x in backend.dtypes if max(head_dims) <= (backend.most_voting_dim(x) or 0))
    narrower = next(roomy, None)
    window = View(choosing.window, choosing.sink).option
    raise ConfigError(
        f"--draft {choosing.option}, and {rows} of {max(head_dims)} in {dtype}",
        f"{rows} of {most} or less: on the backend {backend.name}, wider ones have no room for the"
        " queries that vote",
        f"pass --dtype {narrower}, or --draft {window}" if narrower else f"pass --draft {window}",
    )


def chosen_blocks(plans: Sequence[SpecPlan]) -> View | None:
    """The first view of some plans that chooses blocks."""
    return next((view for plan in plans for view in plan.views if view.chosen), None)


def check_budgets(plans: Sequence[SpecPlan], block_size: int, max_seq_len: int) -> None:
    """Compare the rows that self-drafts see with what there is.

    Raises:
        ConfigError: a window or a choice of less than a block, or a budget that no sequence
            outgrows.
    """
    for draft in (draft for plan in plans for draft in plan.self_drafts):
        view = draft.view
        if view is None:
            continue
        if view.window < block_size:
            raise ConfigError(
                f"--draft {draft.option}, and blocks of {block_size} rows",
                f"a window of {block_size} rows or more",
                f"pass --draft self:window={block_size}, or a smaller --block-size",
            )
        if 0 < view.chosen < block_size:
            raise ConfigError(
                f"--draft {view.option}, and blocks of {block_size} rows",
                f"{block_size} chosen rows or more, or none",
                f"pass blocks={block_size}, leave blocks out, or pass a smaller --block-size",
            )
        if sum(view.blocks(block_size)) * block_size >= max_seq_len:
            most = max_seq_len // 2 // block_size * block_size
            raise ConfigError(
                f"--draft {draft.option}, in sequences of at most {max_seq_len} tokens",
                "fewer rows than a sequence can have: a draft that sees all of them costs what"
                " the target costs",
                f"pass --draft self:window={most}, or a larger --max-seq-len"
                if most
                else "pass a larger --max-seq-len",
            )


def check_outgrown(windows: Sequence[KVWindow | None], max_seq_len: int) -> None:
    """Compare the rows that drafts attend to with the length of sequences.

    Raises:
        ConfigError: a draft sees all rows of every sequence.
    """
    for rows in windows:
        if rows is not None and rows.window + rows.sink >= max_seq_len:
            raise ConfigError(
                f"--draft-kv {rows.option}, in sequences of at most {max_seq_len} tokens",
                "fewer rows than a sequence can have",
                "pass a smaller window, or leave out --draft-kv",
            )


def tile_plans(
    plans: Sequence[SpecPlan], programs: Sequence[Program], config: CompileConfig
) -> list[SpecPlan]:
    """The plans, in tiles where their logits exceed the engine's limit.

    Args:
        programs: of the models, after their last phase.
    Raises:
        ConfigError: not even the logits of one node of each sequence fit.
    """
    row_bytes = {program.name: logit_row_bytes(program) for program in programs}
    batch, limit_mb = config.max_batch_size, config.max_logits_mb
    return [tile_plan(plan, row_bytes, batch, limit_mb) for plan in plans]


def check_seq_len(max_seq_len: int | None, longest: dict[str, int]) -> None:
    """Compare the length that was asked for with the positions of the models.

    Raises:
        ConfigError: it is beyond them.
    """
    if max_seq_len is None or not longest or max_seq_len <= min(longest.values()):
        return
    name = min(longest, key=lambda key: longest[key])
    most = longest[name]
    raise ConfigError(
        f"--max-seq-len {max_seq_len}; the {name.replace('_', ' ')} model has {most} positions",
        f"{most} or less",
        f"pass --max-seq-len {most}",
    )


def engine_limits(
    sources: Sequence[ModelSource],
    plans: Sequence[SpecPlan],
    config: CompileConfig,
    default_chunk: int,
) -> LimitsEntry:
    """Sizes that an engine is compiled for; see `fit_prefill_chunk`, too.

    Args:
        default_chunk: tokens of a prefill pass where nobody says how many.
    Raises:
        ConfigError: more tokens than a model has positions, or a cache that cannot be.
    """
    longest = {source.name: source.max_position for source in sources if source.max_position}
    most = min(longest.values(), default=DEFAULT_MAX_SEQ_LEN)
    max_seq_len = config.max_seq_len or min(most, DEFAULT_MAX_SEQ_LEN)
    check_seq_len(max_seq_len, longest)
    most_tokens = max(max_seq_len * config.max_batch_size, LEAST_PREFILL_CHUNK)
    chunk = config.prefill_chunk or min(default_chunk, most_tokens)
    limits = LimitsEntry(
        max_batch_size=config.max_batch_size,
        max_seq_len=max_seq_len,
        block_size=config.block_size,
        prefill_chunk=chunk,
        max_nodes=max(plan.num_rows for plan in plans),
        max_logits_mb=config.max_logits_mb,
        kv_cache_tokens=config.kv_cache_tokens,
    )
    _check_cache(limits)
    return limits


def _check_cache(limits: LimitsEntry) -> None:
    """Raises ConfigError: a cache that has no blocks, or fewer or more than can be of use."""
    wanted = limits.kv_cache_tokens
    most = limits.max_batch_size * limits.context
    if wanted is None or (limits.block_size and limits.block_size <= wanted <= most):
        return
    raise ConfigError(
        f"--kv-cache-tokens {wanted}"
        + ("" if limits.block_size else ", and a cache of one block a sequence"),
        f"{limits.block_size} … {most}, what {limits.max_batch_size} sequences can need"
        if limits.block_size
        else "a cache in blocks, which --block-size 0 and the backends onnx and tensorrt lack",
        "choose a number in this range, or leave it out"
        if limits.block_size
        else "leave out --kv-cache-tokens, or choose another --block-size or --backend",
    )


def fit_prefill_chunk(
    limits: LimitsEntry,
    config: CompileConfig,
    models: Sequence[tuple[Program, torch.dtype]],
    facts: BackendFacts,
) -> LimitsEntry:
    """Halve a chunk that nobody asked for until its passes take what a step's logits may.

    Args:
        config: asked for, or left to the default, how many tokens a pass takes.
        models: programs after their last phase, and the dtype of each.
    """
    most = config.max_logits_mb << 20
    while config.prefill_chunk is None and limits.prefill_chunk > LEAST_PREFILL_CHUNK:
        plans = [plan_model_memory(item, limits, dtype, [OFF], facts) for item, dtype in models]
        if max(plan.workspace for plan in plans) <= most:
            break
        chunk = max(limits.prefill_chunk // 2, LEAST_PREFILL_CHUNK)
        limits = replace(limits, prefill_chunk=chunk)
    return limits


def plan_model_memory(
    program: Program,
    limits: LimitsEntry,
    dtype: torch.dtype,
    plans: Sequence[SpecPlan],
    facts: BackendFacts,
) -> ModelMemory:
    """Memory of one model of an engine of these limits and plans; the model has one's name.

    Logits are those of the plan that leaves most of them alive, and of a draft include what
    children were drawn from, until the tree is verified.
    """
    batch = limits.max_batch_size
    rows = max(1, *(logit_rows(plan, program.name) for plan in plans))
    nodes = max(1, *(pass_rows(plan, program.name) for plan in plans))
    context = limits.context
    chunk = min(limits.prefill_chunk, limits.max_seq_len * batch)
    prefill = PassShape(chunk, batch, batch, min(chunk, limits.max_seq_len), context)
    step = PassShape(batch * nodes, batch * min(nodes, rows), batch, nodes, context)
    # a draft without layers reads no prompt
    shapes = [prefill, step] if program.layers or program.state_layers else [step]
    sizes = (limits.cache_rows(), shapes, batch * rows)
    states = StateCounts(batch, replay_rows(plans), kept_states(limits.state_checkpoints))
    return plan_memory(program, dtype, *sizes, facts.attention, facts.decoded_bytes, states)
