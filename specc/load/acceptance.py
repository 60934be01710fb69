"""From what runs accepted to the dice of a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specc.errors import ConfigError
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import SpecPlan


def measured_acceptance(
    counted: Mapping[str, SpecStats], plans: Mapping[str, SpecPlan]
) -> list[list[float]]:
    """Acceptance by depth and sibling rank that would have led to these counters.

    Chains tell how often the first choice is right. What trees accept beyond that is the second
    rank's: deeper ranks cannot be told apart by counters, and lead to the same depths.

    Args:
        counted: plan → counters of runs in which nothing else drafted.
        plans: of the engine.
    Raises:
        ConfigError: no such run.
    """
    chains: list[list[int]] = []
    trees: list[list[int]] = []
    for name, stats in counted.items():
        plan = plans[name]
        reached = [stats.num_spec_steps, *stats.accepted_at_depth]
        if plan.speculates and set(plan.widths) == {1}:
            chains.append(reached)
        elif plan.speculates and plan.widths:
            wide = next((i for i, width in enumerate(plan.widths) if width == 1), len(plan.widths))
            trees.append(reached[: 1 + wide])
    first, any_rank = _shares(chains), _shares(trees)
    if not first and not any_rank:
        raise ConfigError(
            "no run of a fixed chain or tree",
            "one that shows how often drafts are right",
            "add for example chain-4 to --policies, or pass --acceptance",
        )
    # without a chain nobody tells ranks apart
    first = first or any_rank
    rows = []
    for depth, share in enumerate(first):
        more = any_rank[depth] - share if depth < len(any_rank) else 0.0
        rows.append([share, max(0.0, more)])
    return rows


def _shares(runs: Sequence[Sequence[int]]) -> list[float]:
    """Of each depth, given the one before; up to the last depth that anyone reached.

    Args:
        runs: steps that reached depth 0, 1, … of each plan, as deep as it goes.
    """
    shares = []
    for depth in range(max(map(len, runs), default=1) - 1):
        deep = [reached for reached in runs if len(reached) > depth + 1]
        before = sum(reached[depth] for reached in deep)
        if not before:
            break
        shares.append(sum(reached[depth + 1] for reached in deep) / before)
    return shares
