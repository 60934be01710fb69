"""How many tokens a step of a plan gives a request: what all requests show, and how it differs.

All requests share rates by depth; chains of one draft share them whatever their length, every
other plan has its own. A request differs from the others by one factor on the odds of being
accepted, at all depths and for all plans of a draft alike. So a few steps of one plan tell what
to expect of every other one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from specc.drafters.drafter import Drafter
from specc.runtime.policies.depth_acceptance import DepthAcceptance
from specc.runtime.policies.goodput.constants import TUNED
from specc.runtime.policies.goodput.drafter_ends import DrafterEnds
from specc.runtime.policies.goodput.plan_prior import PlanPrior, is_chain
from specc.speculation.plans import SpecPlan


class _Own:
    """Tokens of one request that were accepted and refused, and how many were expected to be."""

    def __init__(self) -> None:
        self.accepted = self.refused = 0.0
        self.expected = self.unexpected = 0.0
        # tokens of this block, how many more were accepted than expected, and the variance of that
        self._asked, self._surplus, self._variance = 0, 0.0, 0.0

    def add(self, accepted: int, length: int, rates: Sequence[float], spread: _Spread) -> None:
        asked = min(accepted + 1, length)
        expected = sum(rates[:asked])
        self.accepted = TUNED.own_keep * self.accepted + accepted
        self.refused = TUNED.own_keep * self.refused + (asked - accepted)
        self.expected = TUNED.own_keep * self.expected + expected
        self.unexpected = TUNED.own_keep * self.unexpected + (asked - expected)
        self._asked += asked
        self._surplus += accepted - expected
        self._variance += sum(rate * (1 - rate) for rate in rates[:asked])
        if self._asked >= TUNED.block:
            spread.add(self._asked, self._surplus, self._variance)
            self._asked, self._surplus, self._variance = 0, 0.0, 0.0

    def factor(self, alike: float) -> float:
        """Logarithm of the factor on the odds.

        Args:
            alike: accepted and refused tokens that no difference to the others counts for.
        """
        seen = (self.accepted + alike) / (self.refused + alike)
        return math.log(seen * (self.unexpected + alike) / (self.expected + alike))


class _Spread:
    """How much requests differ: the correlation of a request's tokens.

    Of n tokens with variance V, had they nothing to do with each other, the surplus has the
    variance V (1 + (n - 1) correlation) where requests differ as a beta distribution has it.
    So what differs by chance alone is not taken for a property of a request.
    """

    def __init__(self) -> None:
        # p (1 - p) of a middling p
        self._weight = TUNED.correlation_blocks * 0.2 * TUNED.block * (TUNED.block - 1)
        self._surplus = TUNED.correlation * self._weight

    def add(self, asked: int, surplus: float, variance: float) -> None:
        """Take a block of one request."""
        self._surplus = TUNED.block_keep * self._surplus + surplus**2 - variance
        self._weight = TUNED.block_keep * self._weight + variance * (asked - 1)

    @property
    def alike(self) -> float:
        """Tokens accepted and refused that no difference counts for."""
        correlation = min(
            max(self._surplus / max(self._weight, 1e-9), TUNED.least_correlation),
            TUNED.most_correlation,
        )
        return (1 / correlation - 1) / 2


_NOTHING: Mapping[tuple[str, ...], _Own] = {}
_ALL: Mapping[str, int] = {}


class RequestAcceptance:
    """Expected tokens by plan and request, learned from steps.

    Args:
        ends: of drafters that end trees, which knows of a step before it is observed here; None:
            no drafter does.
    """

    def __init__(
        self, plans: Iterable[SpecPlan], prior: PlanPrior, ends: DrafterEnds | None = None
    ) -> None:
        plans = list(plans)
        self._prior, self._ends = prior, ends or DrafterEnds([])
        self._drafters: dict[str, Drafter] = {}
        deepest: dict[str, int] = {}
        for plan in plans:
            # what a tree's prior asks of its drafts' chains
            for drafter in plan.drafters:
                self._drafters[drafter.name] = drafter
                deepest[drafter.name] = max(deepest.get(drafter.name, 0), plan.max_depth)
        self._chains = {draft: DepthAcceptance(depth) for draft, depth in deepest.items()}
        self._trees = {
            plan.name: DepthAcceptance(plan.max_depth) for plan in plans if not is_chain(plan)
        }
        # request → drafts → what it showed
        self._own: dict[str, dict[tuple[str, ...], _Own]] = {}
        self._spread = _Spread()
        self._rates: dict[str, list[float]] = {}
        self._tokens: dict[tuple[str, int], list[float]] = {}

    def observe(
        self, plan: SpecPlan, outcomes: Mapping[str, int], depths: Mapping[str, int] = _ALL
    ) -> None:
        """Take what requests accepted in one step.

        Args:
            outcomes: request → accepted draft tokens, 0 … depth of the plan.
            depths: request → levels of its tree that the target verified; of those that are not
                named, all.
        """
        # whether drafters go on counts for tokens, too
        self._tokens.clear()
        lengths = {request: depths.get(request, plan.max_depth) for request in outcomes}
        # where no draft token was verified, nothing is seen
        outcomes = {request: outcomes[request] for request in outcomes if lengths[request]}
        if not outcomes or not plan.speculates:
            return
        rates = self.rates(plan)
        shared = self._shared(plan)
        news = DepthAcceptance(shared.max_depth)
        for request, accepted in outcomes.items():
            own = self._own.setdefault(request, {}).setdefault(plan.drafts, _Own())
            own.add(accepted, lengths[request], rates, self._spread)
            news.add(lengths[request], [accepted + 1])
        shared.merge(news, max(0.5, 1 - len(outcomes) / TUNED.rates_memory))
        self._rates.clear()

    def rates(self, plan: SpecPlan) -> list[float]:
        """What all requests show: probability of depth 1, 2, … where the one before is accepted.

        Of depths that were verified: those at which drafters have ended trees show nothing.
        """
        found = self._rates.get(plan.name)
        if found is None:
            if is_chain(plan):
                found = self._chain_rates(plan.drafts[0], plan.max_depth)
            else:
                chains = {draft: self._chain_rates(draft, plan.max_depth) for draft in plan.drafts}
                shared = self._trees[plan.name]
                found = [
                    shared.rate_toward(depth, rate, TUNED.rates_prior)
                    for depth, rate in enumerate(self._prior.rates(plan, chains), start=1)
                ]
            self._rates[plan.name] = found
        return found

    def tokens(self, plan: SpecPlan, request: str, most: int) -> float:
        """Expected tokens of a step, bonus token included.

        Args:
            plan: of the step; off gives 1.
            request: which may be unknown.
            most: tokens that the request can still take; 1 or more.
        """
        if not plan.speculates:
            return 1.0
        sums = self._sums(plan, request)
        return sums[min(most, len(sums)) - 1]

    def tokens_by_depth(self, plan: SpecPlan, request: str, most: int) -> list[float]:
        """Expected tokens of a step of which the target verifies the levels to depth 0, 1, ….

        Args:
            request: which may be unknown.
            most: tokens that the request can still take; 1 or more.
        """
        sums = self._sums(plan, request)
        return [sums[min(most, count) - 1] for count in range(1, len(sums) + 1)]

    def _sums(self, plan: SpecPlan, request: str) -> list[float]:
        """[D + 1] expected tokens with 0, 1, … levels of a plan, where its drafter may end it."""
        own = self._own.get(request, _NOTHING).get(plan.drafts)
        notch = round(own.factor(self._spread.alike) / TUNED.odds_step) if own else 0
        sums = self._tokens.get((plan.name, notch))
        if sums is None:
            shifted = [shift(rate, notch * TUNED.odds_step) for rate in self.rates(plan)]
            both = map(_times, shifted, self._ends.going_on(plan))
            sums = list(itertools.accumulate(itertools.accumulate([1.0, *both], _times)))
            self._tokens[plan.name, notch] = sums
        return sums

    def num_observed(self, request: str, plan: SpecPlan) -> float:
        """Tokens of a request that were accepted or refused of this plan's drafts, fading."""
        own = self._own.get(request, _NOTHING).get(plan.drafts)
        return own.accepted + own.refused if own else 0.0

    def forget(self, requests: Iterable[str]) -> None:
        """These have ended."""
        for request in requests:
            self._own.pop(request, None)

    def keep(self, requests: Iterable[str]) -> None:
        """All others have ended, or were aborted."""
        kept = set(requests)
        self._own = {request: own for request, own in self._own.items() if request in kept}

    def __len__(self) -> int:
        """Requests that are known."""
        return len(self._own)

    def _shared(self, plan: SpecPlan) -> DepthAcceptance:
        return self._chains[plan.drafts[0]] if is_chain(plan) else self._trees[plan.name]

    def _chain_rates(self, draft: str, depth: int) -> list[float]:
        """Depths that nobody asked for are like the one before, as far as the prior knows."""
        shared, rates = self._chains[draft], []
        shift_by = 0.0
        for level in range(1, depth + 1):
            prior = self._prior.chain(self._drafters[draft], level)
            rate = shared.rate_toward(level, shift(prior, shift_by), TUNED.rates_prior)
            shift_by = _logit(rate) - _logit(prior)
            rates.append(rate)
        return rates


def shift(rate: float, by: float) -> float:
    """A probability whose odds are multiplied by e^by."""
    if not 0 < rate < 1:
        return rate
    return 1 / (1 + (1 - rate) / rate * math.exp(-by))


def _logit(rate: float) -> float:
    rate = min(max(rate, 1e-6), 1 - 1e-6)
    return math.log(rate / (1 - rate))


def _times(a: float, b: float) -> float:
    return a * b
