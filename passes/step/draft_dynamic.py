"""Expand and rerank: a draft model or a self-draft grows the tree that it finds likeliest.

Every level feeds the `top_k` best nodes of the level before, tile by tile, and takes the `top_k`
best children of each; a node's score is the sum of log probabilities on its path. In the end the
best nodes of all levels are kept. Sizes are static, the topology is data. Source: EAGLE-2,
arXiv:2406.16858 §4.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from specc.passes.step.draft_levels import children
from specc.passes.step.proposer import Grower
from specc.passes.step.step_graph import StepGraph, int32, slots_name
from specc.sampling.rows import MIN_TEMPERATURE, Value
from specc.speculation.plans import SpecPlan
from specc.speculation.sharpness import factor_of

aten = torch.ops.aten
specc = torch.ops.specc


def draft_dynamic(
    g: StepGraph, grower: Grower, plan: SpecPlan, root: fx.Node
) -> dict[str, fx.Node]:
    """Grow a tree below a root [B, 1]; outputs as of `draft_stage`."""
    assert plan.dynamic is not None
    k, depth = plan.dynamic.top_k, plan.dynamic.depth
    # no rule of these trees draws by column
    logits = sharpen_sampled(g, plan, grower.first_level(g), 0, 1)
    made, found = children(g, logits, k, g.constant("root_column", int32([0])), 0, scored=True)

    zero = g.call(aten.full_like.default, root, 0, dtype=torch.int32)
    zeros = g.call(aten.expand.default, zero, [-1, k])
    no_parent = g.call(aten.full_like.default, root, -1, dtype=torch.int32)
    # candidates in the order of their drafting
    tokens, parents = [root, made], [no_parent, zeros]
    scores = [g.call(aten.full_like.default, root, 0, dtype=torch.float32), found]
    # what the draft has been fed, by its own rows: parents, and which candidates they are
    fed_parents, fed = [no_parent], [g.call(aten.full_like.default, root, 0)]
    # of the nodes that the next level feeds
    best, best_scores, best_parents = made, found, zeros
    first = g.expand_rows(g.constant("first_candidates", torch.arange(1, k + 1)), k)
    best_candidates = first

    for level in range(1, depth):
        fed_parents.append(best_parents)
        fed.append(best_candidates)
        num_fed = 1 + level * k
        words = None
        if grower.reads_rows:
            words, _ = g.parts(specc.ancestor_words.default, 2, g.cat(*fed_parents))
        first_above = 0 if level == 1 else num_fed - 2 * k
        parts, parents_of = [], grower.parents_of_best(g, best_parents, first_above)
        for first_fed, last_fed in plan.tiles(k):
            size, row = last_fed - first_fed, num_fed - k + first_fed
            rows = None if words is None else g.node_rows(words, row, row + size, num_fed)
            part = g.part(best, 1, first_fed, last_fed, k)
            above = None
            if parents_of is not None:
                above = g.part(parents_of, 1, first_fed, last_fed, k)
            logits = grower.feed_level(g, part, rows, row, size, level, above)
            logits = sharpen_sampled(g, plan, logits, level, size)
            name = "frontier_columns" + (f"_{size}" if size < k else "")
            columns = g.constant(name, torch.zeros(size, dtype=torch.int32))
            parts.append(children(g, logits, k, columns, level, scored=True))
        made, found = (
            g.cat(*(g.reshape(part[i], g.batch, -1) for part in parts)) for i in range(2)
        )
        found = g.reshape(found, g.batch, k, k)
        found = g.call(aten.add.Tensor, found, g.call(aten.unsqueeze.default, best_scores, 2))
        found = g.reshape(found, g.batch, k * k)
        tokens.append(made)
        scores.append(found)
        above = g.call(aten.unsqueeze.default, best_candidates, 2)
        above = g.reshape(g.call(aten.expand.default, above, [-1, -1, k]), g.batch, k * k)
        parents.append(g.call(aten._to_copy.default, above, dtype=torch.int32))
        if level + 1 < depth:
            # ties go to the earlier candidate
            order = g.call(aten.sort.stable, found, stable=True, dim=1, descending=True)
            order = g.column(g.call(operator.getitem, order, 1), 0, k)
            best = g.call(aten.gather.default, made, 1, order)
            best_scores = g.call(aten.gather.default, found, 1, order)
            best_candidates = g.call(aten.add.Tensor, order, 1 + k + (level - 1) * k * k)
            row = g.call(aten.div.Tensor_mode, order, k, rounding_mode="floor")
            row = g.call(aten.add.Tensor, row, num_fed - k)
            best_parents = g.call(aten._to_copy.default, row, dtype=torch.int32)

    size = plan.dynamic.num_nodes
    tree = g.parts(
        specc.rerank_tree.default, 3, g.cat(*tokens), g.cat(*parents), g.cat(*scores), size
    )
    words, depths = g.parts(specc.ancestor_words.default, 2, tree[1])
    outputs = {"tokens": tree[0], "parents": tree[1], "ancestors": words, "depths": depths}
    if grower.drafter.moves_rows:
        rows = _rows_of_candidates(g, plan, g.cat(*fed))
        kept = g.call(aten._to_copy.default, tree[2], dtype=torch.int64)
        outputs[slots_name(grower.drafter.name)] = g.call(aten.gather.default, rows, 1, kept)
    return outputs


def sharpen_sampled(
    g: StepGraph, plan: SpecPlan, logits: fx.Node, level: int, count: int
) -> fx.Node:
    """Logits [B * count, V] that children and their scores are from.

    Greedy requests keep theirs: their children would be the same, and the scores would not.
    """
    factor = factor_of(plan, plan.drafters[0], level)
    if factor == 1:
        return logits
    heat = int(Value.TEMPERATURE)
    heat_of = g.column(g["sampling_values"], heat, heat + 1)
    is_sampled = g.call(aten.ge.Scalar, heat_of, MIN_TEMPERATURE)
    factors = g.call(aten.where.Scalar, is_sampled, factor, 1.0)
    factors = g.call(aten.expand.default, factors, [-1, count])
    return g.call(aten.mul.Tensor, logits, g.reshape(factors, -1, 1))


def _rows_of_candidates(g: StepGraph, plan: SpecPlan, fed: fx.Node) -> fx.Node:
    """[B, M] int32: the draft's row of each candidate, -1 for those that were not fed."""
    assert plan.dynamic is not None
    num_fed, num_candidates = plan.dynamic.num_fed, plan.dynamic.num_candidates
    nothing = g.constant("no_rows", torch.full((num_candidates,), -1, dtype=torch.int32))
    nothing = g.repeat_rows(g.call(aten.unsqueeze.default, nothing, 0), g.batch)
    rows = g.expand_rows(g.constant("fed_rows", torch.arange(num_fed, dtype=torch.int32)), num_fed)
    return g.call(aten.scatter.src, nothing, 1, fed, rows)
