"""Which plan the next step runs."""

from __future__ import annotations

from typing import Protocol

from specc.metrics import SpecStats


class Policy(Protocol):
    """Chooses a plan before every step.

    Args:
        needs_results: the choice depends on what the last step did. False promises that it follows
            from `num_running` alone: a step over the same sequences may then be queued, with the
            same plan, before the results of the last one are known, and `choose` is not asked.
            A policy without it counts as one that needs results.
    """

    needs_results: bool

    def choose(self, num_running: int, stats: SpecStats) -> str:
        """Name of a plan.

        Args:
            num_running: sequences that will take part.
            stats: what the engine has counted so far.
        """
        ...


class FixedPolicy:
    """Always the same plan."""

    needs_results = False

    def __init__(self, plan: str) -> None:
        self._plan = plan

    def choose(self, num_running: int, stats: SpecStats) -> str:
        return self._plan
