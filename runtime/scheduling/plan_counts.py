"""What the steps of each plan have come to, and beside how many requests each plan ran."""

from __future__ import annotations

from dataclasses import dataclass, field

from specc.speculation.metrics import SpecStats


@dataclass
class PlanCounts:
    """Of all steps so far.

    Args:
        by_plan: name → counters of the steps of requests that ran it; only of plans that ran.
        by_load: (name, load) → steps of requests; a load is the largest number of requests of its
            kind: 1, 2, 4 (3 or 4 requests had a step together), 8, …
    """

    by_plan: dict[str, SpecStats] = field(default_factory=dict)
    by_load: dict[tuple[str, int], int] = field(default_factory=dict)

    def begin(self, plan: str, num_steps: int, num_together: int) -> SpecStats:
        """Count where steps were run; what they did is for the result's `record_step`.

        Args:
            plan: that ran.
            num_steps: requests that ran it, and whose rows count.
            num_together: requests that had a step in the same iteration, 1 or more.
        """
        key = plan, 1 << (num_together - 1).bit_length()
        self.by_load[key] = self.by_load.get(key, 0) + num_steps
        return self.by_plan.setdefault(plan, SpecStats())

    def copy(self) -> PlanCounts:
        stats = {name: stats.copy() for name, stats in self.by_plan.items()}
        return PlanCounts(stats, dict(self.by_load))
