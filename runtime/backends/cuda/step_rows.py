"""Rows that products of an engine's steps have: what is worth measuring of them while it loads."""

from __future__ import annotations

from collections.abc import Iterable

from specc.drafters.facts import Passes
from specc.speculation.plans import SpecPlan


def step_rows(plans: Iterable[SpecPlan], draft: str | None, max_batch: int) -> tuple[int, ...]:
    """Numbers of rows of a model's products in steps of these plans, powers of two, ascending.

    A number is that of a pass or of the rows that get logits, rounded up; some may not occur.

    Args:
        draft: name of the model; None is the target.
        max_batch: sequences of a step, at most; there may be any number up to that.
    """
    each = {size for plan in plans for size in _rows_of_sequence(plan, draft)}
    found = {batch * size for batch in range(1, max_batch + 1) for size in each}
    return tuple(sorted({1 << (rows - 1).bit_length() for rows in found}))


def _rows_of_sequence(plan: SpecPlan, draft: str | None) -> set[int]:
    """Of a pass of one sequence, and of what gets logits there."""
    if draft is not None and draft not in plan.model_names:
        return set()
    drafter = None if draft is None else plan.drafter(draft)
    if drafter is not None and drafter.facts.passes is Passes.ONE:
        # for the logits of each depth, where they do not all come of one row
        rows = drafter.passes(plan.max_depth, ())
        return {*rows, plan.max_depth if drafter.has_rows else 1}
    recomputes = any(x.facts.reads_hidden for x in plan.models)
    if plan.dynamic is not None or plan.tile is not None or plan.combine or recomputes:
        # what its passes read depends on more than its shape: whatever there can be
        return set(range(1, max(plan.num_rows, plan.catch_up) + 1))
    # levels, the first of which reads what a draft has not seen, for the logits of the last
    levels = {1, plan.catch_up, *plan.level_sizes}
    if draft is None:
        return {plan.num_nodes} | (levels if plan.self_drafts else set())
    return levels
