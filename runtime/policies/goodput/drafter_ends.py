"""How often drafters end their trees themselves, by depth; see `specc.speculation.confidence`.

A level that its drafter has left out was neither accepted nor refused: what is learned of
acceptance comes from levels that were verified. What a step yields and costs depends on both, so
how often drafters go on is learned by itself, from levels that the policy had allowed. Paths that
were accepted are counted apart: drafters tend to be surer of these, and they alone give tokens.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from specc.runtime.policies.depth_acceptance import DepthAcceptance
from specc.runtime.policies.goodput.constants import TUNED
from specc.runtime.policies.goodput.plan_prior import is_chain
from specc.speculation.live_nodes import can_cut, nodes_by_depth
from specc.speculation.plans import SpecPlan


class ShownLevels(NamedTuple):
    """What one step of a request showed.

    Args:
        allowed: levels of its tree that the policy let the target verify.
        verified: those of them that its drafter was sure enough of.
        accepted: of these.
    """

    allowed: int
    verified: int
    accepted: int


class _Counts:
    """Whether levels go on, of all trees and of paths that were accepted."""

    def __init__(self, depth: int) -> None:
        self.drafted, self.accepted = DepthAcceptance(depth), DepthAcceptance(depth)


class DrafterEnds:
    """Probabilities that a drafter goes on, of all requests; chains of a draft share theirs."""

    def __init__(self, plans: Iterable[SpecPlan]) -> None:
        self._depths: dict[str, int] = {}
        for plan in plans:
            key = _key(plan)
            self._depths[key] = max(self._depths.get(key, 0), plan.max_depth)
        # of those that have ended a tree, or might have
        self._known: dict[str, _Counts] = {}
        # plan → expected nodes by depth, until something is observed
        self._nodes: dict[str, tuple[float, ...]] = {}

    def observe(self, plan: SpecPlan, shown: Sequence[ShownLevels]) -> None:
        """Take a step whose drafter said how much of each tree is verified."""
        shown = [one for one in shown if one.allowed]
        if not shown:
            return
        key = _key(plan)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Counts(self._depths[key])
        news = _Counts(self._depths[key])
        for allowed, verified, accepted in shown:
            news.drafted.add(allowed, [verified + 1])
            # the level after the last accepted one is the last of which such a path tells
            asked = min(allowed, accepted + 1)
            news.accepted.add(asked, [min(verified, asked) + 1])
        self._nodes.clear()
        fade = max(0.5, 1 - len(shown) / TUNED.rates_memory)
        known.drafted.merge(news.drafted, fade)
        known.accepted.merge(news.accepted, fade)

    def ends(self, plan: SpecPlan) -> bool:
        """The drafter of this plan says how much is verified, so that any part of a tree may be."""
        return can_cut(plan) and _key(plan) in self._known

    def going_on(self, plan: SpecPlan) -> list[float]:
        """Probability of level 1, 2, … to be verified where it may, after accepted levels."""
        if not self.ends(plan):
            return [1.0] * plan.max_depth
        return _rates(self._known[_key(plan)].accepted, plan.max_depth)

    def nodes(self, plan: SpecPlan) -> tuple[float, ...]:
        """Expected nodes of a tree that are verified where the levels to depth 0, 1, … may be.

        Of one of which no part can be verified: all, alone.
        """
        found = self._nodes.get(plan.name)
        if found is None:
            found = self._nodes[plan.name] = self._expected_nodes(plan)
        return found

    def _expected_nodes(self, plan: SpecPlan) -> tuple[float, ...]:
        if not can_cut(plan):
            return (plan.num_nodes,)
        if not self.ends(plan):
            return nodes_by_depth(plan)
        rates = _rates(self._known[_key(plan)].drafted, plan.max_depth)
        reached = itertools.accumulate(rates, operator.mul)
        counts = map(operator.mul, plan.level_sizes, reached)
        return tuple(itertools.accumulate(counts, initial=1.0))


def _rates(counts: DepthAcceptance, depth: int) -> list[float]:
    """Of nothing drafters are taken to be unsure; depths are like the one before at first."""
    rates = [1.0]
    for level in range(1, depth + 1):
        rates.append(counts.rate_toward(level, rates[-1], TUNED.rates_prior))
    return rates[1:]


def _key(plan: SpecPlan) -> str:
    return plan.drafts[0] if is_chain(plan) else plan.name
