"""What a draft model whose layers keep states is told of them in its first level.

Its states are those of the tokens that it has read: after a step, of the accepted nodes that it was
fed. The first level reads what is missing up to the root, as a prompt is read: all of it is
certain, and is folded in order. What the states have seen must not be folded again, so these
tokens are dead. Nodes of the levels below leave replay rows, and those that are accepted are folded
in at the end of the step, as of the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from specc.passes.step.step_graph import DRAFT_STATES, StepGraph, seen_name

aten = torch.ops.aten


@dataclass(frozen=True)
class DraftStates:
    """Inputs of the first level.

    Args:
        g: the stage.
        seen: [B] int32 tokens that the states have seen, which are rows of its cache, too.
        first: [B, 2] int32, see `specc.passes.program.STATES`.
    """

    g: StepGraph
    seen: fx.Node
    first: fx.Node

    @classmethod
    def of(cls, g: StepGraph, draft: str) -> DraftStates | None:
        """None of a draft whose layers keep no states."""
        if draft not in g.stateful:
            return None
        seen = g[seen_name(draft)]
        missing = g.call(aten.sub.Tensor, g["cache_len"], seen)
        places, root = g.column(g[DRAFT_STATES], 0, 1), g.column(g[DRAFT_STATES], 1, 2)
        certain = g.call(aten.add.Tensor, g.call(aten.unsqueeze.default, missing, 1), root)
        return cls(g, seen, g.cat(places, certain))

    def unseen(self, slots: fx.Node, count: int) -> fx.Node:
        """[B * count] slots, -1 of tokens that the states have seen."""
        g = self.g
        wide = g.reshape(slots, -1, count)
        is_new = g.call(aten.ge.Tensor, wide, g.call(aten.unsqueeze.default, self.seen, 1))
        return g.flat(g.call(aten.where.ScalarOther, is_new, wide, -1))
