"""How many nodes of a drafted tree are worth verifying, by what its drafter says of them.

A DSpark drafter may have a head that says of each node how likely the target accepts one of its
children, given the path down to it. A level is verified while some path down to it has been likely
enough at every node, as deepseek-ai/DeepSpec ends a chain before the first token that is less
likely than `confidence_threshold` (deepspec/eval/dspark/draft_ops.py). These numbers look at the
draws of the step: that is lossless for greedy requests, `coupled` and `delta` alone, see
`specc.speculation.live_nodes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from specc.runtime.scheduling.batch import StepGroup
from specc.speculation.live_nodes import nodes_by_depth
from specc.speculation.plans import SpecPlan


def confident_nodes(plan: SpecPlan, confidence: Tensor, threshold: float) -> tuple[int, ...]:
    """Live nodes of each sequence: all of the levels that are likely enough.

    Args:
        plan: of the step.
        confidence: [B, F] of each node with children, in the order of nodes.
        threshold: least probability that one of a node's children is accepted.
    """
    tree, counts = plan.tree, nodes_by_depth(plan)
    leaves = set(tree.leaves)
    place = {n: i for i, n in enumerate(n for n in range(tree.num_nodes) if n not in leaves)}
    found = []
    for row in confidence.tolist():
        depth, alive = 0, {0}
        while depth < tree.max_depth:
            # nodes whose paths were likely enough, and that go on to be
            alive = {n for n in alive if n in place and row[place[n]] >= threshold}
            if not alive:
                break
            alive = {child for n in alive for child in tree.children(n)}
            depth += 1
        found.append(counts[depth])
    return tuple(found)


def cut_unlikely(group: StepGroup, confidence: Tensor, threshold: float) -> StepGroup:
    """The group with as many live nodes as are likely, and no more than it had."""
    found: Sequence[int] = confident_nodes(group.plan, confidence, threshold)
    if group.live:
        found = [min(pair) for pair in zip(found, group.live, strict=True)]
    return replace(group, live=tuple(found))
