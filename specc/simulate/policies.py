"""Policies for a simulation: those of a real engine, with what they believe of its seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specc.cost.latency_table import LatencyTable
from specc.runtime.drafts.host_drafts import HostDrafts
from specc.runtime.policies.base import FixedPolicy, Policy
from specc.runtime.policies.named import ADAPTIVE, GOODPUT, make_policy
from specc.simulate.simulator import Limits
from specc.speculation.plans import SpecPlan

# those that need no tokens: a lookup finds nothing in requests without content
SIMULATED = (GOODPUT, ADAPTIVE)


def make_simulated_policy(
    name: str,
    plans: Mapping[str, SpecPlan],
    table: LatencyTable,
    limits: Limits,
    acceptance: Mapping[str, Sequence[Sequence[float]]] | None = None,
) -> Policy:
    """A fixed plan, or a policy that has not served yet.

    Args:
        name: of a plan, or one of `SIMULATED`.
        plans: of the engine, `off` included.
        table: what goodput believes of seconds.
        limits: of the engine.
        acceptance: what goodput believes of drafts, as `specc tune` measures it; None leaves it to
            learn.
    Raises:
        RequestError: no such policy, or an engine without the plans that it needs.
    """
    if name in plans:
        return FixedPolicy(name)
    return make_policy(
        name,
        plans,
        HostDrafts(plans),
        {"latency": table.to_json(), "acceptance": acceptance},
        shares_pass=limits.shares_pass,
        max_num_seqs=limits.max_num_seqs,
        clock=lambda: 0.0,  # deciding takes no simulated time
    )
