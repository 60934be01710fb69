"""What a plan's steps are expected to accept before it has run: from chains, or from a profile."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

from specc.cost.acceptance import check_acceptance, path_probabilities, row_at
from specc.cost.best_tree import likely_tree
from specc.drafters.drafter import Drafter
from specc.runtime.policies.goodput.constants import TUNED
from specc.speculation.plans import VOTE, SpecPlan


class PlanPrior:
    """Rates by depth of every plan, given those of its draft's chains.

    How the share that a first choice misses falls to the other ranks is taken from the profile's
    table. Without one, k children hold 1 - (1 - first)^√k: 0.80 of three where the first holds
    0.60; the demo pair has 0.82.

    Args:
        acceptance: draft → table by depth and sibling rank, as `specc tune` measures it.
    Raises:
        ConfigError: a table that is none of probabilities.
    """

    def __init__(self, acceptance: Mapping[str, Sequence[Sequence[float]]]) -> None:
        self._tables = {
            draft: check_acceptance([list(row) for row in rows])
            for draft, rows in acceptance.items()
            if rows
        }

    def chain(self, drafter: Drafter, depth: int) -> float:
        """Rate of a chain's token of depth 1, 2, … where the one before it was accepted."""
        if drafter.name in self._tables:
            row = row_at(self._tables[drafter.name], depth - 1)
            return min(0.99, row[0]) if row else 0.0
        return TUNED.model_rate if drafter.is_asked else TUNED.lookup_rate

    def rates(self, plan: SpecPlan, chains: Mapping[str, Sequence[float]]) -> list[float]:
        """Rates of depth 1, 2, … of a plan.

        Args:
            plan: one that speculates.
            chains: draft → rates of its chains by depth; as many as the plan is deep.
        """
        best = [0.0] * plan.max_depth
        for drafter in plan.drafters:
            first = tuple(round(rate, 2) for rate in chains[drafter.name][: plan.max_depth])
            own = self._rates(plan, drafter, first)
            best = [max(pair) for pair in zip(best, own, strict=True)]
        return best

    @functools.lru_cache(maxsize=1024)  # noqa: B019  as long-lived as the engine's policy
    def _rates(self, plan: SpecPlan, drafter: Drafter, first: tuple[float, ...]) -> list[float]:
        if is_chain(plan) or not drafter.is_asked or plan.combine == VOTE:
            return list(first)
        rows = [self._row(drafter.name, depth, rate) for depth, rate in enumerate(first, start=1)]
        tree = plan.shape if plan.dynamic is None else likely_tree(plan.dynamic, rows)
        reached = [0.0] * (plan.max_depth + 1)
        for node, probability in enumerate(path_probabilities(tree, rows)):
            reached[tree.depths[node]] += probability
        return [
            behind / before if before else 0.0 for before, behind in itertools.pairwise(reached)
        ]

    def _row(self, draft: str, depth: int, first: float) -> list[float]:
        """Acceptance by rank, of which only the first is known; no rank above the one before."""
        row = [first]
        table = row_at(self._tables[draft], depth - 1) if draft in self._tables else ()
        for rank in range(1, TUNED.prior_width):
            if table:
                missed = 1 - table[0]
                share = table[rank] / missed if rank < len(table) and missed > 0 else 0.0
                own = share * (1 - first)
            else:
                own = (1 - first) ** rank**0.5 - (1 - first) ** (rank + 1) ** 0.5
            row.append(min(row[-1], own))
        return row


def is_chain(plan: SpecPlan) -> bool:
    """One draft proposes one continuation."""
    return not plan.combine and plan.dynamic is None and plan.num_nodes == plan.max_depth + 1
