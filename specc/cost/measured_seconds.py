"""Seconds by a size, from measured points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from specc.errors import ConfigError


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
