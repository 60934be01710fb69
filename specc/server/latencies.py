"""Latencies of the last minute, for the page: what a histogram since the start cannot show."""

from __future__ import annotations

import time
from collections import deque

from specc.percentile import percentile

# seconds that count, and how many values at most: the latest ones
WINDOW_S, MAX_VALUES = 60.0, 4096


class RecentLatencies:
    """Seconds that something took, of the last minute; for one thread."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=MAX_VALUES)

    def add(self, seconds: float, now_s: float | None = None) -> None:
        self._values.append((time.monotonic() if now_s is None else now_s, seconds))

    def percentiles(
        self, *percents: float, now_s: float | None = None
    ) -> tuple[int, list[float | None]]:
        """How many values there are, and their percentiles.

        Args:
            percents: 0 … 100.
            now_s: the end of the minute; None for now.
        """
        begin_s = (time.monotonic() if now_s is None else now_s) - WINDOW_S
        values = self._values
        while values and values[0][0] < begin_s:
            values.popleft()
        found = [seconds for _, seconds in values]
        return len(found), [percentile(found, percent) for percent in percents]
