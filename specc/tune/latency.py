"""Measure an engine's latency table on this machine, within a given time."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from specc.artifact.model_entry import FLAT_KINDS
from specc.cost.draft_levels import draft_levels
from specc.cost.latency_table import LatencyTable, PassPoint, PassSeconds
from specc.errors import ConfigError
from specc.runtime.backends.step import Model
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, SpecPlan
from specc.speculation.self_drafts import is_self_draft
from specc.system.machine import describe_machine

_WIDTHS = (2, 3, 4, 5, 9, 16, 32, 64, 128, 256, 512)
# sequences with several tokens each, as a verified batch has
_BATCH_WIDTHS = (2, 3, 5, 9)
_SHORT = 16
# in place of a model: what votes add to a pass of the target
_VOTES = "votes"
_ROUNDS = 7
# model, sequences, tokens of each, committed rows of each
_Cell = tuple[str, int, int, int]


def measure_latency(
    engine: Engine,
    progress: Callable[[int, int], object] = lambda done, total: None,
    budget_s: float = 30.0,
) -> LatencyTable:
    """Time passes of target and drafts by sequences, tokens and context, interleaved; medians.

    Every pass runs once to warm up and once to count, however long that takes; up to five rounds
    more as long as the time lasts.

    Args:
        engine: with nobody else at work.
        progress: called with the rounds that are done, and of all.
        budget_s: seconds after which no further round begins.
    Raises:
        ConfigError: the cache holds not even one sequence of full length.
    """
    begin = time.perf_counter()
    cache = engine.cache
    models: dict[str, Model] = {"target": engine.target}
    models |= {f"draft_{i}": draft for i, draft in enumerate(engine.drafts)}
    models |= engine.self_drafts
    # a small pool holds fewer sequences of full length
    free = cache.allocator.num_free // cache.shape.blocks_per_sequence
    most = min(cache.shape.max_num_seqs, free)
    # the manifest says it, not plans: an engine that is tuned has none but off at first
    entries = engine.manifest.models if engine.manifest else ()
    flat = {x.name for x in entries if x.head is not None and x.head.kind in FLAT_KINDS}
    sizes = _sizes(engine, most)
    cells = [(name, *s) for name in models for s in sizes if s[1] == 1 or name not in flat]
    if cache.block_mass is not None:
        cells += [(_VOTES, *s) for s in _sizes(engine, most) if s[1] in _BATCH_WIDTHS]
    if most < 1:
        raise ConfigError(
            f"a cache of {cache.shape.num_blocks} blocks, {cache.allocator.num_free} of them free",
            f"{cache.shape.blocks_per_sequence}, to measure a sequence of full length",
            "give the cache more tokens, or leave the measurement out",
        )
    blocks = [cache.allocator.allocate(cache.shape.blocks_per_sequence) for _ in range(most)]
    times: dict[_Cell, list[float]] = {cell: [] for cell in cells}
    try:
        for done in range(_ROUNDS):
            for cell in cells:
                name, rows, width, context = cell
                table = cache.block_table(blocks[:rows]).to(cache.device)
                if name == _VOTES:
                    seconds = _vote_s(engine, table, context, width)
                else:
                    seconds = _time_pass(engine, models[name], table, context, width)
                if done:
                    times[cell].append(seconds)
            progress(done + 1, _ROUNDS)
            if done and time.perf_counter() - begin > budget_s:
                break
    finally:
        for one in blocks:
            cache.allocator.free(one)
    passes = {
        name: PassSeconds.from_points(
            [
                PassPoint(rows, rows * width, rows * context, statistics.median(values))
                for (model, rows, width, context), values in times.items()
                if model == name
            ],
            name,
        )
        for name in dict.fromkeys(cell[0] for cell in cells)
    }
    votes = passes.pop(_VOTES, None)
    about = {
        "source": "measured",
        "machine": describe_machine(),
        "backend": engine.backend,
        "rounds": len(times[cells[0]]),
    }
    latency = LatencyTable(passes.pop("target"), passes, about=about, votes=votes)
    iteration_s, step_s = _overheads(engine)
    return dataclasses.replace(latency, iteration_s=iteration_s, step_s=step_s)


def _overheads(engine: Engine) -> tuple[float, float]:
    """Seconds of an iteration, and of a group that drafts, outside of their passes.

    What no pass takes is timed as such, and what drafting takes besides its passes beside passes of
    the same moment. As differences to a table's passes both would be lost: iterations of a short
    sequence find weights in the processor's caches that passes after long contexts do not.
    """
    off = _iteration(engine, OFF)
    drafting = [plan for plan in engine.plans.values() if plan.asked and plan.tile is None]
    plan = min(drafting, key=lambda plan: plan.num_nodes, default=None)
    if plan is None or plan.max_depth + 2 * _SHORT > engine.position_limit:
        return off.host_s, 0.0
    own = _iteration(engine, plan)
    return off.host_s, max(0.0, own.host_s - off.host_s) + max(0.0, own.beyond_s)


class _Iteration(NamedTuple):
    """Median seconds of one request's iterations.

    Args:
        host_s: in none of the stages that have passes: the host's part, acceptance and commit.
        beyond_s: in the stage that drafts, beyond the passes of drafts; where a step is one graph,
            in all of it beyond all of its passes. 0 of off, whose stage is its pass.
    """

    host_s: float
    beyond_s: float


def _iteration(engine: Engine, plan: SpecPlan) -> _Iteration:
    """Iterations of a short sequence, and passes like theirs after each of them."""
    core = EngineCore(engine, plan.name, shares_prefixes=False)
    stats, count = core.scheduler.stats, min(_SHORT, (engine.max_seq_len - 2) // 2)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    found: list[_Iteration] = []
    for _ in range(_ROUNDS):
        request = core.requests.make([0] * count, params)
        core.scheduler.add(request)
        core.advance()  # the prompt
        while not request.is_finished:
            drafted, others = stats.draft_s, stats.verify_s + stats.whole_s
            begin = time.perf_counter()
            core.advance()
            whole_s = time.perf_counter() - begin
            draft_s = stats.draft_s - drafted
            inside_s = draft_s + stats.verify_s + stats.whole_s - others
            beyond_s = 0.0
            if plan.speculates and not request.is_finished:
                passes_s = _passes_s(engine, plan, request, with_target=not draft_s)
                beyond_s = (draft_s or inside_s) - passes_s
            found.append(_Iteration(max(0.0, whole_s - inside_s), beyond_s))
    if not found:
        return _Iteration(0.0, 0.0)
    return _Iteration(*map(statistics.median, zip(*found, strict=True)))


def _passes_s(engine: Engine, plan: SpecPlan, request: Request, *, with_target: bool) -> float:
    """Seconds of passes like those of a plan's next step, over the same rows."""
    cache = engine.cache
    table = cache.block_table([request.blocks]).to(cache.device)
    widths = [(_model_of(engine, draft), w) for draft, levels in draft_levels(plan) for w in levels]
    if with_target:
        widths.append((engine.target, plan.num_nodes))
    return sum(_time_pass(engine, model, table, request.cache_len, w) for model, w in widths)


