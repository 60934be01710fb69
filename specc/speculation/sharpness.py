"""How sharp drafts are: a factor β of their logits for each depth, before noise is added.

`coupled` proposes the tokens with the best β · s + g, s the draft's processed logits and g the
noise by which the target chooses. How often both agree depends on the entropy of the draft: one
that learned from greedy text, say, is too sharp at temperature 1, and gains from β < 1. What is put
out never depends on it: `coupled` and `delta` ask the target alone, `mss` and `swor` verify with
the logits that children were drawn from, which are those times β. Greedy requests propose the
same trees: β is positive, and scores of dynamic trees are not multiplied for them.
"""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from collections.abc import Mapping, Sequence

from specc.drafters.drafter import Drafter
from specc.speculation.plans import SpecPlan

_SUFFIX = re.compile(r"-sharp-[0-9a-f]{4}$")


def sharpened(plan: SpecPlan, factors: Mapping[str, Sequence[float]]) -> SpecPlan:
    """A plan with these factors in place of those that it has, under a name of its own.

    Args:
        factors: draft → β by depth, one or more; the last one counts below, too. Drafts that are
            not named have 1.
    """
    name = _SUFFIX.sub("", plan.name)
    rows = []
    for drafter in plan.asked:
        own = list(factors.get(drafter.name, ())) or [1.0]
        rows.append(tuple(float(own[min(d, len(own) - 1)]) for d in range(plan.max_depth)))
    if all(x == 1 for row in rows for x in row):
        return dataclasses.replace(plan, name=name, sharpness=())
    code = zlib.crc32(repr(rows).encode()) & 0xFFFF
    return dataclasses.replace(plan, name=f"{name}-sharp-{code:04x}", sharpness=tuple(rows))


def factor_of(plan: SpecPlan, draft: Drafter, depth: int) -> float:
    """β of the children of nodes at a depth, the root's at 0."""
    return plan.sharpness[plan.asked.index(draft)][depth] if plan.sharpness else 1.0


def describe_sharpness(plan: SpecPlan) -> str:
    """`0.84, 0.71 (draft_0)`, for people; empty where nothing is changed."""
    rows = [", ".join(f"{x:.2f}" for x in row) for row in plan.sharpness]
    if len(rows) < 2:
        return "".join(rows)
    return "; ".join(f"{row} ({draft.name})" for draft, row in zip(plan.asked, rows, strict=True))


def expected_gain(hits: Sequence[bool], others: Sequence[bool]) -> float:
    """How many standard errors one choice is better than another at the same places."""
    better = sum(a and not b for a, b in zip(hits, others, strict=True))
    worse = sum(b and not a for a, b in zip(hits, others, strict=True))
    return (better - worse) / math.sqrt(better + worse) if better + worse else 0.0
