"""Trying plans that are not in use, for a bounded share of the time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from specc.runtime.policies.goodput.allocation import Allocation, Cost, GroupLoad, PlanOption
from specc.runtime.policies.goodput.constants import TUNED
from specc.runtime.policies.goodput.plan_options import lag
from specc.runtime.policies.goodput.plan_prior import is_chain
from specc.runtime.policies.goodput.predicted_seconds import PredictedSeconds
from specc.runtime.policies.goodput.request_acceptance import RequestAcceptance
from specc.speculation.plans import SpecPlan

if TYPE_CHECKING:
    from specc.runtime.scheduling.batch import Batch, RunResult
    from specc.runtime.scheduling.request import Request


class Probe(NamedTuple):
    """Iterations in which some requests run another plan: one, or more where that gains.

    Args:
        plans: request → index of the plan that it tries.
        tokens: expected of the iteration.
        seconds: predicted.
        charged: of them, paid in advance.
        tried: of the tokens, those of the requests that try a plan.
        rate: tokens a second of what is in use.
        gained_s: by the iterations before.
    """

    plans: Mapping[str, int]
    tokens: float
    seconds: float
    charged: float = 0.0
    tried: float = 0.0
    rate: float = math.inf
    gained_s: float = 0.0

    def tokens_in(self, batch: Batch, result: RunResult) -> int:
        """What its requests got in an iteration."""
        return sum(
            accepted + 1
            for group, step in zip(batch.groups, result.steps, strict=True)
            for request, accepted in zip(group.requests, step.num_accepted, strict=True)
            if request.request_id in self.plans
        )


class Probes:
    """Decides what to try, and when there is time for it.

    A plan is worth a trial if it would beat what is in use with a draft that is right nine times
    in ten; at high load none is. Of chains, which teach about each other, the shortest one that
    is longer than those in use is tried; of all, the one that was tried longest ago.

    Args:
        plans: off first.
    """

    def __init__(
        self,
        plans: Sequence[SpecPlan],
        seconds: PredictedSeconds,
        acceptance: RequestAcceptance,
    ) -> None:
        self._plans = plans
        self._seconds = seconds
        self._acceptance = acceptance
        self._saved_s = self._most_s = 0.0
        self._number = self._num_earned = 0
        self._last: dict[str, int] = {}

    def earn(self, seconds: float) -> None:
        """An iteration took so long: a share of that, and more of the first ones."""
        self._num_earned += 1
        share = TUNED.probe_share + TUNED.probe_first / self._num_earned
        self._most_s = TUNED.probe_share * TUNED.probe_saved * seconds
        self._saved_s = min(self._saved_s + share * seconds, self._most_s)

    @property
    def is_full(self) -> bool:
        """No more is saved up for trials."""
        return self._saved_s >= self._most_s > 0

    def took(self, probe: Probe, seconds: float, tokens: float) -> float:
        """An iteration of a trial took so long, and its requests got so many tokens.

        What was not predicted is paid for, too, what was not used is kept, and tokens that are more
        than expected pay for what comes next: a plan that gains is not given up for want of time.

        The programs of a plan that was not in use come from memory, and what they drive out of the
        caches has to come back: on a CPU that is up to half of a small model's step. A trial that
        a pause fell into counts for no more than others can save up. Where seconds are not known,
        as of steps that are queued ahead, the prediction stands.

        Returns:
            seconds that it has lost beside what is in use, below 0 where it has gained.
        """
        most = TUNED.probe_share * TUNED.probe_saved * probe.seconds
        more_s = max(-probe.charged, min(seconds - probe.seconds, most))
        more_s -= (tokens - probe.tried) / probe.rate
        lost_s = probe.seconds - probe.tokens / probe.rate + more_s
        # what goes on was not paid in advance
        self._saved_s -= more_s if probe.charged or not probe.gained_s else lost_s
        return lost_s

    def choose(
        self,
        requests: Sequence[Request],
        options: Sequence[Sequence[PlanOption | None]],
        best: Allocation,
        cost: Cost,
        serves: Callable[[int, float], bool] = lambda index, tokens: True,
        hopes: bool = False,
    ) -> Probe | None:
        """What the next iteration tries instead of the best division, if anything.

        Args:
            options: as of `allocate`.
            cost: as of `allocate`.
            serves: whether a plan would stay in use if it gave so many tokens a step.
            hopes: acceptance is likely to be better than it was.
        """
        for index in self._candidates(best, options, cost, serves):
            probe = self._probe(index, requests, options, best, cost)
            # seconds in which the best division would have yielded as much
            lost_s = probe.seconds - probe.tokens / best.goodput
            # dear ones are tried in the end, and paid off later
            if hopes or lost_s <= self._saved_s * (TUNED.probe_debt if self.is_full else 1.0):
                probe = probe._replace(charged=max(0.0, lost_s))
                self._saved_s -= probe.charged
                self._number += 1
                self._last[_family(self._plans[index])] = self._number
                return probe
        return None

    def _candidates(
        self,
        best: Allocation,
        options: Sequence[Sequence[PlanOption | None]],
        cost: Cost,
        serves: Callable[[int, float], bool],
    ) -> list[int]:
        used = set(best.plans)
        deepest: dict[str, int] = {}
        for index in used:
            plan = self._plans[index]
            if plan.speculates:
                family = _family(plan)
                deepest[family] = max(deepest.get(family, 0), plan.max_depth)
        found: dict[str, int] = {}
        if self._saved_s <= 0:
            return []
        for index, plan in enumerate(self._plans):
            family = _family(plan)
            is_new = plan.speculates and index not in used and family not in found
            if is_new and plan.max_depth > deepest.get(family, 0):
                hoped = sum(TUNED.probe_hope**d for d in range(plan.max_depth + 1))
                if self._could_pay(index, hoped, best, options, cost) and serves(index, hoped):
                    found[family] = index
        return sorted(found.values(), key=lambda p: self._last.get(_family(self._plans[p]), 0))

    def _could_pay(
        self,
        index: int,
        hoped: float,
        best: Allocation,
        options: Sequence[Sequence[PlanOption | None]],
        cost: Cost,
    ) -> bool:
        loads = [GroupLoad()] * len(self._plans)
        for own in options:
            option, off = own[index], own[0]
            assert off is not None
            where = 0 if option is None else index
            loads[where] = loads[where].plus(option or off)
        num_able, num_off = loads[index].size, loads[0].size
        tokens = num_able * hoped + num_off
        return num_able > 0 and tokens > best.goodput * cost(loads)

    def _probe(
        self,
        index: int,
        requests: Sequence[Request],
        options: Sequence[Sequence[PlanOption | None]],
        best: Allocation,
        cost: Cost,
    ) -> Probe:
        plan = self._plans[index]
        able = [i for i, own in enumerate(options) if own[index] is not None]
        # whose draft has least to catch up
        lags = {i: lag(requests[i], plan) for i in able}
        if self._seconds.shares_pass:
            able = sorted(able, key=lambda i: sum(lags[i].values()))[: TUNED.probe_rows]
        missed: Counter[int] = Counter()
        for i in able:
            missed.update(lags[i])
        tokens = best.tokens
        context = sum(requests[i].cache_len for i in able) / len(able)
        seconds = best.seconds + self._seconds.catch_up_at_once(plan, missed, context)
        loads = [GroupLoad()] * len(self._plans)
        for own, now in zip(options, best.plans, strict=True):
            option = own[now]
            assert option is not None
            loads[now] = loads[now].plus(option)
        seconds -= cost(loads)
        for i in able:
            now = best.plans[i]
            old, new = options[i][now], options[i][index]
            assert old is not None
            assert new is not None
            loads[now], loads[index] = loads[now].plus(old, -1), loads[index].plus(new)
            tokens += new.tokens - old.tokens
            seconds -= old.seconds
        seconds += cost(loads)
        tried = sum(option.tokens for i in able if (option := options[i][index]) is not None)
        plans = {requests[i].request_id: index for i in able}
        return Probe(plans, tokens, seconds, tried=tried, rate=best.goodput)


def _family(plan: SpecPlan) -> str:
    """Plans whose steps teach about each other."""
    return f"chain {plan.drafts[0]}" if is_chain(plan) else plan.name
