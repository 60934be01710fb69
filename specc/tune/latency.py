"""Measure an engine's latency table on this machine, within a given time."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from specc.cost.latency_table import LatencyTable, PassPoint, PassSeconds, StepShape
from specc.errors import ConfigError
from specc.runtime.backends.step import Model
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, SpecPlan
from specc.system.machine import describe_machine

_WIDTHS = (2, 3, 5, 9, 16, 32, 64, 128, 256, 512)
# sequences with several tokens each, as a verified batch has
_BATCH_WIDTHS = (2, 3, 5, 9)
_SHORT = 16
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
    cells = [(name, *size) for name in models for size in _sizes(engine, most)]
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
        for name in models
    }
    about = {
        "source": "measured",
        "machine": describe_machine(),
        "backend": engine.backend,
        "rounds": len(times[cells[0]]),
    }
    latency = LatencyTable(passes.pop("target"), passes, about=about)
    iteration_s, step_s = _overheads(engine, latency)
    return dataclasses.replace(latency, iteration_s=iteration_s, step_s=step_s)


def _overheads(engine: Engine, table: LatencyTable) -> tuple[float, float]:
    """Seconds of an iteration, and of a group that drafts, outside of their passes.

    What no pass takes is timed as such. As the difference of an iteration and the table's passes it
    would be lost: the iterations of a short sequence find weights in the processor's caches that
    passes after long contexts do not.
    """
    off = _iteration(engine, OFF)
    drafting = [plan for plan in engine.plans.values() if plan.asked and plan.tile is None]
    plan = min(drafting, key=lambda plan: plan.num_nodes, default=None)
    if plan is None or plan.max_depth + 2 * _SHORT > engine.position_limit:
        return off.outside_s, 0.0
    own, shape = _iteration(engine, plan), StepShape(plan, 1, 1.5 * _SHORT)
    passes_s = table.draft_s(shape)
    if own.draft_s:
        more_s = own.draft_s - passes_s
    else:  # all of it is one graph
        more_s = own.inside_s - passes_s - table.target_s([shape])
    return off.outside_s, max(0.0, own.outside_s - off.outside_s) + max(0.0, more_s)


class _Iteration(NamedTuple):
    """Median seconds of one request's iterations.

    Args:
        outside_s: in none of the stages that have passes: the host's part, acceptance and commit.
        inside_s: in these stages.
        draft_s: of them, in that of the drafts; 0 where a step is one graph.
    """

    outside_s: float
    inside_s: float
    draft_s: float


def _iteration(engine: Engine, plan: SpecPlan) -> _Iteration:
    """Iterations of a short sequence."""
    core = EngineCore(engine, plan.name, shares_prefixes=False)
    stats, count = core.scheduler.stats, min(_SHORT, (engine.max_seq_len - 2) // 2)
    params = SamplingParams(max_tokens=count, ignore_eos=True)
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
            found.append(_Iteration(max(0.0, whole_s - inside_s), inside_s, draft_s))
    if not found:
        return _Iteration(0.0, 0.0, 0.0)
    return _Iteration(*map(statistics.median, zip(*found, strict=True)))


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
    engine: Engine, model: Model, table: torch.Tensor, context: int, width: int
) -> float:
    """Seconds of one pass of `width` tokens of each sequence: a chain after its context."""
    batch = table.shape[0]
    device = engine.cache.device
    tree = torch.arange(width)
    words = torch.zeros(width, -(-width // 64), dtype=torch.int64)
    for node in range(width):
        words[node, node // 64] = 1 << (node % 64) if node % 64 < 63 else -(1 << 63)
    inputs = (
        torch.zeros(batch * width, dtype=torch.int64),
        (context + tree).repeat(batch),
        torch.arange(0, batch * width + 1, width, dtype=torch.int32),
        (context + tree).int().repeat(batch),
        torch.full((batch,), context, dtype=torch.int32),
        words.repeat(batch, 1),
        table,
        torch.arange(batch * width),
    )
    moved = [x.to(device) for x in inputs]
    synchronize = torch.cuda.synchronize if device.type == "cuda" else _nothing
    synchronize()
    begin = time.perf_counter()
    model(*moved)
    synchronize()
    return time.perf_counter() - begin


def _nothing() -> None:
    """A CPU is done when a call returns."""
