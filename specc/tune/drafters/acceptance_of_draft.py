"""How often the target accepts what a draft of any kind proposes."""

from __future__ import annotations

from collections.abc import Sequence

from specc.drafters.drafter import Drafter
from specc.drafters.facts import Cache
from specc.drafters.one_pass import OnePass
from specc.runtime.engine import Engine
from specc.tune.acceptance import (
    Trajectory,
    draft_acceptance,
    lookup_acceptance,
    sharpened_acceptance,
)
from specc.tune.candidates import LOOKUP_DEPTH
from specc.tune.drafters.assistant import assistant_acceptance
from specc.tune.drafters.block import block_acceptance
from specc.tune.drafters.head import head_acceptance


def acceptance_of_draft(
    engine: Engine,
    draft: Drafter,
    trajectories: Sequence[Trajectory],
    width: int,
    depth: int,
    is_sampled: bool,
) -> tuple[list[list[float]], list[float]]:
    """Table by depth and sibling rank, and the factors by depth that it has best with.

    Args:
        engine: with nobody else at work.
        draft: no self-draft.
        trajectories: outputs of the target.
        width: children of a node at most.
        depth: levels at most.
        is_sampled: factors are learned: the first child of a greedy request is the same with all.
    """
    if not draft.is_asked:
        return lookup_acceptance(draft, trajectories, LOOKUP_DEPTH), []
    if isinstance(draft, OnePass):
        return block_acceptance(engine, draft, trajectories, width, depth), []
    assert draft.number is not None
    given = (engine, draft.number, trajectories, width, depth)
    if draft.facts.cache is Cache.TARGET:
        return assistant_acceptance(*given), []
    if draft.facts.hands_on:
        return head_acceptance(*given), []
    return sharpened_acceptance(*given) if is_sampled else (draft_acceptance(*given), [])
