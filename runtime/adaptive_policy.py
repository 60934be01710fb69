"""A policy that learns how long a chain pays, for each batch size."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from specc.errors import ConfigError
from specc.metrics import SpecStats
from specc.runtime.adaptive_length import AdaptiveLength


class AdaptivePolicy:
    """Chooses among chains of different length, off included, by what they have yielded.

    One state a batch size, rounded up to a power of two: what a step costs depends on it. A new
    size starts from the length that the last one had found. Rounds in which requests ran different
    plans, because some of them cannot or do not want to speculate, teach nothing.

    Args:
        plans: name → tokens that the plan drafts a step (0 of off), rising: chains of one draft.
        options: of `AdaptiveLength`.
    Raises:
        ConfigError: no plan, lengths out of order, or an option outside its range.
    """

    needs_results = True

    def __init__(self, plans: Mapping[str, int], **options: Any) -> None:
        lengths = list(plans.values())
        if not lengths or any(a >= b for a, b in itertools.pairwise(lengths)):
            raise ConfigError(
                f"plans {dict(plans)}",
                "one or more, each longer than the one before",
                "compile the engine with several chains: --num-speculative-tokens 2,4,8",
            )
        self._names = {length: name for name, length in plans.items()}
        self._options = options
        self._lengths: dict[int, AdaptiveLength] = {}
        self._last = self._length_of(1)
        self._before = SpecStats()

    def choose(self, num_running: int, stats: SpecStats) -> str:
        """Learn from the step since the last call, and name the next one's plan."""
        self._observe(stats)
        if num_running:
            self._last = self._length_of(num_running)
        return self._names[self._last.current]

    def _length_of(self, num_running: int) -> AdaptiveLength:
        bucket = 1 << (num_running - 1).bit_length()
        if bucket not in self._lengths:
            start = self._last.home if self._lengths else None
            self._lengths[bucket] = AdaptiveLength(list(self._names), start=start, **self._options)
        return self._lengths[bucket]

    def _observe(self, stats: SpecStats) -> None:
        before, self._before = self._before, stats.copy()
        num_passes = stats.num_step_passes - before.num_step_passes
        num_steps = stats.num_steps - before.num_steps
        num_spec_steps = stats.num_spec_steps - before.num_spec_steps
        length = self._last.current
        # one step, of the plan that was chosen; counters that fell are those of a new engine
        if num_passes != 1 or num_steps < 1 or num_spec_steps != (num_steps if length else 0):
            return
        seconds = _step_seconds(stats) - _step_seconds(before)
        counts = [
            now - then
            for now, then in itertools.zip_longest(
                stats.accepted_at_depth, before.accepted_at_depth, fillvalue=0
            )
        ]
        # sequences by falling acceptance: the i-th accepted a depth that more than i have accepted
        num_tokens = [1 + sum(count > i for count in counts) for i in range(num_steps)]
        if seconds > 0 and max(num_tokens) <= length + 1:
            self._last.observe(seconds, num_tokens)


def _step_seconds(stats: SpecStats) -> float:
    return stats.draft_s + stats.verify_s + stats.whole_s + stats.commit_s
