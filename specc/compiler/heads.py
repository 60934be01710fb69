"""Drafts that read the target's hidden states: what the target keeps for them, and what is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specc.artifact.backends import BackendFacts
from specc.compiler.candidate import Candidate
from specc.drafters.registry import facts_of
from specc.errors import ConfigError
from specc.speculation.live_nodes import can_cut
from specc.speculation.plans import SpecPlan
from specc.speculation.taps import Taps


def check_heads(candidates: Sequence[Candidate], dtypes: Sequence[str]) -> None:
    """Compare heads with each other, and with the target.

    Args:
        candidates: the target first.
    Raises:
        ConfigError: heads that read different hidden states, or one of another type than those.
    """
    heads = [(x, dtype) for x, dtype in zip(candidates, dtypes, strict=True) if x.head is not None]
    if not heads:
        return
    first = heads[0][0]
    for candidate, dtype in heads:
        if dtype != dtypes[0]:
            raise ConfigError(
                f"{called(candidate)} in {dtype}, which reads hidden states of {dtypes[0]}",
                f"the target's type: {dtypes[0]}",
                "leave out --draft-dtype",
            )
        if _taps(candidate) != _taps(first):
            raise ConfigError(
                f"{called(first)} reads boundaries {_shown(first)}, {called(candidate)}"
                f" {_shown(candidate)}",
                "drafts that read the same hidden states: the target keeps one row a token",
                "pass one of the two",
            )


def with_confidence(
    candidates: Sequence[Candidate], facts: BackendFacts, plans: Sequence[SpecPlan]
) -> list[Candidate]:
    """Leave confidence heads out whose words nothing reads, and which cost logits all the same.

    Args:
        candidates: the target first.
        plans: of the engine; which of them are in tiles is not known yet.
    """
    if not (facts.shares_pass or facts.captures_live):
        why = f"the backend {facts.name} verifies whole trees"
        return [_without_confidence(x, why) for x in candidates]
    cut = {model for plan in plans if can_cut(plan) for model in plan.model_names}
    why = "of its plans none is a chain or a static tree, of which a part can be verified"
    return [x if x.name in cut else _without_confidence(x, why) for x in candidates]


def _without_confidence(candidate: Candidate, why: str) -> Candidate:
    head = candidate.head
    if head is None or not head.drafter(candidate.name).says_confidence:
        return candidate
    told = f"its confidence head is not read: {why}"
    own = replace(head.without_confidence(), warnings=(*head.warnings, told))
    return replace(candidate, head=own)


def taps_of(candidates: Sequence[Candidate]) -> Taps | None:
    """What the target keeps for its heads; None where it has none."""
    return next((_taps(x) for x in candidates if x.head is not None), None)


def with_heads(plans: Sequence[SpecPlan], candidates: Sequence[Candidate]) -> list[SpecPlan]:
    """The plans, each with what its drafts are.

    Raises:
        ConfigError: a tree that is deeper than a block.
    """
    drafters = {x.name: own for x in candidates if (own := x.drafter) is not None}
    return [plan.with_drafters(drafters) for plan in plans]


def trained_lengths(candidates: Sequence[Candidate], max_seq_len: int) -> list[str]:
    """What the user should know where sequences become longer than a head was trained for."""
    return [
        f"{called(x)} was trained for {x.head.trained_length} positions, and sequences have"
        f" up to {max_seq_len}: beyond, fewer of its tokens are accepted"
        for x in candidates
        if x.head is not None and 0 < x.head.trained_length < max_seq_len
    ]


def called(candidate: Candidate) -> str:
    """What errors call a head."""
    assert candidate.head is not None
    what = facts_of(candidate.head.kind).called
    return f"the {what} {candidate.model} ({candidate.name.replace('_', ' ')})"


def _taps(candidate: Candidate) -> Taps:
    assert candidate.head is not None
    return Taps(candidate.head.boundaries, candidate.head.is_last_normed)


def _shown(candidate: Candidate) -> str:
    taps = _taps(candidate)
    places = ", ".join(map(str, taps.boundaries))
    return f"{places} (the last after the final norm)" if taps.is_last_normed else places
