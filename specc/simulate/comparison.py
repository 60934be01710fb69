"""Loads of any kind, each served by fixed plans and by goodput in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specc.cost.latency_table import LatencyTable
from specc.runtime.policies.named import GOODPUT
from specc.simulate.load import Load
from specc.simulate.policies import SIMULATED, make_simulated_policy
from specc.simulate.simulator import Limits, simulate
from specc.speculation.plans import OFF, SpecPlan


@dataclass(frozen=True)
class Comparison:
    """One load, served by everyone.

    Args:
        name: of the load, such as its rate.
        reports: plan or policy → figures of `SimulationReport.to_json`.
    """

    name: str
    reports: Mapping[str, Mapping[str, Any]]

    def latency(self, name: str) -> float:
        """Mean seconds from arrival to the last token."""
        return self.reports[name]["mean_latency_s"]

    @property
    def best(self) -> str:
        """The fixed choice with the lowest mean latency, off included."""
        return min(self._fixed, key=self.latency)

    @property
    def worst(self) -> str:
        return max(self._fixed, key=self.latency)

    @property
    def _fixed(self) -> list[str]:
        return [name for name in self.reports if name not in SIMULATED]

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


def compare(
    loads: Mapping[str, Load],
    truth: LatencyTable,
    plans: Mapping[str, SpecPlan],
    limits: Limits,
    *,
    table: LatencyTable | None = None,
    acceptance: Mapping[str, Sequence[Sequence[float]]] | None = None,
    fixed: Sequence[str] | None = None,
    policies: Sequence[str] = (GOODPUT,),
    noise: float = 0.0,
    progress: Callable[[Comparison], object] = lambda row: None,
) -> list[Comparison]:
    """Serve every load with every choice; each starts without memory of the others.

    Args:
        loads: name → requests.
        truth: how long passes take.
        plans: of the engine, `off` included.
        limits: of the engine.
        table: what the goodput policy believes; None is the truth.
        acceptance: likewise, as `specc tune` measures it; None leaves it to learn.
        fixed: plans to compare with; None is all.
        policies: of `SIMULATED`, goodput among them.
        noise: of seconds; see `simulate`.
        progress: called with every row.
    """
    believed = truth if table is None else table
    rows = []
    for name, load in loads.items():
        reports = {}
        for name in (*(plans if fixed is None else fixed), *policies):
            policy = make_simulated_policy(name, plans, believed, limits, acceptance)
            reports[name] = simulate(load, truth, plans, policy, limits, noise=noise).to_json()
        rows.append(Comparison(name, reports))
        progress(rows[-1])
    return rows
