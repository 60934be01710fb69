"""Loads of any kind, each served by fixed plans and by goodput in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specc.cost.latency_table import LatencyTable
from specc.runtime.drafters.host_drafts import HostDrafts
from specc.runtime.policies.base import FixedPolicy, Policy
from specc.runtime.policies.named import ADAPTIVE, GOODPUT, make_policy
from specc.simulate.load import Load
from specc.simulate.simulator import Limits, simulate
from specc.speculation.plans import OFF, SpecPlan

# those that need no tokens: a lookup finds nothing in requests without content
SIMULATED = (GOODPUT, ADAPTIVE)


@dataclass(frozen=True)
class Comparison:
    """One load, served by everyone.

    Args:
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
        for choice in (*(plans if fixed is None else fixed), *policies):
            policy = make_simulated_policy(choice, plans, believed, limits, acceptance)
            reports[choice] = simulate(load, truth, plans, policy, limits, noise=noise).to_json()
        rows.append(Comparison(name, reports))
        progress(rows[-1])
    return rows


def make_simulated_policy(
    name: str,
    plans: Mapping[str, SpecPlan],
    table: LatencyTable,
    limits: Limits,
    acceptance: Mapping[str, Sequence[Sequence[float]]] | None = None,
    *,
    adapts_verification: bool = False,
) -> Policy:
    """A fixed plan, or a policy that has not served yet.

    Args:
        name: of a plan, or one of `SIMULATED`.
        plans: of the engine, `off` included.
        table: what goodput believes of seconds.
        acceptance: what goodput believes of drafts, as `specc tune` measures it; None leaves it to
            learn.
        adapts_verification: see `make_policy`; a plan does not.
    Raises:
        RequestError: no such policy, or an engine without the plans that it needs.
        ConfigError: see `make_policy`.
    """
    if name in plans:
        return FixedPolicy(name)
    return make_policy(
        name,
        plans,
        HostDrafts(plans),
        {"latency": table.to_json(), "acceptance": acceptance},
        shares_pass=limits.shares_pass,
        cuts_trees=True,  # as the scheduler of the simulation does
        max_num_seqs=limits.max_num_seqs,
        clock=lambda: 0.0,  # deciding takes no simulated time
        adapts_verification=adapts_verification,
    )
