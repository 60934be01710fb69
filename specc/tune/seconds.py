"""What the passes of a step cost on this machine: by nodes, by frontier rows, by batch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from specc.cost.step_seconds import StepSeconds
from specc.runtime.backends.program import Model
from specc.runtime.engine import Engine

_ROUNDS, _WARMUP = 7, 2
_NODES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


def measure_seconds(
    engine: Engine,
    batch_size: int,
    context: int,
    max_nodes: int,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> StepSeconds:
    """Time the passes of target and first draft, interleaved, after warm-up; medians.

    What a step takes besides its passes is not in it: candidates are measured as whole steps
    before one is chosen.

    Args:
        engine: with nobody else at work.
        batch_size: sequences of a step.
        context: committed rows of each.
        max_nodes: of a tree.
        progress: called with the rounds that are done, and of all.
    """
    cache = engine.cache
    blocks = [cache.allocator.allocate(cache.shape.blocks_per_sequence) for _ in range(batch_size)]
    try:
        nodes = [size for size in _NODES if size <= max_nodes]
        rows = [size for size in _ROWS if size <= max_nodes]
        sizes: list[tuple[str, Model, int]] = [("verify", engine.target, size) for size in nodes]
        if engine.drafts:
            sizes += [("draft", engine.drafts[0], size) for size in rows]
        times: dict[tuple[str, int], list[float]] = {(kind, size): [] for kind, _, size in sizes}
        table = cache.block_table(blocks).to(cache.device)
        for done in range(_WARMUP + _ROUNDS):
            for kind, model, size in sizes:
                # the first level of a draft reads the token before the root, too
                width = 2 if (kind, size) == ("draft", 1) else size
                seconds = time_pass(engine, model, table, context, width)
                if done >= _WARMUP:
                    times[kind, size].append(seconds)
            progress(done + 1, _WARMUP + _ROUNDS)
    finally:
        for one in blocks:
            cache.allocator.free(one)
    medians = {key: statistics.median(values) for key, values in times.items()}
    verify = {size: value for (kind, size), value in medians.items() if kind == "verify"}
    draft = {size: value for (kind, size), value in medians.items() if kind == "draft"}
    # without a draft model, a lookup's proposals cost next to nothing
    return StepSeconds.from_points(verify, draft or {1: 0.0})


@torch.inference_mode()
def time_pass(engine: Engine, model: Model, table: torch.Tensor, context: int, width: int) -> float:
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


def typical_context(lengths: Sequence[int], max_seq_len: int, max_nodes: int) -> int:
    """Committed rows of a sequence halfway, on average; with room for a tree."""
    mean = sum(lengths) / max(1, len(lengths))
    return max(1, min(int(mean), max_seq_len - max_nodes - 1))
