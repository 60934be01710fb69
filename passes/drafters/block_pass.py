"""The one pass of a draft that proposes all levels of a tree."""

from __future__ import annotations

import torch
from torch import fx

from specc.drafters.block import BlockDraft
from specc.drafters.masked import MaskedPass
from specc.passes.step.step_graph import StepGraph
from specc.speculation.plans import SpecPlan

aten = torch.ops.aten


def block_levels(g: StepGraph, plan: SpecPlan, block: MaskedPass) -> list[fx.Node]:
    """One pass; returns logits [B, V] of each depth, from the children of the root on.

    Where the drafter reads its rows' hidden states, they come after the logits: [B, V + d].

    Its rows are those of the context that the last step can have accepted, then the block: the root
    and masks. Context is tokens, or the target's hidden states of them. What the rows write is
    where it is written again: rows of a block are overwritten by rows of the context, once their
    tokens are accepted.
    """
    draft = block.name
    batch, size, depth = g.batch, block.num_written(plan.max_depth), plan.max_depth
    before = plan.max_depth + 1
    count = before + size
    nodes = g.arange(-before, size, 1, torch.int32)
    length = g["cache_len"]
    if block.rows_behind:
        length = g.call(aten.sub.Tensor, length, block.rows_behind)
    slots, positions = g.rows(nodes, nodes, length)
    mask = g.constant(f"{draft}_masks", torch.full((count,), block.mask_token_id))
    masks = g.expand_rows(mask, count)
    known = g.last(g["last_tokens"], before + 1 if block.reads_tokens else 1)
    tokens = g.cat(
        # ids of a context of hidden states are not read
        *([] if block.reads_tokens else [g.column(masks, 0, before)]),
        known,
        *([g.column(masks, before + 1, count)] if size > 1 else []),
    )
    seen = block.rows_seen(before)
    if seen is not None:
        ancestors = g.constant(f"{draft}_rows_seen", seen)
    rows = rows_by_depth(g, draft, before + block.first_row, depth, count)
    logits = g.model(
        draft,
        g.flat(tokens),
        positions,
        g.arange(0, g.multiple(batch, count, 1), count, torch.int32),
        slots,
        length,
        None if seen is None else g.repeat_rows(ancestors, batch),
        g["block_table"],
        rows,
        *_features(g, block, slots, before, count),
    )
    return levels_of(g, logits, depth)


def _features(
    g: StepGraph, block: MaskedPass, slots: fx.Node, before: int, count: int
) -> list[fx.Node]:
    """Rows of the target's hidden states [B * count, 2] that the rows of a pass read, of a drafter
    that reads any: those of context do, and where it reads tokens, that of the root.
    """
    if not block.facts.reads_hidden:
        return []
    if block.reads_tokens:
        before += 1
    wide = g.reshape(slots, g.batch, count)
    none = g.call(aten.full_like.default, wide, -1)
    masked = [g.column(none, before, count)] if before < count else []
    tapped = g.flat(g.cat(g.column(wide, 0, before), *masked))
    offsets = g.flat(none)
    if isinstance(block, BlockDraft):
        places = g.constant(f"{block.name}_offsets", block.offsets(before))
        offsets = g.flat(g.expand_rows(places, count))
    return [g.call(aten.stack.default, [tapped, offsets], 1)]


def rows_by_depth(g: StepGraph, draft: str, first: int, depth: int, count: int) -> fx.Node:
    """[depth * B] int64 places of rows, of one depth after the other.

    Args:
        draft: name of the drafter.
        first: row of each sequence that speaks of the first depth; those of the others follow.
        depth: of the tree.
        count: rows of each sequence.
    """
    starts = g.arange(0, g.multiple(g.batch, count), count, torch.int64)
    places = g.constant(f"{draft}_places", torch.arange(first, first + depth))
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
