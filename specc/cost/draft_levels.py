"""How many tokens each pass of a plan's drafts reads."""

from __future__ import annotations

import functools

from specc.drafters.drafter import Drafter
from specc.speculation.plans import SpecPlan
from specc.speculation.tree import TokenTree


@functools.lru_cache(maxsize=256)
def draft_levels(plan: SpecPlan) -> tuple[tuple[Drafter, tuple[int, ...]], ...]:
    """What asks a model → tokens of a sequence that each of its passes reads, one a level.

    The first one reads what a step of the same plan left unread, besides the root. Levels that a
    step computes by itself count as passes over their nodes.
    """
    if not plan.speculates:
        return ()
    dynamic = plan.dynamic
    levels = fed_rows(plan.shape) if dynamic is None else list(dynamic.fed_widths)

    def passes(drafter: Drafter) -> tuple[int, ...]:
        first = drafter.first_level(plan.catch_up)
        found = drafter.passes(plan.max_depth, (first, *levels[1:]))
        return (*found, *levels[1:]) if drafter.computes_levels else found

    return tuple((drafter, passes(drafter)) for drafter in plan.asked)


def fed_rows(tree: TokenTree) -> list[int]:
    """Nodes of each level that the draft reads: those with children."""
    parents = set(tree.parents[1:])
    counts = [sum(node in parents for node in level) for level in tree.levels]
    return counts[: tree.max_depth]
