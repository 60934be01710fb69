"""How far measured seconds are from a table's, by kind of work and by size."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import deque

from specc.runtime.policies.goodput.constants import TUNED


class LatencyCorrection:
    """A factor on a table's seconds: of each size, the median of the last measurements.

    The median moves slowly and ignores outliers such as the first run of a program. Sizes count
    by half octaves; between two that were measured the logarithm of the factor is on a straight
    line, and beyond them it stays.
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        self._sizes: list[int] = []
        self._logs: list[float] = []
        self.num_observed = 0

    def observe(self, size: float, predicted: float, measured: float) -> None:
        """Compare seconds of a pass; what took no time, or was to take none, says nothing.

        Args:
            size: tokens or sequences, 1 or more.
            predicted: by the table.
            measured: the same pass.
        """
        if predicted <= 0 or not 0 < measured < math.inf:
            return
        log = math.log(measured / predicted)
        if abs(log) > math.log(TUNED.most_ratio):
            return
        self.num_observed += 1
        octave = _half_octave(size)
        seen = self._seen.get(octave)
        if seen is None:
            seen = self._seen[octave] = deque(maxlen=TUNED.ratio_memory)
            i = bisect_left(self._sizes, octave)
            self._sizes.insert(i, octave)
            self._logs.insert(i, log)
        seen.append(log)
        self._logs[bisect_left(self._sizes, octave)] = statistics.median(seen)

    def __call__(self, size: float) -> float:
        """Factor of this size; 1 where nothing was measured."""
        sizes, logs = self._sizes, self._logs
        if not sizes:
            return 1.0
        octave = 2 * math.log2(max(1.0, size))
        i = bisect_left(sizes, octave)
        if i == 0 or i == len(sizes):
            return math.exp(logs[min(i, len(sizes) - 1)])
        share = (octave - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return math.exp(logs[i - 1] + share * (logs[i] - logs[i - 1]))

    @property
    def is_known(self) -> bool:
        """Something was measured."""
        return bool(self._sizes)


def _half_octave(size: float) -> int:
    return round(2 * math.log2(max(1.0, size)))
