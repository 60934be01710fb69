"""A draft that is asked level by level grows a tree of static shape."""

from __future__ import annotations

import torch
from torch import fx

from specc.drafters.drafter import Drafter
from specc.passes.step.proposer import Grower
from specc.passes.step.step_graph import StepGraph, int32
from specc.speculation.plans import SpecPlan
from specc.speculation.sharpness import factor_of

aten = torch.ops.aten
specc = torch.ops.specc


def sharpen(g: StepGraph, plan: SpecPlan, draft: Drafter, logits: fx.Node, depth: int) -> fx.Node:
    """Logits that the children of nodes at a depth are drawn from, and verified with."""
    factor = factor_of(plan, draft, depth)
    return logits if factor == 1 else g.call(aten.mul.Scalar, logits, factor)


def children(
    g: StepGraph,
    logits: fx.Node,
    count: int,
    columns: fx.Node,
    depth: int,
    scored: bool = False,
    words: fx.Node | None = None,
) -> list[fx.Node]:
    """Tokens [B * F, count] and scores of the children of F frontier nodes.

    Args:
        g: the stage.
        logits: [B * F, V].
        count: children of a node.
        columns: [F] int32 proposal column of each node's first child.
        depth: of the nodes.
        scored: whether scores are wanted.
        words: in place of `sampling_words`.
    """
    words = g["sampling_words"] if words is None else words
    rows = (g["cache_len"], columns, depth, g["sampling_values"])
    return g.parts(specc.draft_children.default, 2, logits, count, *rows, words, scored)


def draft_tree(
    g: StepGraph, grower: Grower, plan: SpecPlan, column: int
) -> tuple[list[fx.Node], fx.Node]:
    """Grow a static tree.

    Node i lives in row i after the committed ones. Of a level, the nodes with children are fed,
    tile by tile: nodes of one level do not attend to each other.

    Args:
        g: the stage.
        grower: what is asked.
        plan: whose shape it proposes.
        column: proposal column of the root; the other nodes' follow.
    Returns:
        logits [B * F, V] of each level that was fed, or of each tile of one, and tokens [B, N].
    """
    draft, logits = grower.drafter, grower.first_level(g)
    tree = plan.tree_of(draft)
    found, levels = [], [g.last(g["last_tokens"], 1)]
    words = tree.ancestor_words()
    for depth in range(tree.max_depth):
        nodes = tree.levels[depth]
        place = {node: i for i, node in enumerate(nodes)}
        frontier = [node for node in nodes if node not in tree.leaves]
        made = []
        for first, last in plan.tiles(len(frontier)):
            fed = frontier[first:last]
            name = f"{draft.name}_level_{depth}" + (f"_{first}" if first else "")
            if depth:
                # a padded batch has no gaps: what lies between is fed, too, and never read
                between = [n for n in nodes if fed[0] <= n <= fed[-1]] if g.is_padded else fed
                picked = [place[node] for node in between]
                tokens = g.select(levels[-1], f"{name}_fed", picked, len(nodes))
                rows, slots = None, 0
                if grower.reads_rows:
                    rows = g.constant(f"{name}_ancestors", words[between])
                    rows = g.repeat_rows(rows, g.batch)
                    slots = g.constant(f"{name}_nodes", int32(between))
                above = grower.parents_of(g, name, tree, between)
                logits = grower.feed_level(g, tokens, rows, slots, len(between), depth, above)
                logits = _rows_of(g, logits, f"{name}_rows", between, fed)
            drawn = sharpen(g, plan, draft, logits, depth)
            found.append(drawn)
            counts = [len(tree.children(node)) for node in fed]
            widest = max(counts)
            columns = g.constant(
                f"{name}_columns", int32([column + tree.children(node)[0] for node in fed])
            )
            best, _ = children(g, drawn, widest, columns, depth)
            wide = g.reshape(best, g.batch, len(fed) * widest)
            kept = [i * widest + rank for i, count in enumerate(counts) for rank in range(count)]
            made.append(g.select(wide, f"{name}_kept", kept, len(fed) * widest))
        levels.append(g.cat(*made))
    return found, g.cat(*levels)


def _rows_of(
    g: StepGraph, logits: fx.Node, name: str, nodes: list[int], kept: list[int]
) -> fx.Node:
    """Logits [B * len(kept), V] of some of the nodes that were fed."""
    if nodes == kept:
        return logits
    wide = g.reshape(logits, g.batch, len(nodes), -1)
    places = g.constant(name, torch.tensor([nodes.index(node) for node in kept]))
    picked = g.call(aten.index_select.default, wide, 1, places)
    return g.call(aten.flatten.using_ints, picked, 0, 1)
