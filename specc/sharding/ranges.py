"""Which ranks hold which indices of a dimension, for what reads whole weights from their files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from specc.artifact.tensor_part import Range
from specc.sharding.shard_plan import Cut


@dataclass(frozen=True)
class Run:
    """Indices start … stop - 1 of a whole dimension, which a rank has from `local` on."""

    start: int
    stop: int
    rank: int
    local: int

    def within(self, first: int, last: int) -> Run | None:
        """What lies between two indices."""
        start, stop = max(self.start, first), min(self.stop, last)
        if start >= stop:
            return None
        return Run(start, stop, self.rank, self.local + start - self.start)


def runs_of(cut: Cut, size: int) -> list[Run]:
    """Which rank holds which indices of a dimension of this size, without what pads it."""
    found, offset = [], 0
    for interval in cut:
        for part in range(interval.parts):
            rank = part * interval.copies
            first, last = interval.piece(rank)
            if first < size:
                found.append(Run(first, min(last, size), rank, offset))
        offset += interval.local_size
    return found


def within(runs: Iterable[Run], ask: Range) -> Iterator[Run]:
    """What of some runs lies in a range, in order."""
    for run in runs:
        if (taken := run.within(*ask)) is not None:
            yield taken
