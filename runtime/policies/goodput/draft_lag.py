"""How far drafts are behind their requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specc.speculation.plans import SpecPlan

if TYPE_CHECKING:
    from specc.runtime.scheduling.request import Request


def lag(request: Request, plan: SpecPlan) -> dict[int, int]:
    """Draft → committed tokens that it must read before this plan's first level."""
    behind = {}
    for draft in plan.draft_lens:
        missed = request.cache_len - request.draft_lens[draft]
        behind[draft] = missed if missed > plan.catch_up - 1 else 0
    return behind
