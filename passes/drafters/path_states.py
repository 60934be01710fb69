"""What nodes of a tree leave to their children besides their tokens, level by level."""

from __future__ import annotations

import torch
from torch import fx

from specc.passes.drafters.model import LevelGrower
from specc.passes.step.proposer import places_above
from specc.passes.step.step_graph import StepGraph
from specc.speculation.tree import TokenTree

aten = torch.ops.aten


class PathStates:
    """Rows of nodes that were asked about; those of a depth come before those below.

    A depth may be asked about in parts. So a state belongs to a path, not to a depth.
    """

    def __init__(self) -> None:
        # depth that is asked about, what nodes above it left, [B * count, r], and what its own do
        self._depth = 0
        self._above: fx.Node | None = None
        self._num_above = 0
        self._left: list[tuple[fx.Node, int]] = []

    def leave(self, state: fx.Node, count: int) -> None:
        """Keep the states [B * count, r] of nodes, in the order in which they are asked about."""
        self._left.append((state, count))

    def above(self, g: StepGraph, count: int, depth: int, parents: fx.Node | None) -> fx.Node:
        """States [B * count, r] of the parents of nodes.

        Args:
            g: the stage.
            count: nodes of a sequence.
            depth: of all of them, 1 or more.
            parents: the place of each one's parent among the nodes of the depth above, [count] or
                [B, count] int32; None where that is one node.
        """
        if depth != self._depth:
            # the parts of the depth above are complete
            parts = [g.reshape(left, g.batch, size, -1) for left, size in self._left]
            self._above = g.call(aten.flatten.using_ints, g.cat(*parts), 0, 1)
            self._num_above, self._depth = sum(size for _, size in self._left), depth
            self._left = []
        assert self._above is not None
        size = self._num_above
        places = g.arange(0, g.multiple(g.batch, size), size, torch.int64)
        places = g.call(aten.unsqueeze.default, places, 1)
        if parents is not None:
            places = g.call(aten.add.Tensor, places, parents)
        else:
            assert size == 1, "nodes whose parents are not said have one"
            places = g.call(aten.expand.default, places, [-1, count])
        return g.call(aten.index_select.default, self._above, 0, g.flat(places))


class PathGrower(LevelGrower):
    """Of a drafter after its pass, which is all that is asked of its program: logits of a node go
    by the tokens above it.
    """

    reads_rows = False
    # whether nodes leave states to their children, besides their tokens
    has_states = True

    def parents_of(
        self, g: StepGraph, name: str, tree: TokenTree, nodes: list[int]
    ) -> fx.Node | None:
        """See `PathStates.above`."""
        if not self.has_states:
            return None
        return g.constant(f"{name}_above", places_above(tree, nodes))

    def parents_of_best(self, g: StepGraph, rows: fx.Node, first: int) -> fx.Node | None:
        if first == 0 or not self.has_states:
            return None
        return g.call(aten.sub.Scalar, rows, first)
