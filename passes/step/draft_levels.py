"""A draft model grows a tree of static shape, level by level."""

from __future__ import annotations

import torch
from torch import fx

from specc.passes.step.step_graph import StepGraph, int32
from specc.speculation.plans import SpecPlan

aten = torch.ops.aten
specc = torch.ops.specc


def first_level(g: StepGraph, draft: str, catch_up: int) -> fx.Node:
    """Feed the last tokens of each sequence causally; returns logits [B, V] of the root.

    A draft has not seen the leaf that the last step accepted, nor what only other drafts proposed.
    Feeding all that it can lack is idempotent and keeps the shape; tokens before the sequence
    have negative slots, which makes them dead.
    """
    batch = g.batch
    nodes = g.arange(1 - catch_up, 1, 1, torch.int32)
    slots, positions = g.rows(nodes, nodes)
    total = g.multiple(batch, catch_up)
    return g.model(
        draft,
        g.flat(g.last(g["last_tokens"], catch_up)),
        positions,
        g.arange(0, g.multiple(batch, catch_up, 1), catch_up, torch.int32),
        slots,
        g["cache_len"],
        None,
        g["block_table"],
        g.arange(catch_up - 1, total, catch_up, torch.int64),
    )


def feed_level(
    g: StepGraph,
    draft: str,
    tokens: fx.Node,
    ancestors: fx.Node,
    first_slot: int | fx.Node,
    count: int,
    depth: int,
) -> fx.Node:
    """Feed `count` nodes of one depth; returns their logits [B * count, V].

    Args:
        g: the stage.
        draft: model.
        tokens: [B, count].
        ancestors: [B * count, W].
        first_slot: the draft's row of the first node, the others after it; or all rows, [count].
        count: nodes of a sequence.
        depth: of all of them.
    """
    batch = g.batch
    if isinstance(first_slot, int):
        nodes = g.arange(first_slot, first_slot + count, 1, torch.int32)
    else:
        nodes = first_slot
    slots, positions = g.rows(nodes, g.call(aten.full_like.default, nodes, depth))
    return g.model(
        draft,
        g.flat(tokens),
        positions,
        g.arange(0, g.multiple(batch, count, 1), count, torch.int32),
        slots,
        g["cache_len"],
        ancestors,
        g["block_table"],
        g.arange(0, g.multiple(batch, count), 1, torch.int64),
    )


def children(
    g: StepGraph, logits: fx.Node, count: int, columns: fx.Node, depth: int, scored: bool = False
) -> list[fx.Node]:
    """Tokens [B * F, count] and scores of the children of F frontier nodes."""
    rows = (g["cache_len"], columns, depth, g["sampling_values"], g["sampling_words"])
    return g.parts(specc.draft_children.default, 2, logits, count, *rows, scored)


def draft_tree(
    g: StepGraph, draft: str, plan: SpecPlan, logits: fx.Node, column: int
) -> tuple[list[fx.Node], fx.Node]:
    """Grow a static tree from the logits of its root.

    Node i lives in slot cache_len + i of the draft. Of a level, the nodes with children are fed,
    tile by tile: nodes of one level do not attend to each other.

    Args:
        g: the stage.
        draft: model.
        plan: whose shape it proposes.
        logits: [B, V] of the root.
        column: proposal column of the root; the other nodes' follow.
    Returns:
        logits [B * F, V] of each level that was fed, or of each tile of one, and tokens [B, N].
    """
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
            name = f"{draft}_level_{depth}" + (f"_{first}" if first else "")
            if depth:
                # a padded batch has no gaps: what lies between is fed, too, and never read
                between = [n for n in nodes if fed[0] <= n <= fed[-1]] if g.is_padded else fed
                picked = [place[node] for node in between]
                tokens = g.select(levels[-1], f"{name}_fed", picked, len(nodes))
                rows = g.repeat_rows(g.constant(f"{name}_ancestors", words[between]), g.batch)
                slots = g.constant(f"{name}_nodes", int32(between))
                logits = feed_level(g, draft, tokens, rows, slots, len(between), depth)
                logits = _rows_of(g, logits, f"{name}_rows", between, fed)
            found.append(logits)
            counts = [len(tree.children(node)) for node in fed]
            widest = max(counts)
            columns = g.constant(
                f"{name}_columns", int32([column + tree.children(node)[0] for node in fed])
            )
            best, _ = children(g, logits, widest, columns, depth)
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
