"""Sets of byte ranges, as sorted arrays: merged, compared, and found outside of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ranges:
    """Ranges of bytes, each of an owner; ranges of one owner do not overlap.

    Args:
        bounds: [n, 2] uint64: first byte, and the one after the last.
        owners: [n] integers.
    """

    bounds: np.ndarray
    owners: np.ndarray

    @classmethod
    def none(cls) -> Ranges:
        return cls(np.empty((0, 2), dtype=np.uint64), np.empty(0, dtype=np.int64))

    def outside_of(self, spans: np.ndarray) -> int | None:
        """A range that does not lie inside of one of the spans, which are merged."""
        if not len(self.bounds) or not len(spans):
            return 0 if len(self.bounds) else None
        at = np.searchsorted(spans[:, 0], self.bounds[:, 0], side="right") - 1
        is_inside = (at >= 0) & (self.bounds[:, 1] <= spans[at, 1])
        return None if is_inside.all() else int(np.argmin(is_inside))


def merged(bounds: np.ndarray) -> np.ndarray:
    """Ranges [n, 2] in any order as the fewest that hold the same bytes, in order."""
    if len(bounds) < 2:
        return bounds
    bounds = bounds[np.argsort(bounds[:, 0], kind="stable")]
    ends = np.maximum.accumulate(bounds[:, 1])
    (breaks,) = np.nonzero(bounds[1:, 0] > ends[:-1])
    first = np.concatenate([[0], breaks + 1])
    last = np.concatenate([breaks, [len(bounds) - 1]])
    return np.stack([bounds[first, 0], ends[last]], axis=1)


def first_conflict(
    ranges: Ranges,
    others: Ranges,
    groups: np.ndarray,
    is_conflict: Callable[[int, int], bool],
) -> tuple[int, int, int] | None:
    """An owner of a range, one of another that overlaps it, and the first byte of both.

    Args:
        others: any; may be the same.
        groups: [owners] owners of one group never conflict, and are passed over fast.
        is_conflict: whether two owners of different groups do.
    """
    if not len(ranges.bounds) or not len(others.bounds):
        return None
    # where the set of ranges changes; between two neighbors it is one
    edges = np.unique(np.concatenate([ranges.bounds.ravel(), others.bounds.ravel()]))
    low, high = np.full(len(edges), len(groups)), np.full(len(edges), -1)
    is_in_both = np.ones(len(edges), dtype=bool)
    covered = [_segments(one, edges) for one in (ranges, others)]
    for segment, owner in covered:
        np.minimum.at(low, segment, groups[owner])
        np.maximum.at(high, segment, groups[owner])
        is_in_one = np.zeros(len(edges), dtype=bool)
        is_in_one[segment] = True
        is_in_both &= is_in_one
    (mine, my_owner), (theirs, their_owner) = covered
    for segment in np.nonzero(is_in_both & (low != high))[0].tolist():
        for one in np.unique(my_owner[mine == segment]).tolist():
            for other in np.unique(their_owner[theirs == segment]).tolist():
                if groups[one] != groups[other] and is_conflict(one, other):
                    return one, other, int(edges[segment])
    return None


def _segments(ranges: Ranges, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(segment, owner) for all segments that ranges cover."""
    first = np.searchsorted(edges, ranges.bounds[:, 0])
    count = np.searchsorted(edges, ranges.bounds[:, 1]) - first
    begin = np.cumsum(count) - count
    segment = np.arange(count.sum()) - np.repeat(begin - first, count)
    return segment, np.repeat(ranges.owners, count)
