"""Which sequence runs which plan, so that the batch is expected to yield most tokens a second.

A ratio of sums is largest where no change has a gain in tokens above its seconds times the ratio
itself (Dinkelbach, Management Science 13, 1967). So sequences are moved to a plan in the order of
what they gain beyond what they cost at the current goodput, and the best prefix of that order
counts: a plan's levels cost nearly the same for one sequence as for many, so the first ones alone
may not pay where all together do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from specc.runtime.policies.goodput.constants import TUNED


class PlanOption(NamedTuple):
    """One plan that a sequence could run.

    Args:
        tokens: expected of its step.
        seconds: that it adds to the step besides those of the counts, such as catching up.
    """

    tokens: float
    seconds: float = 0.0


class Allocation(NamedTuple):
    """Plans of a batch.

    Args:
        plans: [sequences] index of each one's plan.
        tokens: expected of the step.
        seconds: of the step.
    """

    plans: tuple[int, ...]
    tokens: float
    seconds: float

    @property
    def goodput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


# seconds of a step, by the number of sequences that run each plan
Cost = Callable[[tuple[int, ...]], float]


def allocate(
    options: Sequence[Sequence[PlanOption | None]],
    cost: Cost,
    nodes: Sequence[int],
    budget: int | None = None,
    mixes: bool = True,
) -> Allocation:
    """Choose plans by marginal goodput.

    Args:
        options: [sequences][plans]; plan 0 is off, which everyone can run, None is a plan that a
            sequence cannot run.
        cost: of a step.
        nodes: of each plan, that count against the budget.
        budget: nodes of the whole step; off is always allowed.
        mixes: speculating sequences may run different plans; else all that can run one do.
    """
    search = _Search(options, cost, nodes, budget)
    off = search.value([0] * len(options))
    best = off
    for plan in range(1, len(nodes)):
        found = search.moved(off, plan, whole=not mixes)
        if found.goodput > best.goodput:
            best = found
    while mixes:
        start = best
        for plan in range(len(nodes)):
            found = search.moved(start, plan)
            if found.goodput > best.goodput * TUNED.further_plan:
                best = found
        if best is start:
            return best
    return best


class _Search:
    def __init__(
        self,
        options: Sequence[Sequence[PlanOption | None]],
        cost: Cost,
        nodes: Sequence[int],
        budget: int | None,
    ) -> None:
        self._options = options
        self._cost = cost
        self._nodes = nodes
        self._budget = budget
        self._seconds: dict[tuple[int, ...], float] = {}
        self._marginals: dict[tuple[int, ...], list[float]] = {}

    def value(self, plans: Sequence[int]) -> Allocation:
        counts = [0] * len(self._nodes)
        tokens = seconds = 0.0
        for own, plan in zip(self._options, plans, strict=True):
            option = own[plan]
            assert option is not None, "a plan that the sequence can run"
            counts[plan] += 1
            tokens += option.tokens
            seconds += option.seconds
        return Allocation(tuple(plans), tokens, seconds + self._step_s(counts))

    def moved(self, start: Allocation, plan: int, whole: bool = False) -> Allocation:
        """The best of moving the first 0, 1, 2, … sequences to a plan, by falling worth.

        Args:
            start: plans before.
            plan: where they move.
            whole: all of them, or none.
        """
        counts = [start.plans.count(p) for p in range(len(self._nodes))]
        # what a token is worth of each plan: seconds of one more sequence that runs it
        worth = [more_s * start.goodput for more_s in self._marginal_s(tuple(counts))]
        moves = []
        for i, (own, now) in enumerate(zip(self._options, start.plans, strict=True)):
            there, here = own[plan], own[now]
            if there is None or now == plan:
                continue
            assert here is not None
            tokens, seconds = there.tokens - here.tokens, there.seconds - here.seconds
            gain = tokens - seconds * start.goodput - (worth[plan] - worth[now])
            moves.append((-gain, i, tokens, seconds))
        moves.sort()
        used = sum(count * nodes for count, nodes in zip(counts, self._nodes, strict=True))
        best_count, best_goodput = 0, start.goodput
        tokens, seconds = start.tokens, start.seconds - self._step_s(counts)
        for count, (_, i, more_tokens, more_s) in enumerate(moves, start=1):
            counts[start.plans[i]] -= 1
            counts[plan] += 1
            used += self._nodes[plan] - self._nodes[start.plans[i]]
            tokens += more_tokens
            seconds += more_s
            if plan and self._budget is not None and used > self._budget:
                break
            # where there are many, not every prefix is tried
            is_tried = count == len(moves) if whole else _is_tried(count, len(moves))
            if is_tried and (found := tokens / (seconds + self._step_s(counts))) > best_goodput:
                best_count, best_goodput = count, found
        plans = list(start.plans)
        for _, i, _, _ in moves[:best_count]:
            plans[i] = plan
        return self.value(plans) if best_count else start

    def _marginal_s(self, counts: tuple[int, ...]) -> list[float]:
        """[plans] seconds of one more sequence among those that run one, levels not counted."""
        found = self._marginals.get(counts)
        if found is None:
            found = []
            for plan in range(len(counts)):
                once, more = list(counts), list(counts)
                once[plan] += 1
                more[plan] += 2
                found.append(self._step_s(more) - self._step_s(once))
            self._marginals[counts] = found
        return found

    def _step_s(self, counts: Sequence[int]) -> float:
        key = tuple(counts)
        if key not in self._seconds:
            self._seconds[key] = self._cost(key)
        return self._seconds[key]


def _is_tried(count: int, most: int) -> bool:
    """All counts up to 8, then those that lie an eighth apart, and all there are."""
    return count <= 8 or count == most or count % max(1, most // 8) == 0
