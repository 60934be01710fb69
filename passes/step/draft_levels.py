"""A draft model, or the target itself, grows a tree of static shape, level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from specc.passes.step.block_bias import BlockBias
from specc.passes.step.draft_view import DraftView
from specc.passes.step.step_graph import TARGET, StepGraph, int32
from specc.speculation.plans import SpecPlan
from specc.speculation.self_drafts import SelfDraft
from specc.speculation.sharpness import factor_of
from specc.speculation.tree import TokenTree

aten = torch.ops.aten
specc = torch.ops.specc


@dataclass(frozen=True)
class Grower:
    """What is asked level by level: a draft model over its own cache, or the target over its own.

    Args:
        draft: name in the plan.
        program: that is called.
        num_first: last tokens of a sequence that its first level reads.
        is_target: a self-draft: it reads and writes the target's cache.
        view: of a self-draft that sees a part of it by another block table; else None.
        rows_before: of a head, [B] int32 rows before the one that pairs the target's features of
            the last committed token with the root; else None. Its rows are one behind the target's.
        bias: of a block drafter whose logits depend on the tokens before: one pass is all that is
            asked of its program.
    """

    draft: str
    program: str
    num_first: int
    is_target: bool = False
    view: DraftView | None = None
    rows_before: fx.Node | None = None
    bias: BlockBias | None = None

    @property
    def keeps_rows(self) -> bool:
        """Its rows of accepted nodes are moved and kept; those of others are computed again."""
        return not self.is_target and self.rows_before is None and self.bias is None

    @classmethod
    def of(cls, g: StepGraph, plan: SpecPlan, draft: str) -> Grower:
        """Of a plan's draft; what a view sees is computed here, once for all levels."""
        own = SelfDraft.named(draft)
        if plan.block_of(draft) is not None:
            return cls(draft, draft, plan.first_level(draft), bias=BlockBias.of(g, plan, draft))
        if draft in plan.heads:
            before = g.call(aten.sub.Tensor, g["cache_len"], 1)
            return cls(draft, draft, plan.first_level(draft), rows_before=before)
        if own is None:
            return cls(draft, draft, plan.first_level(draft))
        cuts_itself = draft in g.windowed
        program = draft if cuts_itself or own.has_program else TARGET
        view = None if cuts_itself else DraftView.of(g, plan, own.view)
        return cls(draft, program, plan.first_level(draft), True, view)


def first_level(g: StepGraph, grower: Grower) -> fx.Node:
    """Feed the last tokens of each sequence causally; returns logits [B, V] of the root.

    A draft model has not seen the leaf that the last step accepted, nor what only other drafts
    proposed. Feeding all that it can lack is idempotent and keeps the shape; tokens before the
    sequence have negative slots, which makes them dead. A self-draft is fed the root alone: it
    would overwrite the target's rows of other tokens with what it computes from less than they were
    computed from. A head reads the target's features of the token before each of its own, and
    overwrites what it has drafted from features of its own.
    """
    if grower.bias is not None:
        return grower.bias.logits_after(g, g.last(g["last_tokens"], 1), 1, 0)
    if grower.is_target:
        root = g.constant("view_root", torch.ones(1, 1, dtype=torch.int64))
        ancestors = g.repeat_rows(root, g.batch)
        return feed_level(g, grower, g.last(g["last_tokens"], 1), ancestors, 0, 1, 0)
    batch, count = g.batch, grower.num_first
    nodes = g.arange(1 - count, 1, 1, torch.int32)
    slots, positions = g.rows(nodes, nodes, grower.rows_before)
    total = g.multiple(batch, count)
    return g.model(
        grower.program,
        g.flat(g.last(g["last_tokens"], count)),
        positions,
        g.arange(0, g.multiple(batch, count, 1), count, torch.int32),
        slots,
        g["cache_len"] if grower.rows_before is None else grower.rows_before,
        None,
        g["block_table"],
        g.arange(count - 1, total, count, torch.int64),
        *([] if grower.rows_before is None else [_feature_rows(g, slots, is_own=False)]),
    )


