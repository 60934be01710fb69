"""The draft stage of a step: what each draft proposes, and how proposals become one tree."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from specc.drafters.drafter import Drafter
from specc.lora.target_adapters import NO_ADAPTERS, TargetAdapters
from specc.passes.drafters.registry import compiler_drafter
from specc.passes.step.proposer import Proposals, Proposer, chain_of
from specc.passes.step.step_graph import STEP_INPUTS, VOTE_WEIGHTS, StepGraph, int32, slots_name
from specc.speculation.plans import MERGE, SpecPlan
from specc.speculation.tree import TokenTree

aten = torch.ops.aten
specc = torch.ops.specc


def draft_stage(
    plan: SpecPlan,
    constants: dict[str, torch.Tensor],
    is_padded: bool = False,
    block_size: int = 0,
    windowed: Collection[str] = (),
    stateful: Collection[str] = (),
    adapters: TargetAdapters = NO_ADAPTERS,
) -> fx.Graph:
    """Grow the tree of a plan that speculates.

    Outputs `tokens` [B, N] and, where the tree is data, `parents` [B, N], `ancestors` [B * N, W],
    `depths` [B * N] and `slot_of_<draft>` [B, N] of draft models; where proposals are not the
    nodes, also `image` [B, T]. `q_0`, `q_1`, … are the logits that children were drawn from. Where
    a drafter says how likely its tokens are accepted, and the target may verify a part of a tree,
    `confidence` [B, F] says it of each node with children: of one of them.
    """
    g = StepGraph(
        constants, *STEP_INPUTS, is_padded=is_padded, block_size=block_size, windowed=windowed,
        stateful=stateful, adapters=adapters,
    )  # fmt: skip
    if plan.is_static:
        outputs = _static(g, plan)
    elif plan.dynamic is not None:
        root = g.last(g["last_tokens"], 1)
        proposer = _proposer(g, plan, plan.drafters[0])
        grow = proposer.propose_budget if plan.dynamic.knows_counts else proposer.propose_best
        outputs = grow(g, plan, root)
    else:
        outputs = _combined(g, plan)
    return g.finish(**outputs)


def _proposer(g: StepGraph, plan: SpecPlan, drafter: Drafter) -> Proposer:
    return compiler_drafter(drafter.facts).proposer(g, plan, drafter)


def num_levels(plan: SpecPlan) -> int:
    """Levels of logits that the draft stage leaves as `q_0`, `q_1`, …; 0 where no rule reads q."""
    if not set(plan.rules) - {0, 1}:
        return 0
    if plan.dynamic is not None:
        return plan.max_depth
    return sum(plan.tree_of(draft).max_depth for draft in plan.asked)


def _static(g: StepGraph, plan: SpecPlan) -> dict[str, fx.Node]:
    (drafter,) = plan.drafters
    made = _proposer(g, plan, drafter).propose(g, plan, 0)
    if drafter.moves_rows:
        g.constant(slots_name(drafter.name), int32(fed_slots(plan.shape)))
    outputs = {"tokens": made.tokens}
    if made.confidence:
        outputs["confidence"] = g.cat(*made.confidence)
    return outputs | _drawn_from(g, plan, made.logits, made.q_rows)


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
    made, column, row = dict[Drafter, Proposals](), 0, 0
    for drafter in plan.drafters:
        one = made[drafter] = _proposer(g, plan, drafter).propose(g, plan, column)
        tree = plan.tree_of(drafter)
        if one.parents is None:
            constant = g.constant(f"parents_of_{drafter.name}", int32(tree.parents))
            one.parents = g.expand_rows(constant, tree.num_nodes)
        if one.logits:
            one.q_rows = [q + row if q >= 0 else -1 for q in one.q_rows]
            row += max(one.q_rows) - row + 1
        column += tree.num_nodes
    if plan.combine == MERGE:
        return _merge(g, plan, made)
    if plan.combine:
        return _vote(g, plan, made)
    (only,) = made.values()
    return {"tokens": only.tokens} | _topology(g, _parents(only))


def _parents(one: Proposals) -> fx.Node:
    assert one.parents is not None, "a tree that is data has them"
    return one.parents


def _merge(g: StepGraph, plan: SpecPlan, made: dict[Drafter, Proposals]) -> dict[str, fx.Node]:
    tokens, parents, image = _merged(g, list(made.values()), "merge_start")
    logits = [level for one in made.values() for level in one.logits]
    outputs = {"tokens": tokens, "image": image} | _topology(g, parents)
    outputs |= _drawn_from(g, plan, logits, [q for one in made.values() for q in one.q_rows])
    start = 0
    for drafter, one in made.items():
        count = len(one.q_rows)
        own = g.column(image, start, start + count)
        start += count
        if drafter.moves_rows:
            image_slots = _image_slots(g, plan, drafter, own, plan.num_nodes)
            outputs[slots_name(drafter.name)] = image_slots
    return outputs


def _vote(g: StepGraph, plan: SpecPlan, made: dict[Drafter, Proposals]) -> dict[str, fx.Node]:
    """One chain, that of the heaviest majority.

    A draft holds rows of those nodes of it whose whole path it proposed itself. Merging the voted
    chain with all proposals, the chain first, says which: its nodes keep their ids.
    """
    num_nodes = plan.num_nodes
    chains = []
    for one in made.values():
        own, above = (g.column(x, 1, num_nodes) for x in (one.tokens, _parents(one)))
        alive = g.call(aten.ge.Scalar, above, 0)
        chain = g.call(aten.where.ScalarOther, alive, own, -1)
        chains.append(g.call(aten.unsqueeze.default, chain, 1))
    voted = g.call(specc.vote_chain.default, g.cat(*chains), g[VOTE_WEIGHTS])
    tokens, parents = chain_of(g, voted, num_nodes)
    chosen = Proposals(tokens, [-1] * num_nodes, parents)
    _, _, image = _merged(g, [chosen, *made.values()], "vote_start")
    total = 1 + len(made) * (num_nodes - 1) + num_nodes - 1
    outputs = {"tokens": tokens} | _topology(g, parents)
    for place, drafter in enumerate(made, start=1):
        if drafter.moves_rows:
            own = g.column(image, place * num_nodes, (place + 1) * num_nodes)
            slots = _image_slots(g, plan, drafter, own, total)
            outputs[slots_name(drafter.name)] = g.column(slots, 0, num_nodes)
    return outputs


def _merged(g: StepGraph, trees: list[Proposals], name: str) -> list[fx.Node]:
    """Tokens, parents and image of the union."""
    starts = [0]
    for tree in trees:
        starts.append(starts[-1] + len(tree.q_rows))
    tokens = g.cat(*(tree.tokens for tree in trees))
    parents = g.cat(*map(_parents, trees))
    start = g.constant(name, int32(starts))
    return g.parts(specc.merge_trees.default, 3, tokens, parents, start)


def _image_slots(
    g: StepGraph, plan: SpecPlan, drafter: Drafter, image: fx.Node, num_nodes: int
) -> fx.Node:
    slots = int32(fed_slots(plan.tree_of(drafter)))
    constant = g.constant(f"slots_in_{drafter.name}", slots)
    return g.call(specc.image_slots.default, image, constant, num_nodes)


def _topology(g: StepGraph, parents: fx.Node) -> dict[str, fx.Node]:
    """What verification needs of a tree that is data."""
    words, depths = g.parts(specc.ancestor_words.default, 2, parents)
    return {"parents": parents, "ancestors": words, "depths": depths}


def fed_slots(tree: TokenTree) -> list[int]:
    """A draft reads every node with children, into the row of its own id."""
    return [-1 if node in tree.leaves else node for node in range(tree.num_nodes)]
