"""Seconds of a step by what the requests that run each plan bring to it, and of parts of trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from specc.cost.latency_table import PassPart, StepShape
from specc.runtime.policies.goodput.allocation import GroupLoad
from specc.runtime.policies.goodput.host_seconds import Kind
from specc.runtime.policies.goodput.predicted_seconds import PredictedSeconds
from specc.speculation.live_nodes import can_cut, expected_rows
from specc.speculation.plans import SpecPlan


class CutPass(NamedTuple):
    """The pass of the target in which trees can be cut, and all that a step has besides.

    Args:
        plan: index of the plan whose sequences it takes; None: it takes all of them.
        besides: seconds of the rest.
        pass_s: seconds of the pass, by its tokens, the seconds of committed rows, and those of the
            rest.
    """

    plan: int | None
    besides: float
    pass_s: Callable[[float, float, float], float]


class StepCost:
    """Seconds of a step.

    Args:
        seconds: of iterations, as they are known at one decision.
        drafting_s: (plan, requests) → seconds that the table gives their drafts, which stay.
    """

    def __init__(
        self,
        seconds: PredictedSeconds,
        plans: Sequence[SpecPlan],
        drafting_s: dict[tuple[int, int], float],
    ) -> None:
        self._seconds = seconds
        self._drafting_s = drafting_s
        self._plans = plans
        self._shares = seconds.shares_pass
        self._host_s = {kind: seconds.host_s(kind) for kind in Kind}
        # [plans] whether drafters end trees; seconds of each row of a sequence in the target's pass
        self._ends = [seconds.is_cut(plan) for plan in plans]
        nodes = [seconds.nodes_of(plan) for plan in plans]
        self._row_s = [seconds.table.target.row_s(count) for count in nodes]
        self._is_whole = [seconds.is_whole(plan) for plan in plans]
        # the same, and how many times as long they take as that
        self._drafting: dict[tuple[int, int], tuple[float, float]] = {}
        # nodes of a sequence → seconds of each of its rows
        self._rows: dict[float, float] = {}

    def __call__(self, loads: Sequence[GroupLoad]) -> float:
        total = 0.0
        tokens, rows_s, num_parts, is_cut, drafts = 0.0, 0.0, 0, False, False
        known = self._drafting
        for index, load in enumerate(loads):
            if not load[0]:
                continue
            drafts |= self._plans[index].speculates
            if self._is_whole[index]:
                total += self._whole_s(index, load)
                continue
            count, context, drafts_s = load
            drafting_s, ratio = known.get((index, count)) or self._drafting_of(index, count)
            total += (drafting_s + drafts_s) * ratio
            nodes = self._seconds.pass_tokens(self._plans[index], count)
            read_s = context * self._row_s[index]
            if self._shares:
                tokens, rows_s = tokens + nodes, rows_s + read_s
                num_parts += 1
                is_cut |= self._ends[index]
            else:
                total += self._seconds.pass_s(nodes, read_s)
        total += self._host_s[Kind.of(drafts, is_cut or num_parts > 1)]
        if not tokens:
            return total
        return total + self._seconds.pass_s(tokens, rows_s, total, is_cut=is_cut)

    def cut_pass(self, loads: Sequence[GroupLoad]) -> CutPass | None:
        """The pass that groups share; where each has its own, that of the one that speculates.

        None where that is another number of groups, or their trees are verified whole.
        """
        if not self._shares:
            return self._own_cut_pass(loads)
        total = self._host_s[Kind.TOGETHER]
        for index, (count, _, drafts_s) in enumerate(loads):
            if count:
                drafting_s, ratio = self._drafting_of(index, count)
                total += (drafting_s + drafts_s) * ratio
        return CutPass(None, total, self._shared_s)

    def _own_cut_pass(self, loads: Sequence[GroupLoad]) -> CutPass | None:
        drafting = [i for i, load in enumerate(loads) if load.size and self._plans[i].speculates]
        if len(drafting) != 1 or not can_cut(self._plans[drafting[0]]):
            return None
        (own,) = drafting
        others = [GroupLoad() if i == own else load for i, load in enumerate(loads)]
        plan, (count, _, drafts_s) = self._plans[own], loads[own]
        drafting_s, ratio = self._drafting_of(own, count)
        whole = self._seconds.ratio_of_whole(plan, is_cut=True)
        whole_ratio = 1.0 if whole is None else whole(count)
        size = int(self._seconds.graph_size(count))
        besides = self(others) + (drafting_s + drafts_s) * (ratio if whole is None else whole_ratio)

        def pass_s(tokens: float, rows_s: float, besides: float) -> float:
            rows = expected_rows(plan.num_nodes, size, tokens)
            return self._seconds.pass_s(rows, rows_s, is_cut=True) * whole_ratio

        return CutPass(own, besides, pass_s)

    def row_s(self, nodes: float) -> float:
        """Seconds of each committed row of a sequence with so many nodes in the target's pass."""
        found = self._rows.get(nodes)
        if found is None:
            found = self._rows[nodes] = self._seconds.table.target.row_s(nodes)
        return found

    def _shared_s(self, tokens: float, rows_s: float, besides: float) -> float:
        """Of the target's pass without dead nodes; see `PredictedSeconds.pass_s`."""
        return self._seconds.pass_s(tokens, rows_s, besides, is_cut=True)

    def _drafting_of(self, index: int, count: int) -> tuple[float, float]:
        plan, seconds = self._plans[index], self._drafting_s.get((index, count))
        if seconds is None:
            # a captured batch drafts in the graph that holds it
            size = None if self._shares else self._seconds.graph_size(count)
            seconds = self._seconds.table.draft_s(StepShape(plan, count, 0.0, size=size))
            self._drafting_s[index, count] = seconds
        ratio = self._seconds.drafting(plan, count) if plan.speculates else 1.0
        self._drafting[index, count] = seconds, ratio
        return seconds, ratio

    def _whole_s(self, index: int, load: GroupLoad) -> float:
        """Of a group whose steps are timed as a whole."""
        plan, count = self._plans[index], load.size
        part = PassPart(count, self._seconds.nodes_of(plan) * count, load.context)
        unused = self._seconds.pass_tokens(plan, count) - part.tokens
        drafting_s, _ = self._drafting_of(index, count)
        return self._seconds.group(plan, drafting_s + load.drafting_s, part, unused)
