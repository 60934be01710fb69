"""Trees whose shape is data: what a draft says of a sequence decides where its nodes are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

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

    @property
    def name(self) -> str:
        """In those of plans."""
        return f"dynamic-{self.num_nodes}-{self.top_k}-{self.depth}"

    @property
    def knows_counts(self) -> bool:
        """Whether how many children a node has was known before they were drawn."""
        return False

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
    def fed_widths(self) -> tuple[int, ...]:
        """Nodes of depth 0, 1, … that the draft is asked about."""
        return (1, *[self.top_k] * (self.depth - 1))

    @property
    def path_widths(self) -> tuple[int, ...]:
        """Nodes of depth 0, 1, … that a draft goes on from which leaves out none that the tree may
        have: a path that N - 1 others beat is in no best tree, nor what goes on from it.
        """
        widths = [1]
        while len(widths) < self.depth:
            widths.append(min(widths[-1] * self.top_k, self.num_nodes - 1))
        return tuple(widths)

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Nodes of depth 1, 2, …, as if every level were full in turn."""
        first, rest = self.top_k, self.num_nodes - 1 - self.top_k
        left = [min(first, self.num_nodes - 1)] + [0] * (self.depth - 1)
        for depth in range(1, self.depth):
            left[depth] = max(0, min(self.top_k**2, rest))
            rest -= left[depth]
        return tuple(left)


@dataclass(frozen=True)
class BudgetTree(DynamicTree):
    """Levels of static sizes, whose nodes are shared out among those above, from the root down.

    How many children a node has follows from the path to it and from the distribution that they are
    drawn from, before they are drawn. So the draws of a node's children are as in static trees,
    and rules that verify draws are lossless, as they are not where nodes are kept for their tokens.
    `num_nodes`, `top_k` and `depth` follow from the levels.

    Args:
        levels: nodes of depth 1, 2, …
    """

    levels: tuple[int, ...] = ()

    @classmethod
    def of(cls, levels: Sequence[int]) -> BudgetTree:
        """Raises TreeError: see `__post_init__`."""
        levels = tuple(levels)
        return cls(1 + sum(levels), max(levels, default=0), len(levels), levels)

    @property
    def name(self) -> str:
        return "budget-" + "-".join(map(str, self.levels))

    @property
    def knows_counts(self) -> bool:
        return True

    def __post_init__(self) -> None:
        levels = self.levels
        told = (1 + sum(levels), max(levels, default=0), len(levels))
        if not levels or min(levels) < 1 or told != (self.num_nodes, self.top_k, self.depth):
            raise TreeError(
                f"a budget of levels {', '.join(map(str, levels)) or '(none)'}",
                "one or more levels, of 1 or more nodes each",
                "for example --tree budget:4,6,4",
            )
        if self.num_nodes > MAX_NODES or self.num_columns > 4 * MAX_NODES:
            raise TreeError(
                f"a budget of {self.num_nodes} nodes, which have {self.num_columns} places",
                f"at most {MAX_NODES} nodes and {4 * MAX_NODES} places: each node may have all"
                " nodes of the next level",
                "choose smaller levels, or fewer",
            )

    @property
    def num_columns(self) -> int:
        """Proposals that there may be: a level's nodes below each node above, and the root."""
        return 1 + sum(above * own for above, own in zip(self.fed_widths, self.levels, strict=True))

    @property
    def num_fed(self) -> int:
        """All nodes but those of the last level."""
        return self.num_nodes - self.levels[-1]

    @property
    def fed_widths(self) -> tuple[int, ...]:
        return (1, *self.levels[:-1])

    @property
    def path_widths(self) -> tuple[int, ...]:
        return self.fed_widths

    @property
    def level_sizes(self) -> tuple[int, ...]:
        return self.levels

    def q_rows(self, is_product: bool) -> list[int]:
        """Row of draft logits of each proposal: that of the node above, or of its depth."""
        rows, row = [-1], 0
        for above, own in zip(self.fed_widths, self.levels, strict=True):
            rows += [row + (0 if is_product else node) for node in range(above) for _ in range(own)]
            row += 1 if is_product else above
        return rows

    def fed_slots(self) -> list[int]:
        """Row of each node in the cache of a draft, -1 of those that it does not read."""
        return [node if node < self.num_fed else -1 for node in range(self.num_nodes)]


def shape_to_json(shape: DynamicTree | None) -> dict[str, Any] | None:
    return asdict(shape) if shape else None


def shape_from_json(data: Mapping[str, Any] | None) -> DynamicTree | None:
    """Raises TypeError, TreeError: no such tree."""
    if not data:
        return None
    sizes = {**data}
    levels = tuple(sizes.pop("levels", ()))
    if wrong := [number for number in (*sizes.values(), *levels) if type(number) is not int]:
        raise TypeError(f"{wrong[0]!r:.40} is no integer")
    return BudgetTree(**sizes, levels=levels) if levels else DynamicTree(**sizes)
