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
        seconds: that it adds to the step besides those of the group, such as catching up.
        context: committed rows, all of which the target's pass reads.
        drafting_s: seconds that the rows that drafts read of it add to theirs.
    """

    tokens: float
    seconds: float = 0.0
    context: float = 0.0
    drafting_s: float = 0.0


class GroupLoad(NamedTuple):
    """So many sequences that run one plan, and what they add up to; see `PlanOption`."""

    size: int = 0
    context: float = 0.0
    drafting_s: float = 0.0

    def plus(self, option: PlanOption, count: int = 1) -> GroupLoad:
        """With a further sequence; without one of them where the count is -1."""
        size, context, drafting_s = self
        if size + count == 0:
            # what is left is rounding
            return _EMPTY
        _, _, more, more_s = option
        return GroupLoad(size + count, context + count * more, drafting_s + count * more_s)


_EMPTY = GroupLoad()


class Allocation(NamedTuple):
    """Plans of a batch.

    Args:
        plans: [sequences] index of each one's plan.
        tokens: expected of the step.
        seconds: of the step.
        live: [sequences] nodes of each one that the target verifies; () is all of its plan's.
    """

    plans: tuple[int, ...]
    tokens: float
    seconds: float
    live: tuple[int, ...] = ()

    @property
    def goodput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


# seconds of a step, by what the sequences that run each plan bring to it
Cost = Callable[[Sequence[GroupLoad]], float]


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
        # of single sequences that a batch is compared with: middling ones
        own = [each[0] for each in options if each[0] is not None]
        self._context = max(1.0, sum(option.context for option in own) / max(1, len(own)))
        # plans whose drafts read rows: of others it does not matter how long that takes
        self._drafting = {
            plan for own in options for plan, one in enumerate(own) if one and one.drafting_s
        }
        # plans of a division → what its groups add up to, and their seconds
        self._starts: dict[tuple[int, ...], tuple[list[GroupLoad], float]] = {}
        self._marginals: dict[Sequence[GroupLoad], list[_Marginal]] = {}

    def value(self, plans: Sequence[int]) -> Allocation:
        tokens = seconds = 0.0
        for own, plan in zip(self._options, plans, strict=True):
            option = own[plan]
            assert option is not None, "a plan that the sequence can run"
            tokens += option.tokens
            seconds += option.seconds
        chosen = tuple(plans)
        return Allocation(chosen, tokens, seconds + self._start(chosen)[1])

    def moved(self, start: Allocation, plan: int, whole: bool = False) -> Allocation:
        """The best of moving the first 0, 1, 2, … sequences to a plan, by falling worth.

        Args:
            start: plans before.
            plan: where they move.
            whole: all of them, or none.
        """
        begin, begin_s = self._start(start.plans)
        loads = list(begin)
        # seconds of one more sequence that runs a plan, which its tokens have to be worth
        marginals = self._marginal_s(tuple(loads))
        moves = []
        for i, (own, now) in enumerate(zip(self._options, start.plans, strict=True)):
            there, here = own[plan], own[now]
            if there is None or now == plan:
                continue
            assert here is not None
            tokens, seconds = there.tokens - here.tokens, there.seconds - here.seconds
            more_s = marginals[plan].of(there) - marginals[now].of(here)
            moves.append((-(tokens - (seconds + more_s) * start.goodput), i, tokens, seconds))
        moves.sort()
        used = sum(load.size * nodes for load, nodes in zip(loads, self._nodes, strict=True))
        best_count, best_goodput = 0, start.goodput
        tokens, seconds = start.tokens, start.seconds - begin_s
        for count, (_, i, more_tokens, more_s) in enumerate(moves, start=1):
            now = start.plans[i]
            there, here = self._options[i][plan], self._options[i][now]
            assert there is not None
            assert here is not None
            loads[now], loads[plan] = loads[now].plus(here, -1), loads[plan].plus(there)
            used += self._nodes[plan] - self._nodes[now]
            tokens += more_tokens
            seconds += more_s
            if plan and self._budget is not None and used > self._budget:
                break
            # where there are many, not every prefix is tried
            is_tried = count == len(moves) if whole else _is_tried(count, len(moves))
            if is_tried and (found := tokens / (seconds + self._cost(loads))) > best_goodput:
                best_count, best_goodput = count, found
        plans = list(start.plans)
        for _, i, _, _ in moves[:best_count]:
            plans[i] = plan
        return self.value(plans) if best_count else start

    def _start(self, plans: tuple[int, ...]) -> tuple[list[GroupLoad], float]:
        """What groups add up to before sequences move, and their seconds."""
        found = self._starts.get(plans)
        if found is None:
            loads = [GroupLoad()] * len(self._nodes)
            for own, now in zip(self._options, plans, strict=True):
                here = own[now]
                assert here is not None
                loads[now] = loads[now].plus(here)
            found = self._starts[plans] = loads, self._cost(loads)
        return found

    def _marginal_s(self, loads: tuple[GroupLoad, ...]) -> list[_Marginal]:
        """[plans] seconds of one more sequence among those that run one, levels not counted."""
        found = self._marginals.get(loads)
        if found is None:
            found = []
            for plan, load in enumerate(loads):
                # levels are there from the first sequence on: what is asked is a second one
                once = load.plus(_NOTHING)
                around = loads[:plan], loads[plan + 1 :]
                before_s, after_s, read_s = (
                    self._cost([*around[0], more, *around[1]])
                    for more in (
                        once,
                        once.plus(_NOTHING),
                        once.plus(PlanOption(0.0, context=self._context)),
                    )
                )
                drafted_s = 0.0
                if plan in self._drafting:
                    drafts = once.plus(PlanOption(0.0, drafting_s=before_s))
                    drafted_s = self._cost([*around[0], drafts, *around[1]]) - after_s
                found.append(
                    _Marginal(
                        after_s - before_s,
                        (read_s - after_s) / self._context,
                        drafted_s / before_s if before_s else 0.0,
                    )
                )
            self._marginals[loads] = found
        return found


_NOTHING = PlanOption(0.0)


class _Marginal(NamedTuple):
    """Seconds of a further sequence: its tokens, each of its rows, and those of its drafts.

    Args:
        alone_s: without committed rows.
        row_s: of each committed row, in the target's pass.
        drafting: how many times as long drafting takes as the table says.
    """

    alone_s: float
    row_s: float
    drafting: float

    def of(self, option: PlanOption) -> float:
        return self.alone_s + option.context * self.row_s + option.drafting_s * self.drafting


def _is_tried(count: int, most: int) -> bool:
    """All counts up to 8, then those that lie an eighth apart, and all there are."""
    return count <= 8 or count == most or count % max(1, most // 8) == 0
