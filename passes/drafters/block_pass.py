"""The one pass of a draft that proposes all levels of a tree."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from specc.drafters.block import BlockDraft
from specc.passes.step.step_graph import StepGraph
from specc.speculation.plans import SpecPlan

aten = torch.ops.aten


def block_levels(g: StepGraph, plan: SpecPlan, block: BlockDraft) -> list[fx.Node]:
    """One pass; returns logits [B, V] of each depth, from the children of the root on.

    Where the drafter reads its rows' hidden states, they come after the logits: [B, V + d].
    """
    return levels_of(g, block_rows(g, plan, block), plan.max_depth)


def block_rows(g: StepGraph, plan: SpecPlan, block: BlockDraft) -> fx.Node:
    """What that pass leaves, [n * B, V + d]: of each of the n `BlockDraft.logit_places` a row of
    every sequence.

    Its rows are those of the context that the last step can have accepted, with the target's hidden
    states, then the block: the root and masks. What they write is where it is written again: rows
    of a block are overwritten by rows of the context, once their tokens are accepted.
    """
    draft = block.name
    batch, size, depth = g.batch, block.size, plan.max_depth
    before = plan.max_depth + 1
    count = before + size
    nodes = g.arange(-before, size, 1, torch.int32)
    slots, positions = g.rows(nodes, nodes)
    mask = g.constant(f"{draft}_masks", torch.full((count,), block.mask_token_id))
    masks = g.expand_rows(mask, count)
    tokens = g.cat(
        # ids of the context are not read
        g.column(masks, 0, before),
        g.last(g["last_tokens"], 1),
        *([g.column(masks, before + 1, count)] if size > 1 else []),
    )
    wide = g.reshape(slots, batch, count)
    none = g.call(aten.full_like.default, wide, -1)
    tapped = g.flat(g.cat(g.column(wide, 0, before), g.column(none, before, count)))
    offsets = g.expand_rows(g.constant(f"{draft}_offsets", block.offsets(before)), count)
    features = g.call(aten.stack.default, [tapped, g.flat(offsets)], 1)
    ancestors = g.constant(f"{draft}_rows_seen", block.rows_seen(before))
    rows = rows_by_depth(g, draft, block.logit_places(before, depth), count)
    return g.model(
        draft,
        g.flat(tokens),
        positions,
        g.arange(0, g.multiple(batch, count, 1), count, torch.int32),
        slots,
        g["cache_len"],
        g.repeat_rows(ancestors, batch),
        g["block_table"],
        rows,
        features,
    )


def rows_by_depth(g: StepGraph, draft: str, read: Tensor, count: int) -> fx.Node:
    """[n * B] int64 places of rows, of one depth after the other.

    Args:
        draft: name of the drafter.
        read: [n] int64, rows of each sequence that speak of the depths.
        count: rows of each sequence.
    """
    starts = g.arange(0, g.multiple(g.batch, count), count, torch.int64)
    places = g.constant(f"{draft}_places", read)
    rows = g.call(
        aten.add.Tensor,
        g.call(aten.unsqueeze.default, places, 1),
        g.call(aten.unsqueeze.default, starts, 0),
    )
    return g.flat(rows)


def levels_of(g: StepGraph, logits: fx.Node, depth: int) -> list[fx.Node]:
    """[B, V] of each depth, of [depth * B, V]."""
    by_depth = g.reshape(logits, depth, g.batch, -1)
    return [
        g.call(aten.flatten.using_ints, g.part(by_depth, 0, level, level + 1, depth), 0, 1)
        for level in range(depth)
    ]
