"""What a step costs, from measured points: verification by nodes, drafting by frontier rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from specc.errors import ConfigError
from specc.speculation.tree import TokenTree


class MeasuredSeconds:
    """Seconds by a size, between measured points on a straight line.

    More work never takes less time: points that fall against the order of their sizes are noise,
    and a run of them counts with its mean (the least-squares rising fit, by pooling adjacent
    violators). Below the first point its seconds count. Above the last one, seconds grow in
    proportion to the size, which is what they do at most where fixed costs count less and less.

    Args:
        points: size → seconds.
        what: they are of, for errors.
    Raises:
        ConfigError: no point, a size below 1, or seconds that are negative or no number.
    """

    def __init__(self, points: Mapping[int, float], what: str) -> None:
        if not points or any(size < 1 for size in points):
            raise ConfigError(
                f"seconds of {what} at sizes {', '.join(map(str, sorted(points))) or '(none)'}",
                "one measured size or more, each 1 or more",
                "measure size 1 and the largest one at least",
            )
        for size, seconds in points.items():
            if not 0 <= seconds < float("inf"):
                raise ConfigError(
                    f"{seconds} seconds of {what} at size {size}", "0 or more", "measure it again"
                )
        self._sizes = sorted(points)
        self._seconds = _rising([points[size] for size in self._sizes])

    def __call__(self, size: float) -> float:
        """Seconds of a size of 1 or more."""
        sizes, seconds = self._sizes, self._seconds
        i = bisect_left(sizes, size)
        if i == len(sizes):
            return seconds[-1] * size / sizes[-1]
        if i == 0 or sizes[i] == size:
            return seconds[i]
        share = (size - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])


@dataclass(frozen=True)
class StepSeconds:
    """Cost of a step's parts, all at one batch size and context.

    Args:
        verify: seconds of the target's pass by nodes a sequence; 1 is what off costs.
        draft: seconds of one draft level by frontier rows a sequence: the nodes that the level
            reads. The first level's 1 stands for what it really reads, the root and the token
            before it.
        overhead: seconds of a speculative step outside of these passes, such as acceptance and
            commit, that exceed those of an off step.
    """

    verify: MeasuredSeconds
    draft: MeasuredSeconds
    overhead: float = 0.0

    @classmethod
    def from_points(
        cls, verify: Mapping[int, float], draft: Mapping[int, float], overhead: float = 0.0
    ) -> StepSeconds:
        """Build from measured points, size → seconds.

        Raises:
            ConfigError: as `MeasuredSeconds`; no verification of 1 node, or one that
                takes no time; a negative overhead.
        """
        if 1 not in verify:
            raise ConfigError(
                f"seconds of verification at {', '.join(map(str, sorted(verify))) or '(none)'}",
                "1 node among them: what a step without speculation costs",
                "measure 1 node, too",
            )
        if not min(verify.values()) > 0:
            raise ConfigError(
                f"{min(verify.values())} seconds of verification", "above 0", "measure it again"
            )
        if not 0 <= overhead < float("inf"):
            raise ConfigError(f"an overhead of {overhead} seconds", "0 or more", "measure it again")
        return cls(
            MeasuredSeconds(verify, "verification"), MeasuredSeconds(draft, "a level"), overhead
        )

    @property
    def off(self) -> float:
        """Seconds of a step without speculation."""
        return self.verify(1)

    def of(self, tree: TokenTree) -> float:
        """Seconds of a step with this tree; of the root alone, those of off."""
        if tree.num_nodes == 1:
            return self.off
        return self.verify(tree.num_nodes) + self.overhead + sum(map(self.draft, fed_rows(tree)))


def fed_rows(tree: TokenTree) -> list[int]:
    """Nodes of each level that the draft reads: those with children."""
    parents = set(tree.parents[1:])
    counts = [sum(node in parents for node in level) for level in tree.levels]
    return counts[: tree.max_depth]


def _rising(values: list[float]) -> list[float]:
    """The rising sequence with the least squared distance."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pool = (value, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, count = pools.pop()
            total = count + pool[1]
            pool = ((mean * count + pool[0] * pool[1]) / total, total)
        pools.append(pool)
    return [mean for mean, count in pools for _ in range(count)]
