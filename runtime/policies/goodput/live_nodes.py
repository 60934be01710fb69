"""How many nodes of each request the target verifies: the likeliest ones, while they pay.

A plan's drafts cost the same whatever the target verifies of them; its pass costs by its nodes. So
levels compete across requests: those that are expected to yield most tokens a node come first, and
as many of them are verified as make the goodput of the step largest. A level survives as often as
its request accepts everything down to it, which only earlier steps have shown; nothing that this
step draws is looked at. Source: what vLLM calls adaptive verification; the estimates are specc's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specc.runtime.policies.goodput.allocation import Allocation, GroupLoad, PlanOption
from specc.runtime.policies.goodput.constants import TUNED
from specc.runtime.policies.goodput.drafter_ends import DrafterEnds
from specc.runtime.policies.goodput.request_acceptance import RequestAcceptance
from specc.runtime.policies.goodput.step_cost import StepCost
from specc.runtime.scheduling.request import Request
from specc.speculation.live_nodes import can_cut, nodes_by_depth
from specc.speculation.plans import SpecPlan

# [sequences][plans], see `allocate`
Options = Sequence[Sequence[PlanOption | None]]


class Levels(NamedTuple):
    """What a sequence yields by how much of its tree is verified.

    Args:
        tokens: [D + 1] expected of its step, with the levels up to depth 0, 1, … D.
        live: [D + 1] nodes that the target may then verify, rising.
        nodes: [D + 1] that it is expected to: fewer where drafters end trees.
        context: committed rows.
    """

    tokens: Sequence[float]
    live: Sequence[int]
    nodes: Sequence[float]
    context: float


class Cut(NamedTuple):
    """Levels of a batch that are verified.

    Args:
        depths: [sequences] levels of each; 0 is its root alone.
        tokens: expected of the step.
        seconds: of the step.
    """

    depths: list[int]
    tokens: float
    seconds: float


def cut_levels(
    sequences: Sequence[Levels],
    besides: float,
    row_s: Callable[[float], float],
    pass_s: Callable[[float, float, float], float],
    budget: int | None = None,
    others: float = 0.0,
) -> Cut:
    """Verify the levels that make the goodput largest.

    Those that yield most a node come first, each after the one before it of its sequence. Of
    chains without a drafter's threshold a level yields less than the one before it. Beside a
    threshold, and where it has more nodes than the next, it may yield less than the next one, and
    hide that: the order is greedy, and may miss a better deeper level.

    Args:
        besides: seconds of the step besides the target's pass.
        row_s: nodes → seconds of each committed row of a sequence with so many in the pass.
        pass_s: see `CutPass`.
        budget: nodes of all sequences together at most; roots are always verified.
        others: tokens that are expected of sequences in other passes.
    """
    depths = [0] * len(sequences)
    tokens = others + sum(own.tokens[0] for own in sequences)
    nodes = sum(own.nodes[0] for own in sequences)
    live = sum(own.live[0] for own in sequences)
    rows_s = sum(own.context * row_s(own.nodes[0]) for own in sequences)
    heap: list[tuple[float, int]] = []

    def wait(i: int) -> None:
        """Let the next level of a sequence compete."""
        own, depth = sequences[i], depths[i]
        if depth + 1 < len(own.nodes):
            gain = own.tokens[depth + 1] - own.tokens[depth]
            more = own.nodes[depth + 1] - own.nodes[depth]
            # where the request ends, further tokens are none; where its drafter does, nodes
            if gain > 0 and more > 0:
                heapq.heappush(heap, (-gain / more, i))

    for i in range(len(sequences)):
        wait(i)
    seconds = besides + pass_s(nodes, rows_s, besides)
    best, best_count = Cut([], tokens, seconds), 0
    taken: list[int] = []
    while heap:
        _, i = heapq.heappop(heap)
        own, depth = sequences[i], depths[i]
        more_live = own.live[depth + 1] - own.live[depth]
        if budget is not None and live + more_live > budget:
            continue
        live += more_live
        nodes += own.nodes[depth + 1] - own.nodes[depth]
        rows_s += own.context * (row_s(own.nodes[depth + 1]) - row_s(own.nodes[depth]))
        tokens += own.tokens[depth + 1] - own.tokens[depth]
        depths[i] += 1
        taken.append(i)
        seconds = besides + pass_s(nodes, rows_s, besides)
        if tokens / seconds > best.tokens / best.seconds:
            best, best_count = Cut([], tokens, seconds), len(taken)
        wait(i)
    depths = [0] * len(sequences)
    for i in taken[:best_count]:
        depths[i] += 1
    return best._replace(depths=depths)


class LiveNodes:
    """Cuts divisions of a batch, and finds the one that yields most once it is cut.

    Args:
        plans: off first.
        budget: nodes of a step at most, except where all are off.
    """

    def __init__(
        self,
        plans: Sequence[SpecPlan],
        acceptance: RequestAcceptance,
        ends: DrafterEnds,
        budget: int | None = None,
    ) -> None:
        self._plans = plans
        self._acceptance, self._ends = acceptance, ends
        self._budget = budget
        self._cuttable = [index for index, plan in enumerate(plans) if can_cut(plan)]

    def cut(
        self,
        requests: Sequence[Request],
        options: Options,
        plans: Sequence[int],
        cost: StepCost,
    ) -> Allocation:
        """The same division with the nodes that pay; all nodes, unless a cut is worth it.

        A pass without dead nodes is put together by the host (`HostSeconds`), or has launches more,
        whose seconds are learned with it.

        Args:
            options: as of `allocate`.
            plans: [sequences] index of each one's plan, which it can run.
        """
        loads = [GroupLoad()] * len(self._plans)
        tokens = lags_s = 0.0
        levels = []
        for request, own, index in zip(requests, options, plans, strict=True):
            option = own[index]
            assert option is not None, "a plan that the sequence can run"
            loads[index] = loads[index].plus(option)
            lags_s += option.seconds
            tokens += option.tokens
            levels.append(self._levels_of(request, index, option))
        whole = Allocation(tuple(plans), tokens, cost(loads) + lags_s)
        cut_pass = cost.cut_pass(loads)
        if cut_pass is None:
            return whole
        own_plan, besides, pass_s = cut_pass
        is_in = [own_plan is None or index == own_plan for index in plans]
        inside = [own for own, inner in zip(levels, is_in, strict=True) if inner]
        outside = [own for own, inner in zip(levels, is_in, strict=True) if not inner]
        left = None if self._budget is None else self._budget - sum(x.live[-1] for x in outside)
        others = sum(own.tokens[-1] for own in outside)
        found = cut_levels(inside, besides + lags_s, cost.row_s, pass_s, left, others)
        depths = iter(found.depths)
        live = tuple(
            own.live[next(depths)] if inner else own.live[-1]
            for own, inner in zip(levels, is_in, strict=True)
        )
        cut = Allocation(tuple(plans), found.tokens, found.seconds, live)
        nodes = sum(self._plans[index].num_nodes for index in plans)
        is_over = self._budget is not None and nodes > self._budget
        return cut if is_over or cut.goodput > whole.goodput * TUNED.margin else whole

    def best(
        self, requests: Sequence[Request], options: Options, start: Allocation, cost: StepCost
    ) -> Allocation:
        """The division of most goodput once it is cut: that one, or one plan for all.

        Where all draft together, the levels of their drafts are read once; what differs is how much
        of them the target verifies. Requests of which it verifies none do not draft.

        Args:
            requests: see `cut`.
            options: likewise.
            start: the best division without cuts.
            cost: see `cut`.
        """
        best = self._without_idle(requests, options, start.plans, cost)
        for index in self._cuttable:
            plans = tuple(index if own[index] is not None else 0 for own in options)
            if plans == start.plans or not any(plans):
                continue
            found = self._without_idle(requests, options, plans, cost)
            if found.goodput > best.goodput * TUNED.further_plan:
                best = found
        return best

    def _without_idle(
        self, requests: Sequence[Request], options: Options, plans: Sequence[int], cost: StepCost
    ) -> Allocation:
        found = self.cut(requests, options, plans, cost)
        if not found.live:
            return found
        left = tuple(
            0 if live == 1 else index for index, live in zip(plans, found.live, strict=True)
        )
        if left == tuple(plans):
            return found
        other = self.cut(requests, options, left, cost)
        return other if other.goodput > found.goodput else found

    def _levels_of(self, request: Request, index: int, option: PlanOption) -> Levels:
        plan = self._plans[index]
        if index not in self._cuttable:
            return Levels([option.tokens], [plan.num_nodes], [plan.num_nodes], option.context)
        most = max(1, request.num_tokens_left)
        tokens = self._acceptance.tokens_by_depth(plan, request.request_id, most)
        return Levels(tokens, nodes_by_depth(plan), self._ends.nodes(plan), option.context)
