"""Policies that can run in simulated time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specc.cost.latency_table import LatencyTable
from specc.runtime.drafters.host_drafts import HostDrafts
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
