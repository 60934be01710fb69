"""What the tokens above a node make of the logits of its depth: scores of a lattice's paths."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import fx

from specc.passes.step.step_graph import StepGraph

aten = torch.ops.aten
specc = torch.ops.specc


class PathScore(ABC):
    """Logits of the children of nodes, from the row of their depth and the tokens above them.

    A new kind of score is one of these; which nodes there are, and what rules are told, is the
    lattice's.
    """

    # whether nodes leave something to their children besides their tokens
    has_states = False

    def __init__(self) -> None:
        # how likely the target accepts children of nodes that were asked about, [B, count] each
        self.confidence: list[fx.Node] = []

    @abstractmethod
    def logits(
        self,
        g: StepGraph,
        level: fx.Node,
        hidden: fx.Node | None,
        tokens: fx.Node,
        count: int,
        depth: int,
        parents: fx.Node | None,
    ) -> fx.Node:
        """[B * count, V] of the children of some nodes of a depth; -inf of what may not follow.

        Args:
            g: the stage.
            level: [B, V] of the row of their depth.
            hidden: [B * count, d] state of that row, where the drafter leaves any.
            tokens: [B, count] of the nodes.
            count: nodes of a sequence.
            depth: of all of them; those of a depth are asked about before those below.
            parents: where nodes leave states: the place of each one's parent among the nodes of the
                depth above, in the order in which they were asked about, [count] or [B, count]
                int64; None where that is one node, or the root has none.
        """


class Candidates:
    """The best tokens of the row of each depth, which alone may follow.

    They are those of the row, whatever the path is: rules verify with the same, and one of equal
    logits at the end is chosen, so that there are no more.

    Args:
        count: K.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        # depth whose candidates are known, and these, [B, K]
        self._known: tuple[int, fx.Node] | None = None

    def of_level(self, g: StepGraph, level: fx.Node, depth: int) -> fx.Node:
        """[B, K] of a row [B, V], the best first."""
        if self._known is None or self._known[0] != depth:
            self._known = depth, g.call(specc.tree_expand.default, level, self.count)
        return self._known[1]

    def spread(
        self, g: StepGraph, level: fx.Node, chosen: fx.Node, own: fx.Node, count: int
    ) -> fx.Node:
        """[B * count, V] of logits of candidates [B, count, K]; -inf of all others."""
        nothing = g.call(aten.full_like.default, wide(g, level, count), -torch.inf)
        own = g.reshape(own, -1, self.count)
        return g.call(aten.scatter.src, nothing, 1, wide(g, chosen, count), own)


class LowRankScore(PathScore):
    """A product of low rank that is added to logits.

    With U_k the logits of the row for depth k + 1, f what a node of depth k makes of its path, and
    W a table with a row for each token, logits of its children are U_k + W · f. A kind of it is
    what makes f.

    Args:
        candidates: K tokens of a row that alone may follow; 0 is all.
    """

    def __init__(self, candidates: int = 0) -> None:
        super().__init__()
        self._candidates = Candidates(candidates) if candidates else None

    @abstractmethod
    def factors(
        self,
        g: StepGraph,
        tokens: fx.Node,
        hidden: fx.Node | None,
        count: int,
        depth: int,
        parents: fx.Node | None,
    ) -> fx.Node:
        """Rows f [B * count, r] of some nodes of a depth; arguments as of `logits`."""

    @abstractmethod
    def table(self, g: StepGraph) -> fx.Node:
        """W [rows, r]."""

    def columns(self, g: StepGraph) -> fx.Node | None:
        """[V] int64 row of each token in the table, as many as rows where it has none; None where
        tokens are rows.
        """
        return None

    def logits(
        self,
        g: StepGraph,
        level: fx.Node,
        hidden: fx.Node | None,
        tokens: fx.Node,
        count: int,
        depth: int,
        parents: fx.Node | None,
    ) -> fx.Node:
        factors = self.factors(g, tokens, hidden, count, depth, parents)
        if self._candidates is not None:
            chosen = self._candidates.of_level(g, level, depth)
            own = self._of_candidates(g, level, factors, chosen, count)
            return self._candidates.spread(g, level, chosen, own, count)
        bias = g.call(aten.linear.default, factors, self.table(g))
        if (columns := self.columns(g)) is not None:
            bias = g.call(aten.constant_pad_nd.default, bias, [0, 1], 0)
            bias = g.call(aten.index_select.default, bias, 1, columns)
        return g.call(aten.add.Tensor, wide(g, level, count), bias)

    def _of_candidates(
        self, g: StepGraph, level: fx.Node, factors: fx.Node, chosen: fx.Node, count: int
    ) -> fx.Node:
        """The same [B, count, K] of candidates [B, K] alone."""
        assert self._candidates is not None
        base = g.call(aten.gather.default, level, 1, chosen)
        rows = chosen
        if (columns := self.columns(g)) is not None:
            # a token that the table lacks has a logit of -inf, to which any row may be added
            rows = g.call(aten.index_select.default, columns, 0, g.flat(chosen))
            known = g.call(aten.gt.Scalar, base, -torch.inf)
            rows = g.reshape(rows, -1, self._candidates.count)
            rows = g.call(aten.where.ScalarOther, known, rows, 0)
        picked = g.call(aten.embedding.default, self.table(g), rows)
        given = g.reshape(factors, g.batch, count, -1)
        added = g.call(aten.bmm.default, given, g.call(aten.transpose.int, picked, 1, 2))
        return g.call(aten.add.Tensor, added, g.call(aten.unsqueeze.default, base, 1))


def wide(g: StepGraph, level: fx.Node, count: int) -> fx.Node:
    """[B, n] → [B * count, n], the row of a sequence for each of its nodes."""
    if count == 1:
        return level
    rows = g.call(aten.unsqueeze.default, level, 1)
    rows = g.call(aten.expand.default, rows, [-1, count, -1])
    return g.call(aten.flatten.using_ints, rows, 0, 1)