def _model_of(engine: Engine, draft: str) -> Model:
    """The program of a draft: a model's, or one of the target's."""
    if is_self_draft(draft):
        return engine.self_drafts.get(draft, engine.target)
    return engine.drafts[int(draft.removeprefix("draft_"))]


def _sizes(engine: Engine, most_rows: int) -> list[tuple[int, int, int]]:
    """Sequences, tokens of each, and committed rows of each, that a pass is measured with."""
    shape = engine.cache.shape
    most_tokens = engine.prefill_chunk
    rows = [1 << i for i in range(most_rows.bit_length())]
    rows = sorted({*(count for count in rows if count <= most_rows), most_rows})
    widths = [(1, width) for width in _WIDTHS if width <= most_tokens]
    widths += [(most_rows, width) for width in _BATCH_WIDTHS]
    sizes = {(count, 1) for count in rows} | set(widths)
    found = []
    for count, width in sorted(sizes):
        longest = shape.max_seq_len - width
        if count * width > max(most_tokens, most_rows) or longest < 1:
            continue
        found += [(count, width, context) for context in {min(_SHORT, longest), longest}]
    return found


@torch.inference_mode()
def _time_pass(
    engine: Engine,
    model: Model,
    table: torch.Tensor,
    context: int,
    width: int,
    mass: torch.Tensor | None = None,
) -> float:
    """Seconds of one pass of `width` tokens of each sequence, after its context.

    Args:
        engine: on whose device it runs.
        model: of the engine.
        table: [B, n] blocks of the sequences.
        context: committed rows of each.
        width: tokens of each.
        mass: [B, n] float32 that the tokens add their votes to; None is no vote.
    """
    device = engine.cache.device
    inputs = timed_inputs(table, context, width)
    more = [] if mass is None else [mass]
    if _is_head(engine, model):
        # all of them read the target's hidden states, as in the first level of a step
        more = [torch.stack([inputs[3], torch.full_like(inputs[3], -1)], 1)]
    moved = [x.to(device) for x in (*inputs, *more)]
    synchronize = torch.cuda.synchronize if device.type == "cuda" else _nothing
    synchronize()
    begin = time.perf_counter()
    model(*moved)
    synchronize()
    return time.perf_counter() - begin


def _is_head(engine: Engine, model: Model) -> bool:
    entries = engine.manifest.models[1:] if engine.manifest else []
    heads = [entry.head is not None for entry in entries]
    return any(is_head and x is model for x, is_head in zip(engine.drafts, heads, strict=False))


def timed_inputs(table: torch.Tensor, context: int, width: int) -> tuple[torch.Tensor, ...]:
    """Inputs of a program for a pass that is timed, on the host, in the order that it takes them.

    Every token has token id 0 and logits, and sees its context and itself.

    Args:
        table: [B, n] blocks of the sequences.
        context: committed rows of each.
        width: tokens of each, which take the rows after those.
    """
    batch = table.shape[0]
    nodes = torch.arange(width)
    words = torch.zeros(width, -(-width // 64), dtype=torch.int64)
    for node in range(width):
        words[node, node // 64] = 1 << (node % 64) if node % 64 < 63 else -(1 << 63)
    return (
        torch.zeros(batch * width, dtype=torch.int64),
        (context + nodes).repeat(batch),
        torch.arange(0, batch * width + 1, width, dtype=torch.int32),
        (context + nodes).int().repeat(batch),
        torch.full((batch,), context, dtype=torch.int32),
        words.repeat(batch, 1),
        table,
        torch.arange(batch * width),
    )


def _vote_s(engine: Engine, table: torch.Tensor, context: int, width: int) -> float:
    """Seconds that a pass of the target takes longer when its tokens vote."""
    cache = engine.cache
    sizes = (table.shape[0], cache.shape.blocks_per_sequence)
    mass = torch.zeros(sizes, device=cache.device)
    plain_s = _time_pass(engine, engine.target, table, context, width)
    return max(0.0, _time_pass(engine, engine.target, table, context, width, mass) - plain_s)


def _nothing() -> None:
    """A CPU is done when a call returns."""
