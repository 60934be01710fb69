"""Figures of the last seconds, of what an engine and a server count."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from specc.percentile import percentile
from specc.runtime.service.state import ServiceState

# rates are of the last seconds, looked at no more often than this
_RATE_WINDOW_S, _LOOK_EVERY_S = 5.0, 0.2
# seconds that count, and how many values at most: the latest ones
LATENCY_WINDOW_S, MAX_LATENCIES = 60.0, 4096


@dataclass(frozen=True)
class Rates:
    """Of the last seconds, per second; acceptance is that of the same time."""

    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    requests: float = 0.0
    mean_acceptance_length: float = 0.0
    acceptance_rate: float = 0.0
    # of the prompt tokens that were looked for; None where none were
    prefix_hit_rate: float | None = None


class RateWindow:
    """Differences of an engine's counters over the last seconds."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, ServiceState]] = deque()

    def look(self, state: ServiceState, now_s: float | None = None) -> Rates:
        """Rates up to now; a first look sees none."""
        now_s = time.monotonic() if now_s is None else now_s
        looks = self._looks
        if not looks or now_s - looks[-1][0] >= _LOOK_EVERY_S:
            looks.append((now_s, state))
        # one that is older than the window stays, or rare looks would see nothing
        while len(looks) > 2 and looks[1][0] <= now_s - _RATE_WINDOW_S:
            looks.popleft()
        begin_s, begin = looks[0]
        seconds, old, new = now_s - begin_s, begin.stats, state.stats
        if seconds <= 0:
            return Rates()
        steps = new.num_spec_steps - old.num_spec_steps
        accepted = new.num_accepted_tokens - old.num_accepted_tokens
        drafted = new.num_draft_tokens - old.num_draft_tokens
        return Rates(
            (new.num_prompt_tokens - old.num_prompt_tokens) / seconds,
            (new.num_output_tokens - old.num_output_tokens) / seconds,
            (new.num_requests - old.num_requests) / seconds,
            1 + accepted / steps if steps else 0.0,
            accepted / drafted if drafted else 0.0,
            hit_rate(state, begin),
        )


class RecentLatencies:
    """Seconds that something took, of the last minute; for one thread."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=MAX_LATENCIES)

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
        begin_s = (time.monotonic() if now_s is None else now_s) - LATENCY_WINDOW_S
        values = self._values
        while values and values[0][0] < begin_s:
            values.popleft()
        found = [seconds for _, seconds in values]
        return len(found), [percentile(found, percent) for percent in percents]

    def to_json(self) -> dict[str, Any]:
        """Median and 99th percentile, None where nothing took any time."""
        count, (median, p99) = self.percentiles(50, 99)
        return {"count": count, "p50_s": median, "p99_s": p99}


def hit_rate(state: ServiceState, since: ServiceState | None = None) -> float | None:
    """The share of prompt tokens that were found in the cache."""
    queries, hits = state.prefix_queries, state.prefix_hits
    if since is not None:
        queries, hits = queries - since.prefix_queries, hits - since.prefix_hits
    return hits / queries if queries else None
