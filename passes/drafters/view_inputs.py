"""What a self-draft sees: a short block table over the target's own cache, made inside the step.

The table of a sequence holds the blocks of the sink, those that are chosen, then a run of blocks
that begins `window` rows before the one that is being filled and ends with those that the step
writes:

    own       = cache_len // block_size           the block that is being filled
    kept      = sink blocks + chosen blocks
    first     = max(own - window blocks, kept)
    columns   = [0 … sink blocks), the chosen ones, then first, first + 1, …
    cache_len - (first - kept) * block_size

are its columns, and the committed rows in them. The host chooses (`View.choose`): as many blocks as
the view has, from the sink up to `first`; while `first` is `kept`, all of those. The run has no
gap, so that row i after the committed ones is the same row of the cache in the view and in the
target's own table: verification writes all of them, in every layer before it attends to it, and no
row of a draft is left. A short sequence is seen whole.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from specc.drafters.views import View
from specc.passes.step.step_graph import CHOSEN_BLOCKS, StepGraph
from specc.speculation.plans import SpecPlan

aten = torch.ops.aten


@dataclass(frozen=True)
class ViewInputs:
    """Inputs of the target's program, as a draft.

    Args:
        block_table: [B, n] int32.
        cache_len: [B] int32 committed rows in it.
    """

    block_table: fx.Node
    cache_len: fx.Node

    @classmethod
    def of(cls, g: StepGraph, plan: SpecPlan, view: View | None) -> ViewInputs | None:
        """What one of a plan's self-drafts sees; None where it sees all rows.

        Padding has lengths far below 0: its view begins at the beginning, and its rows stay dead.
        """
        if view is None:
            return None
        size, cache_len = g.block_size, g["cache_len"]
        assert size, "views need blocks"
        sink, chosen, window = view.blocks(size)
        kept = sink + chosen
        own = g.call(aten.div.Tensor_mode, cache_len, size, rounding_mode="floor")
        first = g.call(aten.clamp.default, g.call(aten.sub.Tensor, own, window), kept)
        skipped = g.call(aten.mul.Tensor, g.call(aten.sub.Tensor, first, kept), size)

        count = view.num_columns(size, plan.num_rows) - kept
        columns = g.call(aten.unsqueeze.default, first, 1)
        columns = g.call(aten.add.Tensor, columns, g.arange(0, count, 1, torch.int64))
        parts = [columns]
        if chosen:
            before = plan.num_chosen(size, view.name)
            of_all = g[CHOSEN_BLOCKS]
            parts.insert(0, g.part(of_all, 1, before, before + chosen, plan.num_chosen(size)))
        if sink:
            parts.insert(0, g.expand_rows(g.arange(0, sink, 1, torch.int64), sink))
        columns = g.cat(*parts)
        # a table ends with the longest sequence: what lies beyond, nobody reads or writes
        table = g["block_table"]
        most = g.call(operator.add, g.call(aten.sym_size.int, table, 1), -1)
        columns = g.call(aten.clamp.default, columns, 0, most)
        return cls(
            g.call(aten.gather.default, table, 1, columns),
            g.call(aten.sub.Tensor, cache_len, skipped),
        )
