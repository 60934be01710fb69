"""The draft stage of a step: what each draft proposes, and how proposals become one tree."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import fx

from specc.passes.step.draft_block import (
    block_q_rows,
    draft_block_dynamic,
    draft_block_tree,
)
from specc.passes.step.draft_dynamic import draft_dynamic
from specc.passes.step.draft_levels import Grower, draft_tree
from specc.passes.step.step_graph import (
    HISTORY,
    PROPOSALS,
    STEP_INPUTS,
    VOTE_WEIGHTS,
    StepGraph,
    int32,
    slots_name,
)
from specc.speculation.plan_names import lookup_ngram
from specc.speculation.plans import MERGE, SUFFIX, SpecPlan
from specc.speculation.tree import TokenTree

aten = torch.ops.aten
specc = torch.ops.specc


@dataclass
class Proposals:
    """What one draft proposes.

    Args:
        tokens: [B, n] int64, the root first.
        parents: [B, n] int32.
        q_rows: of each node, which row of logits it was drawn from; -1 is none.
        logits: [B * F, V] of each level.
        slots: of each node, the draft's row after the committed ones, -1 for none; None of
            lookups and self-drafts, which have no cache of their own to commit in, and of heads and
            block drafters, which compute rows of accepted nodes again.
    """

    tokens: fx.Node
    parents: fx.Node
    q_rows: list[int]
    logits: list[fx.Node] = field(default_factory=list)
    slots: list[int] | None = None


def draft_stage(
    plan: SpecPlan,
    constants: dict[str, torch.Tensor],
    is_padded: bool = False,
    block_size: int = 0,
    windowed: Collection[str] = (),
) -> fx.Graph:
    """Grow the tree of a plan that speculates.

    Outputs `tokens` [B, N] and, where the tree is data, `parents` [B, N], `ancestors` [B * N, W],
    `depths` [B * N] and `slot_of_<draft>` [B, N] of draft models; of merged trees also `image`
    [B, T]. `q_0`, `q_1`, … are the logits that children were drawn from. Where a drafter says how
    likely its tokens are accepted, and the target may verify a part of a tree, `confidence` [B, F]
    says it of each node with children: of one of them.
    """
    g = StepGraph(
        constants, *STEP_INPUTS, is_padded=is_padded, block_size=block_size, windowed=windowed
    )
    if plan.is_static:
        outputs = _static(g, plan)
    elif plan.dynamic is not None:
        is_product = plan.is_product(plan.drafts[0])
        outputs = draft_block_dynamic(g, plan) if is_product else draft_dynamic(g, plan)
    else:
        outputs = _combined(g, plan)
    return g.finish(**outputs)


def num_levels(plan: SpecPlan) -> int:
    """Levels of logits that the draft stage leaves as `q_0`, `q_1`, …; 0 where no rule reads q."""
    if plan.dynamic is not None or not set(plan.rules) - {0, 1}:
        return 0
    return sum(plan.tree_of(draft).max_depth for draft in plan.asked)


def _static(g: StepGraph, plan: SpecPlan) -> dict[str, fx.Node]:
    (draft,) = plan.drafts
    tree = plan.shape
    logits, tokens, rows, confidence = _grown(g, plan, draft, 0)
    if draft in plan.models and draft not in plan.recomputed:
        g.constant(slots_name(draft), int32(fed_slots(tree)))
    made = {"tokens": tokens} | ({"confidence": g.cat(*confidence)} if confidence else {})
    return made | _drawn_from(g, plan, logits, rows)


def _grown(
    g: StepGraph, plan: SpecPlan, draft: str, column: int
) -> tuple[list[fx.Node], fx.Node, list[int], list[fx.Node]]:
    """Of a static tree: logits, tokens, rows of logits that nodes were drawn from, confidence."""
    if plan.is_product(draft):
        return *draft_block_tree(g, plan, draft, column), block_q_rows(plan, draft), []
    grower = Grower.of(g, plan, draft)
    logits, tokens = draft_tree(g, grower, plan, column)
    confidence = [] if grower.bias is None else grower.bias.confidence
    return logits, tokens, q_rows_of(plan.tree_of(draft)), confidence


def _drawn_from(
    g: StepGraph, plan: SpecPlan, logits: list[fx.Node], rows: list[int]
) -> dict[str, fx.Node]:
    """What MSS and SWOR verify with: logits, and the constant that says which row is whose."""
    if not num_levels(plan):
        return {}
    g.constant("q_rows", int32(rows))
    return {f"q_{i}": level for i, level in enumerate(logits)}


def _combined(g: StepGraph, plan: SpecPlan) -> dict[str, fx.Node]:
    """Several drafts, or a lookup: the tree is data."""
    made, column, row = {}, 0, 0
    for draft in plan.drafts:
        made[draft] = _propose(g, plan, draft, column)
        tree = plan.tree_of(draft)
        if made[draft].logits:
            made[draft].q_rows = [q + row if q >= 0 else -1 for q in made[draft].q_rows]
            row += max(made[draft].q_rows) - row + 1
        column += tree.num_nodes
    if plan.combine == MERGE:
        return _merge(g, plan, made)
    if plan.combine:
        return _vote(g, plan, made)
    (only,) = made.values()
    return {"tokens": only.tokens} | _topology(g, only.parents)


def _propose(g: StepGraph, plan: SpecPlan, draft: str, column: int) -> Proposals:
    tree = plan.tree_of(draft)
    num_nodes = tree.num_nodes
    ngram = lookup_ngram(draft)
    if ngram is not None:
        tokens, parents = g.parts(
            specc.lookup.default,
            2,
            g[HISTORY], g["block_table"], g["cache_len"], g["last_tokens"],
            ngram, num_nodes - 1,
        )  # fmt: skip
        return Proposals(tokens, parents, [-1] * num_nodes)
    if draft == SUFFIX:
        tokens, parents = _chain(g, g[PROPOSALS], num_nodes)
        return Proposals(tokens, parents, [-1] * num_nodes)
    logits, tokens, rows, _ = _grown(g, plan, draft, column)
    constant = g.constant(f"parents_of_{draft}", int32(tree.parents))
    parents = g.expand_rows(constant, num_nodes)
    keeps_rows = draft in plan.models and draft not in plan.recomputed
    return Proposals(tokens, parents, rows, logits, fed_slots(tree) if keeps_rows else None)


def _merge(g: StepGraph, plan: SpecPlan, made: dict[str, Proposals]) -> dict[str, fx.Node]:
    tokens, parents, image = _merged(g, list(made.values()), "merge_start")
    logits = [level for one in made.values() for level in one.logits]
    outputs = {"tokens": tokens, "image": image} | _topology(g, parents)
    outputs |= _drawn_from(g, plan, logits, [q for one in made.values() for q in one.q_rows])
    start = 0
    for draft, one in made.items():
        count = len(one.q_rows)
        own = g.column(image, start, start + count)
        start += count
        if one.slots is not None:
            outputs[slots_name(draft)] = _image_slots(g, draft, own, one.slots, plan.num_nodes)
    return outputs


def _vote(g: StepGraph, plan: SpecPlan, made: dict[str, Proposals]) -> dict[str, fx.Node]:
    """One chain, that of the heaviest majority.

    A draft holds rows of those nodes of it whose whole path it proposed itself. Merging the voted
    chain with all proposals, the chain first, says which: its nodes keep their ids.
    """
    num_nodes = plan.num_nodes
    chains = []
    for one in made.values():
        own, above = g.column(one.tokens, 1, num_nodes), g.column(one.parents, 1, num_nodes)
        alive = g.call(aten.ge.Scalar, above, 0)
        chain = g.call(aten.where.ScalarOther, alive, own, -1)
        chains.append(g.call(aten.unsqueeze.default, chain, 1))
    voted = g.call(specc.vote_chain.default, g.cat(*chains), g[VOTE_WEIGHTS])
    tokens, parents = _chain(g, voted, num_nodes)
    chosen = Proposals(tokens, parents, [-1] * num_nodes)
    _, _, image = _merged(g, [chosen, *made.values()], "vote_start")
    total = 1 + len(made) * (num_nodes - 1) + num_nodes - 1
    outputs = {"tokens": tokens} | _topology(g, parents)
    for place, (draft, one) in enumerate(made.items(), start=1):
        if one.slots is not None:
            own = g.column(image, place * num_nodes, (place + 1) * num_nodes)
            slots = _image_slots(g, draft, own, one.slots, total)
            outputs[slots_name(draft)] = g.column(slots, 0, num_nodes)
    return outputs


def _merged(g: StepGraph, trees: list[Proposals], name: str) -> list[fx.Node]:
    """Tokens, parents and image of the union."""
    starts = [0]
    for tree in trees:
        starts.append(starts[-1] + len(tree.q_rows))
    tokens = g.cat(*(tree.tokens for tree in trees))
    parents = g.cat(*(tree.parents for tree in trees))
    start = g.constant(name, int32(starts))
    return g.parts(specc.merge_trees.default, 3, tokens, parents, start)


def _image_slots(
    g: StepGraph, draft: str, image: fx.Node, slots: list[int], num_nodes: int
) -> fx.Node:
    constant = g.constant(f"slots_in_{draft}", int32(slots))
    return g.call(specc.image_slots.default, image, constant, num_nodes)


def _chain(g: StepGraph, proposals: fx.Node, num_nodes: int) -> list[fx.Node]:
    """Tokens and parents of chains [B, L] that end with -1."""
    alive = g.call(aten.ge.Scalar, proposals, 0)
    above = g.arange(0, num_nodes - 1, 1, torch.int32)
    parents = g.call(aten.where.ScalarOther, alive, above, -1)
    root = g.last(g["last_tokens"], 1)
    no_parent = g.call(aten.full_like.default, root, -1, dtype=torch.int32)
    tokens = g.cat(root, g.call(aten.clamp.default, proposals, 0))
    return [tokens, g.cat(no_parent, parents)]


def _topology(g: StepGraph, parents: fx.Node) -> dict[str, fx.Node]:
    """What verification needs of a tree that is data."""
    words, depths = g.parts(specc.ancestor_words.default, 2, parents)
    return {"parents": parents, "ancestors": words, "depths": depths}


def fed_slots(tree: TokenTree) -> list[int]:
    """A draft reads every node with children, into the row of its own id."""
    return [-1 if node in tree.leaves else node for node in range(tree.num_nodes)]


def q_rows_of(tree: TokenTree) -> list[int]:
    """Row of draft logits of each node's parent, counted over the nodes with children."""
    fed = [node for node in range(tree.num_nodes) if node not in tree.leaves]
    row = {node: i for i, node in enumerate(fed)}
    return [-1, *(row[parent] for parent in tree.parents[1:])]
