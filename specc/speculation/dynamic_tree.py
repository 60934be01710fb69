"""Trees whose shape is data: a draft expands more nodes than are verified; the best are kept."""

from __future__ import annotations

from dataclasses import dataclass

from specc.errors import TreeError
from specc.speculation.tree import MAX_NODES


@dataclass(frozen=True)
class DynamicTree:
    """Expand and rerank: a tree of a static size whose topology is data (EAGLE-2, §4).

    Args:
        num_nodes: N of the verified tree, root included.
        top_k: children of every node that is expanded, and nodes expanded on a level.
        depth: levels.
    """

    num_nodes: int
    top_k: int
    depth: int

    def __post_init__(self) -> None:
        if not (self.top_k >= 1 and self.depth >= 1 and self.num_nodes >= 2):
            raise TreeError(
                f"a dynamic tree of {self.num_nodes} nodes, top {self.top_k}, depth {self.depth}",
                "2 nodes or more, 1 or more children, 1 or more levels",
                "for example --tree dynamic:16,4,4",
            )
        if self.num_nodes > self.num_candidates:
            raise TreeError(
                f"a dynamic tree of {self.num_nodes} nodes out of {self.num_candidates} candidates",
                f"at most {self.num_candidates} nodes for top {self.top_k}, depth {self.depth}",
                "choose fewer nodes, or more children or levels",
            )
        most = max(self.num_nodes, self.num_fed)
        if most > MAX_NODES or self.num_candidates > 4 * MAX_NODES:
            raise TreeError(
                f"a dynamic tree of {most} nodes and {self.num_candidates} candidates",
                f"at most {MAX_NODES} nodes and {4 * MAX_NODES} candidates",
                "choose fewer children or levels",
            )

    @property
    def num_candidates(self) -> int:
        """Nodes that are drafted: the root, the first level, then top_k² a level."""
        return 1 + self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def num_fed(self) -> int:
        """Nodes that the draft reads: the root and the best of every level but the last."""
        return 1 + (self.depth - 1) * self.top_k

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Nodes of depth 1, 2, …, as if every level were full in turn."""
        first, rest = self.top_k, self.num_nodes - 1 - self.top_k
        left = [min(first, self.num_nodes - 1)] + [0] * (self.depth - 1)
        for depth in range(1, self.depth):
            left[depth] = max(0, min(self.top_k**2, rest))
            rest -= left[depth]
        return tuple(left)
