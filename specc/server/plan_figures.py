"""What plans have come to, by their drafts, depths, and how many requests ran together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, Metric

from specc.runtime.scheduling.plan_counts import PlanCounts
from specc.speculation.plans import SpecPlan


def plans_to_json(counts: PlanCounts, plans: Mapping[str, SpecPlan]) -> dict[str, Any]:
    """For the page: plans that drafted, in the engine's order, and shares of plans by load."""
    drafting = [
        (plan, counts.by_plan[name]) for name, plan in plans.items() if name in counts.by_plan
    ]
    loads: dict[int, dict[str, int]] = {}
    for (name, load), count in counts.by_load.items():
        loads.setdefault(load, {})[name] = count
    return {
        "drafting_plans": [
            {
                "plan": plan.name,
                "draft": draft_of(plan),
                "steps": stats.num_spec_steps,
                "mean_acceptance_length": stats.mean_acceptance_length,
                "acceptance_rate": stats.acceptance_rate,
                "accepted_per_depth": stats.accepted_per_depth,
            }
            for plan, stats in drafting
            if stats.num_spec_steps
        ],
        "plans_by_load": [
            {"requests": load_name(load), "steps": loads[load]} for load in sorted(loads)
        ],
    }  # fmt: skip


def plan_families(
    counts: PlanCounts,
    plans: Mapping[str, SpecPlan],
    family: Callable[..., Any],
    label: Sequence[str],
) -> Iterator[Metric]:
    """The same for Prometheus; see `admin_families`. Sums over plans are those of the engine."""
    steps = family(
        CounterMetricFamily,
        "plan_steps",
        "Steps of requests, by how many of them had one together.",
        "plan",
        "load",
    )
    for (name, load), count in counts.by_load.items():
        steps.add_metric([*label, name, load_name(load)], count)
    yield steps
    names = ("plan", "draft")
    drafts, drafted, accepted = (
        family(CounterMetricFamily, name, text, *names)
        for name, text in (
            ("plan_drafts", "Steps that drafted."),
            ("plan_draft_tokens", "Draft tokens."),
            ("plan_accepted_tokens", "Those accepted."),
        )
    )
    depths = family(
        CounterMetricFamily,
        "plan_accepted_tokens_per_pos",
        "Steps in which the draft token of this position was accepted.",
        *names,
        "position",
    )
    for name, stats in counts.by_plan.items():
        if not stats.num_spec_steps:
            continue
        values = [*label, name, draft_of(plans[name])]
        drafts.add_metric(values, stats.num_spec_steps)
        drafted.add_metric(values, stats.num_draft_tokens)
        accepted.add_metric(values, stats.num_accepted_tokens)
        for position, count in enumerate(stats.accepted_at_depth):
            depths.add_metric([*values, str(position)], count)
    yield from (drafts, drafted, accepted, depths)


def draft_of(plan: SpecPlan) -> str:
    """What proposes in a plan that speculates."""
    return "+".join(drafter.name for drafter in plan.drafters)


def load_name(load: int) -> str:
    """1, 2, 3-4, 5-8, …"""
    return str(load) if load <= 2 else f"{load // 2 + 1}-{load}"
