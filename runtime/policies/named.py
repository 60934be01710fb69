"""Policies by name, for an engine's own plans."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specc.close_name import advice
from specc.cost.latency_table import LatencyTable
from specc.errors import ConfigError, RequestError
from specc.runtime.drafters.host_drafts import HostDrafts
from specc.runtime.policies.adaptive import AdaptivePolicy
from specc.runtime.policies.base import Policy
from specc.runtime.policies.best import BestPolicy
from specc.runtime.policies.goodput.policy import GoodputPolicy
from specc.runtime.policies.measured import MeasuredPolicy
from specc.speculation.live_nodes import can_cut
from specc.speculation.plans import OFF, SpecPlan

if TYPE_CHECKING:
    from specc.speculation.metrics import SpecStats

FIXED, ADAPTIVE, BEST, PROFILE, GOODPUT = "fixed", "adaptive", "best", "profile", "goodput"
MEASURED = "measured"
NAMES = (FIXED, MEASURED, ADAPTIVE, BEST, PROFILE, GOODPUT)


def make_policy(
    name: str,
    plans: Mapping[str, SpecPlan],
    host: HostDrafts,
    profile: Mapping[str, Any],
    *,
    shares_pass: bool = True,
    cuts_trees: bool | None = None,
    max_num_seqs: int = 256,
    clock: Callable[[], float] = time.perf_counter,
    adapts_verification: bool = False,
    graph_sizes: Sequence[int] = (),
    plan: str = OFF.name,
) -> Policy:
    """The policy of this name; `fixed` needs no more than its plan and is not made here.

    Args:
        name: `measured` runs one plan where it is faster than off, `adaptive` learns how long a
            chain pays, `best` chooses between a model and a lookup, `profile` follows what
            `specc tune` found, `goodput` follows the load.
        profile: of the engine; empty where there is none.
        shares_pass: sequences of all plans are verified in one pass of the target.
        cuts_trees: the target can verify a part of each sequence's tree; None: where `shares_pass`.
        max_num_seqs: sequences that run together.
        clock: seconds of the host, by which goodput knows how long deciding takes.
        adapts_verification: goodput chooses for each request how much of its tree is verified.
        graph_sizes: sequences that captured steps take, ascending; () are steps of any number.
    Raises:
        RequestError: no such policy, or an engine without the plans that it needs.
        ConfigError: adaptive verification by another policy, or by an engine whose steps verify
            whole trees.
    """
    if adapts_verification:
        _check_adapts(name, shares_pass if cuts_trees is None else cuts_trees)
        if not any(map(can_cut, plans.values())):
            raise ConfigError(
                f"--adaptive-verification, and an engine of the plans {', '.join(plans)}",
                "a chain or a tree of one shape for all steps, in one pass: of those that the draft"
                " chooses, and those in tiles, all nodes are verified",
                "leave it out, or compile with --tree 1,1,1,1, for example",
            )
    if name == ADAPTIVE:
        chains = {OFF.name: 0} | {
            plan.name: plan.max_depth
            for plan in sorted(_chains(plans), key=lambda plan: plan.max_depth)
        }
        if len(chains) > 1:
            return AdaptivePolicy(chains)
        needed, do = (
            "a chain of one draft model or self-draft, or more",
            "compile it with several --tree 1,1,…",
        )
    elif name == MEASURED:
        if plans[plan].speculates:
            return MeasuredPolicy(plans[plan], host)
        needed, do = "a default plan that drafts", "pass --plan, or compile it with --draft"
    elif name == BEST:
        alone = [plan for plan in plans.values() if plan.speculates and not plan.combine]
        if len({bool(plan.asked) for plan in alone}) == 2:
            return BestPolicy(plans, host)
        needed, do = "a plan of a model and one of a lookup", "compile it with --combine best"
    elif name == PROFILE:
        if "plans" in profile:
            return ProfilePolicy({int(size): plan for size, plan in profile["plans"].items()})
        needed, do = "a profile.json in the engine", "run specc tune"
    elif name == GOODPUT:
        latency = profile.get("latency")
        return GoodputPolicy(
            plans,
            LatencyTable.from_json(latency) if latency else None,
            profile.get("acceptance"),
            shares_pass=shares_pass,
            max_num_seqs=max_num_seqs,
            clock=clock,
            adapts_verification=adapts_verification,
            graph_sizes=graph_sizes,
        )
    else:
        needed, do = f"one of {', '.join(NAMES)}", advice(name, NAMES, "choose one of them")
    raise RequestError(f"policy {name!r} for an engine of the plans {', '.join(plans)}", needed, do)


def _check_adapts(name: str, cuts_trees: bool) -> None:
    """Raises ConfigError: nobody here chooses how much of a tree is verified."""
    if name != GOODPUT:
        raise ConfigError(
            f"--adaptive-verification, and the policy {name}",
            f"the policy {GOODPUT}, which knows what nodes cost and yield",
            f"pass --policy {GOODPUT}, without --plan",
        )
    if not cuts_trees:
        raise ConfigError(
            "--adaptive-verification, and an engine whose steps verify whole trees: passes over"
            " padded batches have as many nodes as were compiled",
            "an engine of the backend cpu, cuda or eager, whose passes take any nodes",
            "leave it out, or compile for one of these",
        )


def _chains(plans: Mapping[str, SpecPlan]) -> list[SpecPlan]:
    """Chains of the first draft that has one."""
    found = [
        plan
        for plan in plans.values()
        if plan.speculates and not plan.combine and plan.asked and set(plan.widths) == {1}
    ]
    return [plan for plan in found if plan.drafters == found[0].drafters]


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
