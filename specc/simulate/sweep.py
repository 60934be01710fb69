"""Mean latency over request rate: off, every fixed plan, and the goodput policy, simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specc.cost.latency_table import LatencyTable
from specc.runtime.policies.base import FixedPolicy
from specc.runtime.policies.goodput.policy import GoodputPolicy
from specc.simulate.load import Load
from specc.simulate.simulator import Limits, simulate
from specc.speculation.plans import OFF, SpecPlan

GOODPUT = "goodput"


@dataclass(frozen=True)
class SweepRow:
    """One load, served by everyone.

    Args:
        name: of the load, such as its rate.
        reports: plan or `goodput` → figures of `SimulationReport.to_json`.
    """

    name: str
    reports: Mapping[str, Mapping[str, Any]]

    def latency(self, who: str) -> float:
        """Mean seconds from arrival to the last token."""
        return self.reports[who]["mean_latency_s"]

    @property
    def best(self) -> str:
        """The fixed choice with the lowest mean latency, off included."""
        return min(self._fixed, key=self.latency)

    @property
    def worst(self) -> str:
        return max(self._fixed, key=self.latency)

    @property
    def _fixed(self) -> list[str]:
        return [who for who in self.reports if who != GOODPUT]

    def to_json(self) -> dict[str, Any]:
        """Ratios of mean latencies, and all reports."""
        goodput = self.latency(GOODPUT)
        return {
            "load": self.name,
            "best_fixed": self.best,
            "worst_fixed": self.worst,
            "goodput_over_best": round(goodput / self.latency(self.best), 4),
            "goodput_over_off": round(goodput / self.latency(OFF.name), 4),
            "worst_over_goodput": round(self.latency(self.worst) / goodput, 4),
            "reports": dict(self.reports),
        }


def sweep(
    loads: Mapping[str, Load],
    truth: LatencyTable,
    plans: Mapping[str, SpecPlan],
    limits: Limits,
    *,
    table: LatencyTable | None = None,
    acceptance: Mapping[str, Sequence[Sequence[float]]] | None = None,
    fixed: Sequence[str] | None = None,
    noise: float = 0.0,
    progress: Callable[[SweepRow], object] = lambda row: None,
) -> list[SweepRow]:
    """Serve every load with every choice; each starts without memory of the others.

    Args:
        loads: name → requests.
        truth: how long passes take.
        plans: of the engine, `off` included.
        limits: of the engine.
        table: what the goodput policy believes; None is the truth.
        acceptance: likewise, as `specc tune` measures it; None leaves it to learn.
        fixed: plans to compare with; None is all.
        noise: of seconds; see `simulate`.
        progress: called with every row.
    """
    rows = []
    for name, load in loads.items():
        reports = {
            plan: simulate(load, truth, plans, FixedPolicy(plan), limits, noise=noise).to_json()
            for plan in (plans if fixed is None else fixed)
        }
        policy = GoodputPolicy(
            plans,
            truth if table is None else table,
            acceptance,
            shares_pass=limits.shares_pass,
            max_num_seqs=limits.max_num_seqs,
            clock=lambda: 0.0,  # deciding takes no simulated time
        )
        reports[GOODPUT] = simulate(load, truth, plans, policy, limits, noise=noise).to_json()
        rows.append(SweepRow(name, reports))
        progress(rows[-1])
    return rows
