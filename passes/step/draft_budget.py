"""Levels of static sizes, shared out among the nodes above before their children are drawn.

From the root down: the n nodes of a level go where the products are largest of what a node's path
has come to, and the probability of its best, second best, … token. What a node gets of them thus
follows from its path and from what its children are drawn from, and from none of these draws: given
that a walk has come to a node, its children are so many draws from its own distribution, as in a
tree of static shape. Rules that verify draws therefore stay what they are, which they do not where
nodes are kept or left out for the tokens that they carry (`draft_dynamic.py`, and the lattice's).

A place of a level is a node above and a number among its children; which of them are nodes is data.
What accepts goes through the places, whose rows of draft logits are static (`image`, `q_rows`).
"""

from __future__ import annotations

import torch
from torch import fx

from specc.passes.step.draft_levels import children, sharpen
from specc.passes.step.proposer import Grower
from specc.passes.step.step_graph import StepGraph, int32, slots_name
from specc.sampling.rows import Rule, Word
from specc.speculation.dynamic_tree import BudgetTree
from specc.speculation.plans import SpecPlan

aten = torch.ops.aten
specc = torch.ops.specc


def draft_budget(g: StepGraph, grower: Grower, plan: SpecPlan, root: fx.Node) -> dict[str, fx.Node]:
    """Grow a tree below a root [B, 1]; outputs as of `draft_stage`."""
    assert isinstance(plan.dynamic, BudgetTree)
    levels, drafter = plan.dynamic.levels, grower.drafter
    is_product = drafter.is_product
    words = _words_of_counts(g)
    tokens, image = [root], [g.call(aten.full_like.default, root, 0, dtype=torch.int32)]
    parents = [g.call(aten.full_like.default, root, -1, dtype=torch.int32)]
    outputs: dict[str, fx.Node] = {}
    # of the nodes above: how many, the first of them, the first of those above them, what their
    # paths have come to, and the first column of their children
    width, first, first_above, column = 1, 0, 0, 1
    scores = g.call(aten.full_like.default, root, 0, dtype=torch.float32)
    for depth, size in enumerate(levels):
        ancestors, above = None, None
        if depth:
            above = grower.parents_of_best(g, parents[-1], first_above)
            if grower.reads_rows:
                ancestors, _ = g.parts(specc.ancestor_words.default, 2, g.cat(*parents))
        made, odds = [], []
        # all nodes of a product have the same children
        tiles = ((0, 1),) if is_product else plan.tiles(width)
        for start, stop in tiles:
            count = stop - start
            if depth:
                rows = None
                if ancestors is not None:
                    at = first + start
                    rows = g.node_rows(ancestors, at, at + count, first + width)
                logits = grower.feed_level(
                    g,
                    g.part(tokens[-1], 1, start, stop, width),
                    rows,
                    first + start,
                    count,
                    depth,
                    None if above is None else g.part(above, 1, start, stop, width),
                )
            else:
                logits = grower.first_level(g)
            drawn = sharpen(g, plan, drafter, logits, depth)
            if plan.tile is None:
                outputs[f"q_{depth}"] = drawn
            name = f"budget_{depth}_columns" + (f"_{start}" if start else "")
            columns = [column + node * size for node in range(start, stop)]
            where = g.constant(name, int32(columns))
            best, _ = children(g, drawn, size, where, depth)
            _, own = children(g, drawn, size, where, depth, scored=True, words=words)
            made.append(g.reshape(best, g.batch, count * size))
            odds.append(g.reshape(own, g.batch, count, size))
        offered, places = g.cat(*made), width * size
        if is_product and width > 1:
            offered = g.call(aten.repeat.default, offered, [1, width])
        values = g.call(aten.add.Tensor, g.cat(*odds), g.call(aten.unsqueeze.default, scores, 2))
        values = g.reshape(values, g.batch, places)
        chosen, kept = _share(g, offered, values, size)
        tokens.append(chosen)
        scores = g.call(aten.gather.default, values, 1, kept)
        node = g.call(aten.div.Tensor_mode, kept, size, rounding_mode="floor")
        node = g.call(aten.add.Scalar, node, first)
        parents.append(g.call(aten._to_copy.default, node, dtype=torch.int32))
        start = first + width
        nodes = g.expand_rows(g.arange(start, start + size, 1, torch.int32), size)
        dead = g.call(aten.full_like.default, values, -1, dtype=torch.int32)
        image.append(g.call(aten.scatter.src, dead, 1, kept, nodes))
        first_above, first, width, column = first, start, size, column + places
    above = g.cat(*parents)
    tree, depths = g.parts(specc.ancestor_words.default, 2, above)
    outputs |= {"tokens": g.cat(*tokens), "parents": above, "ancestors": tree, "depths": depths}
    if plan.tile is None:
        outputs["image"] = g.cat(*image)
        g.constant("q_rows", int32(plan.dynamic.q_rows(is_product)))
    if drafter.moves_rows:
        g.constant(slots_name(drafter.name), int32(plan.dynamic.fed_slots()))
    return outputs


def _share(g: StepGraph, tokens: fx.Node, values: fx.Node, size: int) -> tuple[fx.Node, fx.Node]:
    """Of places [B, P], the tokens [B, size] of those of the largest values, and which they are.

    Values fall along the children of a node, and of equal ones the first are taken: so these are
    its first children, as many as it gets.
    """
    root = g.call(aten.slice.Tensor, tokens, 1, 0, 1)
    zero = g.call(aten.slice.Tensor, values, 1, 0, 1)
    wide = g.cat(root, tokens)
    no_parent = g.call(aten.full_like.default, wide, -1, dtype=torch.int32)
    found, _, kept = g.parts(
        specc.rerank_tree.default, 3, wide, no_parent, g.cat(zero, values), size + 1
    )
    kept = g.call(aten._to_copy.default, g.column(kept, 1, size + 1), dtype=torch.int64)
    return g.column(found, 1, size + 1), g.call(aten.sub.Scalar, kept, 1)


def _words_of_counts(g: StepGraph) -> fx.Node:
    """[B, 4] `sampling_words` whose scores say what counts go by.

    Rows that draw: those of the best tokens, whatever is drawn. Others have no draws, but the best
    tokens themselves, and go by these.
    """
    words, rule = g["sampling_words"], int(Word.RULE)
    own = g.column(words, rule, rule + 1)
    has_none = g.call(aten.lt.Scalar, own, int(Rule.MSS))
    return g.cat(
        g.column(words, 0, rule),
        g.call(aten.where.ScalarOther, has_none, own, int(Rule.DELTA)),
        g.column(words, rule + 1, len(Word)),
    )
