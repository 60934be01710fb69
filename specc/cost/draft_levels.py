"""How many tokens each pass of a plan's drafts reads."""

from __future__ import annotations

import functools
import itertools

from specc.speculation.plans import SpecPlan
from specc.speculation.tree import TokenTree


@functools.lru_cache(maxsize=256)
def draft_levels(plan: SpecPlan) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Draft model or view → tokens of a sequence that each of its passes reads, one a level.

    The first one reads what a step of the same plan left unread, besides the root.
    """
    if not plan.speculates:
        return ()
    if plan.dynamic is not None:
        levels = [1, *itertools.repeat(plan.dynamic.top_k, plan.dynamic.depth - 1)]
    else:
        levels = fed_rows(plan.shape)

    def passes(draft: str) -> tuple[int, ...]:
        if (block := plan.block_of(draft)) is not None:
            # one pass: what the last step may have accepted, and the block
            return (block.num_read(plan.max_depth),)
        return plan.first_level(draft), *levels[1:]

    return tuple((draft, passes(draft)) for draft in plan.asked)


def fed_rows(tree: TokenTree) -> list[int]:
    """Nodes of each level that the draft reads: those with children."""
    parents = set(tree.parents[1:])
    counts = [sum(node in parents for node in level) for level in tree.levels]
    return counts[: tree.max_depth]
