"""Single passes of an engine's models, timed on this machine."""

from __future__ import annotations

import contextlib
import time

import torch

from specc.runtime.backends.step import Model
from specc.runtime.engine import Engine


@torch.inference_mode()
def time_pass(
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
    states = engine.states_of(model)
    if states is not None:
        # as a tree's, where one can be as wide; else as a prompt's
        certain = 1 if width <= states.sizes.num_rows else width
        rows = [(place, certain) for place in range(table.shape[0])]
        more = [torch.tensor(rows, dtype=torch.int32), *more]
    moved = [x.to(device) for x in (*inputs, *more)]
    synchronize = torch.cuda.synchronize if device.type == "cuda" else _nothing
    # requests that wait meanwhile go on with theirs
    with contextlib.nullcontext() if states is None else states.unchanged(table.shape[0]):
        synchronize()
        begin = time.perf_counter()
        model(*moved)
        synchronize()
        return time.perf_counter() - begin


def _is_head(engine: Engine, model: Model) -> bool:
    entries = engine.manifest.models[1:] if engine.manifest else []
    heads = [entry.reads_hidden for entry in entries]
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


def vote_s(engine: Engine, table: torch.Tensor, context: int, width: int) -> float:
    """Seconds that a pass of the target takes longer when its tokens vote."""
    cache = engine.cache
    sizes = (table.shape[0], cache.shape.blocks_per_sequence)
    mass = torch.zeros(sizes, device=cache.device)
    plain_s = time_pass(engine, engine.target, table, context, width)
    return max(0.0, time_pass(engine, engine.target, table, context, width, mass) - plain_s)


def _nothing() -> None:
    """A CPU is done when a call returns."""
