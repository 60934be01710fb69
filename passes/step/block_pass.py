"""The one pass of a block drafter, and what its logits become after a token."""

from __future__ import annotations

import torch
from torch import fx

from specc.passes.step.step_graph import StepGraph
from specc.speculation.block_drafts import BIAS_TENSORS
from specc.speculation.plans import SpecPlan

aten = torch.ops.aten


def block_levels(g: StepGraph, plan: SpecPlan, draft: str) -> list[fx.Node]:
    """One pass; returns logits [B, V] of each depth, from the children of the root on.

    Its rows are those of the context that the last step can have accepted, with the target's
    hidden states, then the block: the root and masks. What they write is where it is written again:
    rows of a block are overwritten by rows of the context, once their tokens are accepted.
    """
    block = plan.block_of(draft)
    assert block is not None
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
    # of one depth after the other
    starts = g.arange(0, g.multiple(batch, count), count, torch.int64)
    first = before + block.first_row
    places = g.constant(f"{draft}_places", torch.arange(first, first + depth))
    rows = g.call(
        aten.add.Tensor,
        g.call(aten.unsqueeze.default, places, 1),
        g.call(aten.unsqueeze.default, starts, 0),
    )
    logits = g.model(
        draft,
        g.flat(tokens),
        positions,
        g.arange(0, g.multiple(batch, count, 1), count, torch.int32),
        slots,
        g["cache_len"],
        g.repeat_rows(ancestors, batch),
        g["block_table"],
        g.flat(rows),
        features,
    )
    by_depth = g.reshape(logits, depth, batch, -1)
    return [
        g.call(aten.flatten.using_ints, g.part(by_depth, 0, level, level + 1, depth), 0, 1)
        for level in range(depth)
    ]


def biased_logits(
    g: StepGraph, draft: str, base: fx.Node, tokens: fx.Node, count: int, is_partial: bool
) -> fx.Node:
    """Logits of the children of nodes of one depth: DSpark's U_k + W2 · W1[token].

    Args:
        g: the stage.
        draft: name of the drafter.
        base: U_k, [B, V] of the depth.
        tokens: [B, count] of the nodes.
        count: nodes of a sequence.
        is_partial: W2 has a row for some of the target's ids; the others stay at -inf.
    Returns:
        [B * count, V].
    """
    bias_in, bias_out, columns = (f"{draft}_{name}" for name in BIAS_TENSORS)
    known = g.call(aten.embedding.default, g[bias_in], g.flat(tokens))
    bias = g.call(aten.linear.default, known, g[bias_out])
    if is_partial:
        bias = g.call(aten.constant_pad_nd.default, bias, [0, 1], 0)
        bias = g.call(aten.index_select.default, bias, 1, g[columns])
    if count > 1:
        wide = g.call(aten.unsqueeze.default, base, 1)
        wide = g.call(aten.expand.default, wide, [-1, count, -1])
        base = g.call(aten.flatten.using_ints, wide, 0, 1)
    return g.call(aten.add.Tensor, base, bias)
