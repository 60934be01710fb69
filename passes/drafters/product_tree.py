"""Trees of a draft whose one pass makes a row of logits for each depth.

Tokens of a depth are drawn from one row, whatever came before them. So all nodes of a depth have
the same children, and a tree is a product of levels. Each rule stays what it is: `coupled` and
`delta` take what the target puts out, whatever nodes there are; draws of `mss` and `swor` at a
depth do not depend on the path down to it, and a walk looks at the children of one node a depth.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from specc.drafters.drafter import Drafter
from specc.passes.step.draft_dynamic import sharpen_sampled
from specc.passes.step.draft_levels import children, sharpen
from specc.passes.step.proposer import Proposals, Proposer
from specc.passes.step.step_graph import StepGraph, int32
from specc.speculation.plans import SpecPlan

aten = torch.ops.aten
specc = torch.ops.specc
Levels = Callable[[], list[fx.Node]]


class ProductProposer(Proposer):
    """A draft after its pass.

    Args:
        drafter: what proposes.
        levels: makes the pass; returns logits [B, V] of each depth.
    """

    def __init__(self, drafter: Drafter, levels: Levels) -> None:
        super().__init__(drafter)
        self.levels = levels

    def propose(self, g: StepGraph, plan: SpecPlan, column: int) -> Proposals:
        logits, tokens = _static_tree(g, plan, self.drafter, self.levels, column)
        # one row of logits a depth
        rows = [depth - 1 for depth in plan.tree_of(self.drafter).depths]
        return Proposals(tokens, rows, logits=logits)

    def propose_best(self, g: StepGraph, plan: SpecPlan, root: fx.Node) -> dict[str, fx.Node]:
        return _best_tree(g, plan, self.levels, root)


def _static_tree(
    g: StepGraph, plan: SpecPlan, draft: Drafter, made: Levels, column: int
) -> tuple[list[fx.Node], fx.Node]:
    """Logits [B, V] of each depth that children are drawn from, and tokens [B, N]."""
    tree = plan.tree_of(draft)
    found, levels = [], [g.last(g["last_tokens"], 1)]
    for depth, logits in enumerate(made()):
        frontier = [node for node in tree.levels[depth] if node not in tree.leaves]
        counts = [len(tree.children(node)) for node in frontier]
        drawn = sharpen(g, plan, draft, logits, depth)
        found.append(drawn)
        name = f"{draft.name}_level_{depth}"
        first = tree.levels[depth + 1][0]
        columns = g.constant(f"{name}_columns", int32([column + first]))
        best, _ = children(g, drawn, max(counts), columns, depth)
        kept = [rank for own in counts for rank in range(own)]
        levels.append(g.select(best, f"{name}_kept", kept, max(counts)))
    return found, g.cat(*levels)


def _best_tree(g: StepGraph, plan: SpecPlan, levels: Levels, root: fx.Node) -> dict[str, fx.Node]:
    """The best tree of a number of nodes; outputs as of `draft_stage`.

    Of all paths over the `top_k` likeliest tokens of each depth, those with the largest products
    of probabilities: the idea of DDTree, whose search takes them one by one from a heap. Here each
    depth keeps as many of its best paths as the tree has nodes: a path among the best of all has
    its beginnings among the best of their depths, as every path that beats one of those goes on to
    one that beats the whole. Ties go to the earlier candidate, as in `rerank_tree`.
    Source: liranringel/ddtree ddtree.py.
    """
    assert plan.dynamic is not None
    k, most = plan.dynamic.top_k, plan.dynamic.num_nodes - 1
    no_parent = g.call(aten.full_like.default, root, -1, dtype=torch.int32)
    tokens, parents = [root], [no_parent]
    scores = [g.call(aten.full_like.default, root, 0, dtype=torch.float32)]
    # of the nodes that are gone on from: which candidates they are, and their scores
    above = g.call(aten.full_like.default, root, 0)
    above_scores, width, num_made = scores[0], 1, 1
    column = g.constant("root_column", int32([0]))
    for depth, logits in enumerate(levels()):
        drawn = sharpen_sampled(g, plan, logits, depth, 1)
        made, found = children(g, drawn, k, column, depth, scored=True)
        size = width * k
        own = g.call(aten.unsqueeze.default, found, 1)
        own = g.call(aten.add.Tensor, own, g.call(aten.unsqueeze.default, above_scores, 2))
        own = g.reshape(own, g.batch, size)
        scores.append(own)
        tokens.append(g.call(aten.repeat.default, made, [1, width]))
        wide = g.call(aten.unsqueeze.default, above, 2)
        wide = g.reshape(g.call(aten.expand.default, wide, [-1, -1, k]), g.batch, size)
        parents.append(g.call(aten._to_copy.default, wide, dtype=torch.int32))
        if depth + 1 < plan.max_depth:
            width = min(size, most)
            order = g.call(aten.sort.stable, own, stable=True, dim=1, descending=True)
            order = g.column(g.call(operator.getitem, order, 1), 0, width)
            above = g.call(aten.add.Tensor, order, num_made)
            above_scores = g.call(aten.gather.default, own, 1, order)
            num_made += size
    nodes = plan.dynamic.num_nodes
    tree = g.parts(
        specc.rerank_tree.default, 3, g.cat(*tokens), g.cat(*parents), g.cat(*scores), nodes
    )
    words, depths = g.parts(specc.ancestor_words.default, 2, tree[1])
    return {"tokens": tree[0], "parents": tree[1], "ancestors": words, "depths": depths}
