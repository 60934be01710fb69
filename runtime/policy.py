"""Which plan the next step runs."""

from __future__ import annotations

from typing import Protocol

from specc.metrics import SpecStats


class Policy(Protocol):
    """Chooses a plan before every step."""

    def choose(self, num_running: int, stats: SpecStats) -> str:
        """Name of a plan.

        Args:
            num_running: sequences that will take part.
            stats: what the engine has counted so far.
        """
        ...


class FixedPolicy:
    """Always the same plan."""

    def __init__(self, plan: str) -> None:
        self._plan = plan

    def choose(self, num_running: int, stats: SpecStats) -> str:
        return self._plan
