"""The plan that measuring found best for as many sequences as are running."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING

from specc.runtime.policies.base import Policy

if TYPE_CHECKING:
    from specc.speculation.metrics import SpecStats


class ProfilePolicy(Policy):
    """Follows a family of plans, one for each measured batch size.

    Args:
        plans: batch size → plan; a size between two of them takes that of the smaller one.
    """

    needs_results = False

    def __init__(self, plans: Mapping[int, str]) -> None:
        self._sizes = sorted(plans)
        self._plans = [plans[size] for size in self._sizes]

    def choose(self, num_running: int, stats: SpecStats) -> str:
        return self._plans[max(0, bisect_right(self._sizes, num_running) - 1)]
