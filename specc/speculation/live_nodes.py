"""Trees of which the target verifies the first nodes alone: as many of each request as pay.

A step drafts the whole tree of its plan for every request. How many of its nodes the target then
verifies is a number for each request, its live nodes; the others are dead: they are left out of
the target's pass, and no walk enters them. Nodes are numbered level by level, siblings in the order
in which they were drawn, so the first ones are a tree themselves: the one that a plan with that
smaller tree would have drawn. The number is chosen before anything of the step is drawn, from what
earlier steps showed; therefore every rule that is lossless for the plan stays so. Where drafts that
say how likely their tokens are choose it, it looks at what was drawn: that leaves `ANY_NODES`.
"""

from __future__ import annotations

import functools
import math

from specc.drafters.drafter import ANY_PROPOSALS
from specc.speculation.plans import SpecPlan

# of a node: what sums of expected nodes may be off by
_ROUNDING = 1e-6
# token of a dead node: that of no vocabulary
DEAD = -1
# rules whose output is the target's own whatever nodes are live, also where their number looks at
# what the step has drawn; so is that of greedy requests
ANY_NODES = ANY_PROPOSALS


def can_cut(plan: SpecPlan) -> bool:
    """Whether the target can verify a part of this plan's trees.

    Of trees that are data the first nodes may be anything, and those in tiles have passes of their
    own.
    """
    return plan.speculates and plan.is_static and plan.tile is None


def says_confidence(plan: SpecPlan) -> bool:
    """Whether drafting tells how likely nodes are accepted, and a part of them can be verified."""
    return can_cut(plan) and any(drafter.says_confidence for drafter in plan.models)


@functools.lru_cache(maxsize=256)
def nodes_by_depth(plan: SpecPlan) -> tuple[int, ...]:
    """Nodes of depth 0 … d together, for d = 0 … depth of the plan; of a plan that can be cut."""
    counts, total = [], 0
    for level in plan.tree.levels:
        total += len(level)
        counts.append(total)
    return tuple(counts)


@functools.lru_cache(maxsize=4096)
def captured_rows(num_nodes: int, num_seqs: int, num_live: int) -> int:
    """Rows of a captured pass over the live nodes of some sequences.

    A graph has a fixed number of rows, and which nodes they are is data; those that are left over
    belong to no sequence. There are a few numbers, so that there are few graphs: quarters of
    whole trees, rounded up to as many nodes of each sequence.

    Args:
        num_nodes: of a tree.
        num_seqs: sequences of the graph.
        num_live: nodes of all sequences together that are verified, 1 … num_nodes · num_seqs.
    """
    each = (-(-num_nodes * quarter // 4) for quarter in range(1, 5))
    return next(rows for one in each if (rows := one * num_seqs) >= num_live)


def expected_rows(num_nodes: int, num_seqs: int, expected: float) -> int:
    """The same where that many nodes are expected to be verified: as many rows as hold them.

    Args:
        num_nodes: of a tree.
        num_seqs: sequences of the graph.
        expected: nodes of all sequences together; those beyond all trees are none.
    """
    num_live = min(max(1, math.ceil(expected - _ROUNDING)), num_nodes * num_seqs)
    return captured_rows(num_nodes, num_seqs, num_live)


@functools.lru_cache(maxsize=1024)
def live_levels(plan: SpecPlan, live: int) -> tuple[int, ...]:
    """Draft tokens of depth 1, 2, … that the target verifies, of the first `live` nodes."""
    levels = [sum(node < live for node in level) for level in plan.tree.levels[1:]]
    return tuple(count for count in levels if count)
