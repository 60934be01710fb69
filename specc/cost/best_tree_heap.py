"""Best-first growth: the optimal static trees where acceptance falls with the sibling rank.

A node's path probability is the product of acceptance along its path, and a tree's expected tokens
are the sum of them, so no tree of n nodes beats the n likeliest of all possible nodes. Those form
a tree: a node is at most as likely as its parent (a factor of at most 1), and at most as likely as
the sibling before it (the same factors but the last, and rows fall), so with ties given to whoever
was reached first, its parent and that sibling are among them. Nothing in this asks for the same row
at every depth. Each tree holds all smaller ones, so one run yields every size.

Source: Sequoia, arXiv:2402.12374 §3; there by the dynamic program of best_tree_dp.py.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from specc.cost.acceptance import Rows, row_at


class GrownNode(NamedTuple):
    """One node in the order of growth.

    Args:
        parent: index of the parent in this order; -1 of the root.
        rank: among its siblings.
        probability: that the node is accepted.
    """

    parent: int
    depth: int
    rank: int
    probability: float


def grow_best_first(rows: Rows, num_nodes: int, max_depth: int) -> list[GrownNode]:
    """Nodes by falling path probability, the root first; the shallower of two equals first.

    Args:
        rows: as `check_acceptance` returns them; no row rises.
        num_nodes: most nodes, root included.
    Returns:
        At most `num_nodes`: fewer where all others are too deep or never accepted.
    """
    grown = [GrownNode(-1, 0, 0, 1.0)]
    # (-probability, depth, parent, rank): unique, and equal for equal input
    heap: list[tuple[float, int, int, int]] = []

    def reach(depth: int, parent: int, rank: int) -> None:
        row = row_at(rows, depth - 1)
        if depth > max_depth or rank >= len(row):
            return
        probability = grown[parent].probability * row[rank]
        if probability > 0:
            heapq.heappush(heap, (-probability, depth, parent, rank))

    reach(1, 0, 0)
    while heap and len(grown) < num_nodes:
        negative, depth, parent, rank = heapq.heappop(heap)
        grown.append(GrownNode(parent, depth, rank, -negative))
        reach(depth, parent, rank + 1)
        reach(depth + 1, len(grown) - 1, 0)
    return grown
