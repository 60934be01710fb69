"""A policy that learns how long a chain pays, for each batch size."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from specc.errors import ConfigError
from specc.runtime.policies.adaptive_length import TUNED, AdaptiveConstants, AdaptiveLength
from specc.runtime.policies.base import Policy

if TYPE_CHECKING:
    from specc.runtime.scheduling.batch import Batch, RunResult
    from specc.speculation.metrics import SpecStats


class AdaptivePolicy(Policy):
    """Chooses among chains of different length, off included, by what they have yielded.

    One state a batch size, rounded up to a power of two: what a step costs depends on it. A new
    size starts from the length that the last one had found. Rounds in which requests ran different
    plans, because some of them cannot or do not want to speculate, teach nothing; nor do those
    that were still in flight when their size went on to another length.

    Args:
        plans: name → tokens that the plan drafts a step (0 of off), rising: chains of one draft.
        constants: of `AdaptiveLength`.
    Raises:
        ConfigError: no plan, or lengths out of order.
    """

    chooses_late = True

    def __init__(self, plans: Mapping[str, int], constants: AdaptiveConstants = TUNED) -> None:
        lengths = list(plans.values())
        if not lengths or any(a >= b for a, b in itertools.pairwise(lengths)):
            raise ConfigError(
                f"plans {dict(plans)}",
                "one or more, each longer than the one before",
                "compile the engine with several chains: --num-speculative-tokens 2,4,8",
            )
        self._plans = dict(plans)
        self._names = {length: name for name, length in plans.items()}
        self._constants = constants
        self._lengths: dict[int, AdaptiveLength] = {}
        self._last = self._length_of(1)

    def choose(self, num_running: int, stats: SpecStats) -> str:
        """Name the plan of the next step, by the rounds that were observed."""
        if num_running:
            self._last = self._length_of(num_running)
        return self._names[self._last.current]

    def observe_batch(self, batch: Batch, result: RunResult) -> None:
        """Take the outcome of an iteration that was one step."""
        if len(batch.groups) != 1:
            return
        (group,), (step,) = batch.groups, result.steps
        state = self._lengths.get(_bucket(len(group.requests)))
        seconds = sum(step.stage_s.values())
        is_current = state is not None and self._plans.get(group.plan.name) == state.current
        if state is not None and is_current and seconds > 0:
            state.observe(seconds, [accepted + 1 for accepted in step.num_accepted])

    def _length_of(self, num_running: int) -> AdaptiveLength:
        bucket = _bucket(num_running)
        if bucket not in self._lengths:
            start = self._last.home if self._lengths else None
            self._lengths[bucket] = AdaptiveLength(
                list(self._names), start=start, constants=self._constants
            )
        return self._lengths[bucket]


def _bucket(num_running: int) -> int:
    return 1 << (num_running - 1).bit_length()
