"""Which drafts of an engine read its target's hidden states."""

from __future__ import annotations

from collections.abc import Iterable

from specc.speculation.plans import SpecPlan


def heads_of(plans: Iterable[SpecPlan]) -> set[int]:
    """Numbers of the heads of some plans: what they hand on stands for hidden states."""
    return {_number(name) for plan in plans for name in plan.heads}


def blocks_of(plans: Iterable[SpecPlan]) -> set[int]:
    """Numbers of the block drafters of some plans."""
    return {_number(block.draft) for plan in plans for block in plan.blocks}


def _number(draft: str) -> int:
    return int(draft.removeprefix("draft_"))
