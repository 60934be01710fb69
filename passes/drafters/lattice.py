"""Trees of a draft whose one pass leaves a row of logits for each depth: a lattice.

Children of a node are drawn from the row of its depth, and what a `PathScore` makes of it for the
tokens above them. Where there is no score, tokens of a depth are drawn from one row, whatever came
before them: all nodes of a depth have the same children, and a tree is a product of levels. Each
rule stays what it is: `coupled` and `delta` take what the target puts out, whatever nodes there
are; draws of `mss` and `swor` at a depth do not depend on the path down to it, and a walk looks at
the children of one node a depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from specc.drafters.drafter import Drafter
from specc.passes.drafters.path_score import PathScore, wide
from specc.passes.drafters.path_states import PathGrower
from specc.passes.step.draft_dynamic import sharpen_sampled
from specc.passes.step.draft_levels import children, sharpen
from specc.passes.step.proposer import Proposals
from specc.passes.step.step_graph import StepGraph, int32
from specc.speculation.plans import SpecPlan

aten = torch.ops.aten
specc = torch.ops.specc


@dataclass(frozen=True)
class _Level:
    """Nodes of a depth that a best-first tree goes on from, the last ones of the tree so far.

    Args:
        width: how many.
        first: place of the first of them in the tree so far.
        tokens: [B, width].
        scores: [B, width] float32 of their paths; -inf of those that are no nodes of the depth.
        parents: see `PathScore.logits`.
    """

    width: int
    first: int
    tokens: fx.Node
    scores: fx.Node
    parents: fx.Node | None = None


class Lattice(PathGrower):
    """A draft after its pass.

    Args:
        drafter: what proposes.
        levels: [B, V] of each depth, or [B, V + d] where hidden states come after the logits.
        score: what a path adds; None is nothing.
    """

    def __init__(
        self, drafter: Drafter, levels: Sequence[fx.Node], score: PathScore | None = None
    ) -> None:
        super().__init__(drafter)
        self.levels, self.score = levels, score
        self.has_states = score is not None and score.has_states
        self.width = drafter.hidden_columns

    @property
    def confidence(self) -> list[fx.Node]:
        return [] if self.score is None else self.score.confidence

    def first_level(self, g: StepGraph) -> fx.Node:
        return self.feed_level(g, g.last(g["last_tokens"], 1), None, 0, 1, 0)

    def feed_level(
        self,
        g: StepGraph,
        tokens: fx.Node,
        ancestors: fx.Node | None,
        first_slot: int | fx.Node,
        count: int,
        depth: int,
        parents: fx.Node | None = None,
    ) -> fx.Node:
        level, hidden = self.levels[depth], None
        if self.width:
            level, hidden = (
                g.call(aten.slice.Tensor, level, 1, 0, -self.width),
                wide(g, g.last(level, self.width), count),
            )
        if self.score is None:
            return wide(g, level, count)
        return self.score.logits(g, level, hidden, tokens, count, depth, parents)

    def propose(self, g: StepGraph, plan: SpecPlan, column: int) -> Proposals:
        if self.score is not None:
            return super().propose(g, plan, column)
        # one row of logits a depth
        rows = [depth - 1 for depth in plan.tree_of(self.drafter).depths]
        logits, tokens = self._product(g, plan, column)
        return Proposals(tokens, rows, logits=logits)

    def _product(self, g: StepGraph, plan: SpecPlan, column: int) -> tuple[list[fx.Node], fx.Node]:
        """Logits [B, V] of each depth that children are drawn from, and tokens [B, N]."""
        tree, draft = plan.tree_of(self.drafter), self.drafter
        found, tokens = [], [g.last(g["last_tokens"], 1)]
        for depth, logits in enumerate(self.levels[: tree.max_depth]):
            frontier = [node for node in tree.levels[depth] if node not in tree.leaves]
            counts = [len(tree.children(node)) for node in frontier]
            drawn = sharpen(g, plan, draft, logits, depth)
            found.append(drawn)
            name = f"{draft.name}_level_{depth}"
            first = tree.levels[depth + 1][0]
            columns = g.constant(f"{name}_columns", int32([column + first]))
            best, _ = children(g, drawn, max(counts), columns, depth)
            kept = [rank for own in counts for rank in range(own)]
            tokens.append(g.select(best, f"{name}_kept", kept, max(counts)))
        return found, g.cat(*tokens)

    def propose_best(self, g: StepGraph, plan: SpecPlan, root: fx.Node) -> dict[str, fx.Node]:
        """The best tree of a number of nodes; outputs as of `draft_stage`.

        Of all paths over the `top_k` likeliest tokens of each node, those of the largest products
        of probabilities: for products of levels the idea of DDTree, whose search takes them one by
        one from a heap. Here each depth adds its paths to the best tree of those above, and the
        best N nodes stay. That is exact for any scores: no path is better than its beginning, so
        what beats a path that is left out beats all that would go on from it. Ties go to the
        earlier candidate, as in `rerank_tree`.
        Source: liranringel/ddtree ddtree.py.
        """
        assert plan.dynamic is not None
        k, most, widths = plan.dynamic.top_k, plan.dynamic.num_nodes, plan.dynamic.path_widths
        tokens, size = root, 1
        parents = g.call(aten.full_like.default, root, -1, dtype=torch.int32)
        scores = g.call(aten.full_like.default, root, 0, dtype=torch.float32)
        level = _Level(1, 0, root, scores)
        for depth, width in enumerate(widths):
            made, found = self._children(g, plan, level, depth)
            own = g.call(aten.add.Tensor, found, g.call(aten.unsqueeze.default, level.scores, 2))
            every = g.cat(scores, g.reshape(own, g.batch, width * k))
            above = g.arange(level.first, level.first + width, 1, torch.int32)
            above = g.call(aten.expand.default, g.reshape(above, width, 1), [width, k])
            above = g.expand_rows(g.reshape(above, width * k), width * k)
            num_before, size = size, min(size + width * k, most)
            tokens, parents, kept = g.parts(
                specc.rerank_tree.default, 3,
                g.cat(tokens, made), g.cat(parents, above), every, size,
            )  # fmt: skip
            if depth + 1 < len(widths):
                kept = g.call(aten._to_copy.default, kept, dtype=torch.int64)
                scores = g.call(aten.gather.default, every, 1, kept)
                # what a depth has brought comes last
                first = size - widths[depth + 1]
                rank = g.call(aten.sub.Scalar, g.column(kept, first, size), num_before)
                is_new = g.call(aten.ge.Scalar, rank, 0)
                rank = g.call(aten.clamp.default, rank, 0)
                level = _Level(
                    widths[depth + 1],
                    first,
                    g.column(tokens, first, size),
                    g.call(
                        aten.where.ScalarOther, is_new, g.column(scores, first, size), -torch.inf
                    ),
                    g.call(aten.div.Tensor_mode, rank, k, rounding_mode="floor") if depth else None,
                )
        words, depths = g.parts(specc.ancestor_words.default, 2, parents)
        return {"tokens": tokens, "parents": parents, "ancestors": words, "depths": depths}

    def _children(
        self, g: StepGraph, plan: SpecPlan, level: _Level, depth: int
    ) -> tuple[fx.Node, fx.Node]:
        """Children [B, width * k] of the nodes of a level, and their scores [B, width or 1, k]."""
        assert plan.dynamic is not None
        k, width = plan.dynamic.top_k, level.width
        # all nodes of a product have the same ones
        tiles = [(0, 1)] if self.score is None else plan.tiles(width)
        tokens, scores = [], []
        for first, last in tiles:
            size = last - first
            parents = level.parents
            if parents is not None:
                parents = g.part(parents, 1, first, last, width)
            part = g.part(level.tokens, 1, first, last, width)
            logits = self.feed_level(g, part, None, 0, size, depth, parents)
            logits = sharpen_sampled(g, plan, logits, depth, size)
            # no rule of these trees draws by column
            columns = g.constant(f"level_columns_{size}", int32([0] * size))
            made, found = children(g, logits, k, columns, depth, scored=True)
            tokens.append(g.reshape(made, g.batch, -1))
            scores.append(g.reshape(found, g.batch, -1, k))
        made = g.cat(*tokens)
        if self.score is None and width > 1:
            made = g.call(aten.repeat.default, made, [1, width])
        return made, g.cat(*scores)