def _feature_rows(g: StepGraph, rows: fx.Node, is_own: bool) -> fx.Node:
    """[Nt, 2] int32 of rows [Nt] that tokens read: the target's, or the head's own."""
    none = g.call(aten.full_like.default, rows, -1)
    return g.call(aten.stack.default, [none, rows] if is_own else [rows, none], 1)


def feed_level(
    g: StepGraph,
    grower: Grower,
    tokens: fx.Node,
    ancestors: fx.Node | None,
    first_slot: int | fx.Node,
    count: int,
    depth: int,
    parents: fx.Node | None = None,
) -> fx.Node:
    """Feed `count` nodes of one depth; returns their logits [B * count, V].

    Args:
        g: the stage.
        grower: what is asked.
        tokens: [B, count].
        ancestors: [B * count, W]; None of a block drafter, of which tokens alone are read.
        first_slot: the draft's row of the first node, the others after it; or all rows, [count].
        count: nodes of a sequence.
        depth: of all of them.
        parents: the draft's row of the parent of each node, which heads read: [count] or
            [B, count] int32; of a block drafter see `BlockBias.logits_after`.
    """
    if grower.bias is not None:
        return grower.bias.logits_after(g, tokens, count, depth, parents)
    batch, view = g.batch, grower.view
    if isinstance(first_slot, int):
        nodes = g.arange(first_slot, first_slot + count, 1, torch.int32)
    else:
        nodes = first_slot
    depths = g.call(aten.full_like.default, nodes, depth)
    slots, positions = g.rows(nodes, depths, grower.rows_before)
    if view is not None:
        slots, _ = g.rows(nodes, depths, view.cache_len)
    length = g["cache_len"] if view is None else view.cache_len
    features = []
    if grower.rows_before is not None:
        length = grower.rows_before
        assert parents is not None, "a head reads what its parents hand on"
        # below 0 where a sequence is padding
        above = g.call(aten.unsqueeze.default, length, 1)
        above = g.flat(g.call(aten.add.Tensor, above, parents))
        features = [_feature_rows(g, above, is_own=True)]
    return g.model(
        grower.program,
        g.flat(tokens),
        positions,
        g.arange(0, g.multiple(batch, count, 1), count, torch.int32),
        slots,
        length,
        ancestors,
        g["block_table"] if view is None else view.block_table,
        g.arange(0, g.multiple(batch, count), 1, torch.int64),
        *features,
    )


def sharpen(g: StepGraph, plan: SpecPlan, draft: str, logits: fx.Node, depth: int) -> fx.Node:
    """Logits that the children of nodes at a depth are drawn from, and verified with."""
    factor = factor_of(plan, draft, depth)
    return logits if factor == 1 else g.call(aten.mul.Scalar, logits, factor)


def children(
    g: StepGraph, logits: fx.Node, count: int, columns: fx.Node, depth: int, scored: bool = False
) -> list[fx.Node]:
    """Tokens [B * F, count] and scores of the children of F frontier nodes."""
    rows = (g["cache_len"], columns, depth, g["sampling_values"], g["sampling_words"])
    return g.parts(specc.draft_children.default, 2, logits, count, *rows, scored)


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
    draft, logits = grower.draft, first_level(g, grower)
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
                rows, slots, above = None, 0, None
                if grower.bias is None:
                    rows = g.constant(f"{name}_ancestors", words[between])
                    rows = g.repeat_rows(rows, g.batch)
                    slots = g.constant(f"{name}_nodes", int32(between))
                if grower.rows_before is not None:
                    parents = int32([tree.parents[node] for node in between])
                    above = g.constant(f"{name}_parents", parents)
                elif grower.bias is not None and grower.bias.has_states:
                    above = g.constant(f"{name}_above", places_above(tree, between))
                logits = feed_level(g, grower, tokens, rows, slots, len(between), depth, above)
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


def places_above(tree: TokenTree, nodes: Sequence[int]) -> Tensor:
    """[n] int64: which of the nodes with children, of the depth above, is the parent of each."""
    leaves = set(tree.leaves)
    above = [node for node in tree.levels[tree.depths[nodes[0]] - 1] if node not in leaves]
    return torch.tensor([above.index(tree.parents[node]) for node in nodes])


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
