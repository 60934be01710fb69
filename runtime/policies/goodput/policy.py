"""How much to speculate, for every request, by expected tokens over predicted seconds (SmartSpec).

Every few steps the batch is divided anew among all plans of the engine, off included: tokens are
expected from what each request accepted, seconds from a latency table that is corrected while
steps run. So speculation follows the load: off where the target's pass has no room left, the
longest plan where it has. Source: arXiv:2406.14066.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specc.cost.contexts import Contexts
from specc.cost.latency_table import LatencyTable, StepShape
from specc.runtime.policies.base import Decision, Policy
from specc.runtime.policies.goodput.allocation import (
    Allocation,
    Cost,
    GroupLoad,
    PlanOption,
    allocate,
)
from specc.runtime.policies.goodput.constants import TUNED
from specc.runtime.policies.goodput.drafter_ends import DrafterEnds, ShownLevels
from specc.runtime.policies.goodput.live_nodes import LiveNodes
from specc.runtime.policies.goodput.plan_options import PlanOptions, lag
from specc.runtime.policies.goodput.plan_prior import PlanPrior
from specc.runtime.policies.goodput.predicted_seconds import PredictedSeconds
from specc.runtime.policies.goodput.probe import Probe, Probes
from specc.runtime.policies.goodput.queueing_model import QueueingModel
from specc.runtime.policies.goodput.request_acceptance import RequestAcceptance
from specc.runtime.policies.goodput.step_cost import StepCost
from specc.runtime.policies.goodput.trials import Trials
from specc.speculation.live_nodes import can_cut, live_levels, nodes_by_depth
from specc.speculation.plans import OFF, SpecPlan

if TYPE_CHECKING:
    from specc.runtime.backends.step_io import StepResult
    from specc.runtime.scheduling.batch import Batch, RunResult, StepGroup
    from specc.runtime.scheduling.request import Request
    from specc.speculation.metrics import SpecStats


class GoodputPolicy(Policy):
    """Divides every batch so that it yields most expected tokens a second.

    A decision holds for a few iterations, unless many of the decoding requests come or go: more
    than half, or, when iterations have paid for it, an eighth; prompts are not counted. Another
    division has to promise 1 % more. Plans that are not in use, and could pay if their drafts were
    right, are tried now and then, for at most 1 % of the time.

    Args:
        table: seconds of its passes; None starts from a neutral guess.
        acceptance: draft → table by depth and sibling rank, of a profile.
        shares_pass: requests of all plans are verified in one pass of the target. Else all that
            speculate run one plan.
        token_budget: nodes of a step at most, except where all are off.
        clock: seconds of the host; deciding is as rare as it is slow.
        adapts_verification: how much of its tree the target verifies is chosen for each request.
        graph_sizes: see `PredictedSeconds`.
    Raises:
        ConfigError: acceptance that is no table of probabilities.
    """

    # a decision holds for many iterations
    chooses_late = True

    def __init__(
        self,
        plans: Mapping[str, SpecPlan],
        table: LatencyTable | None = None,
        acceptance: Mapping[str, Sequence[Sequence[float]]] | None = None,
        *,
        shares_pass: bool = True,
        token_budget: int | None = None,
        max_num_seqs: int = 256,
        clock: Callable[[], float] = time.perf_counter,
        adapts_verification: bool = False,
        graph_sizes: Sequence[int] = (),
    ) -> None:
        speculative = [plan for plan in plans.values() if plan.speculates]
        speculative.sort(key=lambda plan: plan.num_nodes)
        self._plans = [OFF, *speculative]
        models = {model for plan in speculative for model in plan.model_names}
        if table is None or not models <= set(table.drafts):
            table = LatencyTable.neutral(sorted(models))
        self._shares_pass, self._graph_sizes = shares_pass, graph_sizes
        self._max_num_seqs = max_num_seqs
        self._ends = DrafterEnds(speculative)
        self._acceptance = RequestAcceptance(speculative, PlanPrior(acceptance or {}), self._ends)
        self.use_latency(table)
        self._live_nodes: LiveNodes | None = None
        if adapts_verification:
            self._live_nodes = LiveNodes(self._plans, self._acceptance, self._ends, token_budget)
        # request → nodes of its tree that are verified; empty where all are
        self._live: dict[str, int] = {}
        self._num_iterations = self._next_load = self._load_paid = self._next_look = 0
        self._budget, self._clock = token_budget, clock
        self._index_of = {plan.name: index for index, plan in enumerate(self._plans)}
        # request → index of its plan, since the last decision; what newer requests run, and what
        # drafts read prompts for
        self._chosen: dict[str, int] = {}
        self._main = self._prepared = 0
        self._num_decided = self._num_decisions = self._held = self._left = 0
        # iterations that pay for the last decision, and seconds that deciding took before the
        # iteration that was asked for last
        self._paid, self._decided_s = 0, 0.0
        self._last_requests: list[Request] = []
        self._last_names: list[str] = []
        # whether this decision times plain iterations, beside which drafts have to pay, and from
        # which iteration on that is due
        self._times_plain, self._next_plain = False, 1 + TUNED.hold
        self._trials = Trials()
        self._settled = self._decision = Decision({}, 0.0, 0.0, 0.0, self._first_rate())

    def use_latency(self, table: LatencyTable) -> None:
        """Predict seconds by this table from now on; what requests accept is known already."""
        self._seconds = PredictedSeconds(table, self._shares_pass, self._graph_sizes, self._ends)
        self._options = PlanOptions(self._plans, self._seconds, self._acceptance)
        self._probes = Probes(self._plans, self._seconds, self._acceptance)
        self._load = QueueingModel(self._seconds, self._max_num_seqs)
        # (plan, requests) → seconds of drafting by the table, committed rows not counted
        self._drafting_s: dict[tuple[int, int], float] = {}
        # index of a plan → whether it could be in use, as long as the load counts as the same
        self._served: dict[int, bool] = {}
        # the next iteration is decided anew, and by the load
        self._left = self._next_load = 0

    @property
    def decision(self) -> Decision:
        return self._decision

    @property
    def needs_results(self) -> bool:
        """Whether the next iteration is decided anew, or is the last one of a trial."""
        return self._left <= 0 or bool(self._trials.plans)

    def choose(self, num_running: int, stats: SpecStats) -> str:
        """What requests that wait for their first step are prepared for."""
        if num_running == 0:
            alone = [
                PlanOption(self._acceptance.tokens(plan, "", plan.max_depth + 1))
                for plan in self._plans
            ]
            self._prepared = self._prepare([alone], Contexts([TUNED.typical_context]))
        return self._plans[self._prepared].name

    def choose_again(self) -> None:
        """A trial that could not be queued ahead is not over."""
        self._trials.ask_again()

    def choose_each(self, requests: list[Request], stats: SpecStats) -> list[str]:
        """Plan of each request."""
        if self._trials.end():
            # what was decided besides holds
            self._decision = self._settled
        self._decided_s = 0.0
        if self._left <= 0 or self._are_others(requests) or self._may_hope(requests):
            begin_s = self._clock()
            self._decide(requests)
            self._num_decisions += 1
            # in the beginning there is more to learn than to lose
            most = min(TUNED.longest_hold, TUNED.hold << min(self._num_decisions - 1, 8))
            self._decided_s = self._clock() - begin_s
            self._paid = min(most, self._pays_after(begin_s))
            self._held = self._left = max(self._left, 0 if self._times_plain else self._paid)
        elif requests == self._last_requests:
            return self._last_names
        self._last_names = [self._plans[self._plan_index(request)].name for request in requests]
        self._last_requests = [] if self._trials.plans else list(requests)
        return self._last_names

    def _pays_after(self, begin_s: float) -> int:
        """Iterations after which the time since then is no more than deciding may take of them."""
        share_s = TUNED.deciding_share * self.decision.seconds
        return math.ceil((self._clock() - begin_s) / share_s) if share_s > 0 else 0

    def _are_others(self, requests: list[Request]) -> bool:
        """Many have come or gone since the last decision.

        That is more than an eighth where iterations since then have paid for that decision, and
        more than half before: on a small model it takes as long as a step, and requests come or go
        every few steps.
        """
        if requests == self._last_requests:
            return False
        num_new = sum(request.request_id not in self._chosen for request in requests)
        num_gone = self._num_decided + num_new - len(requests)
        is_paid = self._held - self._left >= self._paid
        return max(num_new, num_gone) > self._num_decided / (8 if is_paid else 2)

    def _may_hope(self, requests: list[Request]) -> bool:
        is_plain = self._settled.plans.keys() == {OFF.name}
        return is_plain and self._trials.may_hope(requests, self._probes, self._num_iterations)

    def _plan_index(self, request: Request) -> int:
        """What was decided; later requests do as most do, unless drafts would catch up."""
        request_id = request.request_id
        index = self._trials.plans.get(request_id, self._chosen.get(request_id))
        if index is not None:
            return index
        return 0 if any(lag(request, self._plans[self._main]).values()) else self._main

    def live_nodes(self, plan: SpecPlan, requests: Sequence[Request]) -> tuple[int, ...]:
        """See `Policy.live_nodes`.

        Where anything is cut, no level is verified that a request has no tokens left for.
        """
        if not self._live or not can_cut(plan):
            return ()
        nodes = nodes_by_depth(plan)
        live = []
        for request in requests:
            request_id = request.request_id
            is_decided = self._plans[self._chosen.get(request_id, 0)].name == plan.name
            is_whole = not is_decided or request_id in self._trials.plans
            own = plan.num_nodes if is_whole else self._live[request_id]
            deepest = max(0, min(request.num_tokens_left - 1, plan.max_depth))
            live.append(min(own, nodes[deepest]))
        return tuple(live) if min(live) < plan.num_nodes else ()

    def observe(self, group: StepGroup, step: StepResult) -> None:
        """Take the outcome of a step."""
        if group.plan.speculates and group.plan.name in self._index_of:
            request_ids = [request.request_id for request in group.requests]
            accepted = dict(zip(request_ids, step.num_accepted, strict=True))
            levels = [len(group.levels(place)) for place in range(len(request_ids))]
            # of levels that a drafter has left out nobody knows whether they would be refused
            allowed = [len(live_levels(group.plan, most)) for most in group.allowed]
            if allowed:
                shown = map(ShownLevels, allowed, levels, step.num_accepted)
                self._ends.observe(group.plan, list(shown))
            depths = dict(zip(request_ids, levels, strict=True))
            self._acceptance.observe(group.plan, accepted, depths)
        self._acceptance.forget(s.request_id for s in group.requests if s.is_finished)

    def observe_batch(self, batch: Batch, result: RunResult) -> None:
        """Take the seconds of an iteration."""
        self._num_iterations += 1
        self._load.observe(batch, result)
        if not batch.groups:
            return
        names = {group.plan.name for group in batch.groups}
        is_known = names <= self._index_of.keys()
        is_due = is_known and self._num_iterations >= self._next_look
        begin_s = self._clock()
        self._seconds.observe_prompts(batch, result, is_due)
        # of a trial that was queued before its results came, another decision holds by now
        is_other = not names <= self._settled.plans.keys()
        if names == {OFF.name}:
            self._next_plain = self._num_iterations + TUNED.plain_every
        is_first = self._left == self._held
        is_new = batch.prefill or self._trials.plans or is_other or is_first
        if result.wall_s and is_first and self._decided_s:
            # it began with a decision; of steps in a row each has a share of that
            is_alone = bool(self._trials.plans) or any(group.live for group in batch.groups)
            wall_s = max(0.0, result.wall_s - self._decided_s) if is_alone else 0.0
            result = replace(result, wall_s=wall_s)
        if is_due or (is_known and is_new):
            lagging = {group.plan.name for group in batch.groups if group.catches_up}
            self._seconds.observe(batch, result, lagging)
        if is_due and self._num_iterations >= TUNED.first_looks:
            # as rare as it is slow beside these steps
            least = TUNED.seldom if self._num_iterations >= TUNED.often else 0
            wait = max(least, min(TUNED.longest_hold, self._pays_after(begin_s)))
            self._next_look = self._num_iterations + wait
        ran = {self._index_of[name] for name in names & self._index_of.keys()}
        if self._trials.pay(ran, batch, result, self._probes):
            # what it shows is soon reason for another division
            self._left = min(self._left, TUNED.hold)
        self._left -= 1
        self._probes.earn(self.decision.seconds)

    def _decide(self, requests: list[Request]) -> None:
        request_ids = {request.request_id for request in requests}
        if len(self._acceptance) > 2 * len(requests) + TUNED.spare_requests:
            self._acceptance.keep(request_ids)
        self._trials.plans = {}
        # deciding takes time in proportion
        self._num_decided, self._left = len(requests), max(TUNED.hold, len(requests) // 4)
        if not requests:
            return
        options = [self._options.of(request) for request in requests]
        context = Contexts([s.cache_len for s in requests])
        is_paid = self._num_iterations >= self._load_paid
        if self._num_iterations >= self._next_load or (is_paid and self._load.has_changed):
            begin_s = self._clock()
            self._prepared = self._prepare(options, context)
            wait = min(TUNED.longest_hold, self._pays_after(begin_s))
            self._load_paid = self._num_iterations + wait
            self._next_load = self._num_iterations + max(TUNED.load_every, wait)
            self._served = {}
        in_step = options
        options = [
            self._options.with_lags(request, own, reads_prompts=bool(self._prepared))
            for request, own in zip(requests, options, strict=True)
        ]
        cost = StepCost(self._seconds, self._plans, self._drafting_s)
        mixes = self._seconds.shares_pass
        best = allocate(options, cost, self._nodes, self._budget, mixes)
        kept = self._kept(requests, options, cost)
        if self._live_nodes is not None:
            best = self._live_nodes.best(requests, options, best, cost)
            if kept is not None:
                kept = self._live_nodes.cut(requests, options, kept.plans, cost)
        if kept is not None and kept.goodput * TUNED.margin >= best.goodput:
            best = kept
        self._times_plain = all(best.plans) and self._num_iterations >= self._next_plain
        if self._times_plain:
            loads = [GroupLoad() for _ in self._plans]
            for own in options:
                loads[0] = loads[0].plus(own[0] or PlanOption(1.0))
            best = Allocation((0,) * len(requests), float(len(requests)), cost(loads))
        self._chosen = {
            request.request_id: index for request, index in zip(requests, best.plans, strict=True)
        }
        self._live = dict(zip([s.request_id for s in requests], best.live, strict=False))
        counts = Counter(best.plans)
        self._main = max(counts, key=lambda index: counts[index])
        probe = None
        if not self._times_plain:
            serves = self._serves(context)
            hopes = self._trials.hopes
            probe = self._probes.choose(requests, in_step, best, cost, serves, hopes)
        self._trials.start(probe)
        self._settled = self._decision = self._describe(best, None, requests)
        if probe is not None:
            self._decision = self._describe(best, probe, requests)

    def _serves(self, context: Contexts) -> Callable[[int, float], bool]:
        """Whether a plan would be in use in the long run, if it gave so many tokens a step."""

        def serves(index: int, tokens: float) -> bool:
            if index not in self._served:
                found = self._load.could_draft(self._plans, index, tokens, context)
                self._served[index] = found
            return self._served[index]

        return (lambda index, tokens: True) if self._prepared else serves

    def _kept(
        self,
        requests: Sequence[Request],
        options: Sequence[Sequence[PlanOption | None]],
        cost: Cost,
    ) -> Allocation | None:
        """The division so far; None where it does not suit these requests."""
        plans = [self._chosen.get(s.request_id, self._main) for s in requests]
        plans = [p if own[p] else 0 for p, own in zip(plans, options, strict=True)]
        counts = Counter(plans)
        nodes = sum(count * self._nodes[index] for index, count in counts.items())
        if self._budget is not None and nodes > self._budget and set(counts) != {0}:
            return None
        found = [own[index] for index, own in zip(plans, options, strict=True)]
        tokens = sum(option.tokens for option in found if option)
        seconds = sum(option.seconds for option in found if option)
        loads = [GroupLoad()] * len(self._plans)
        for index, option in zip(plans, found, strict=True):
            if option:
                loads[index] = loads[index].plus(option)
        seconds += cost(loads)
        return Allocation(tuple(plans), tokens, seconds)

    def _prepare(self, options: Sequence[Sequence[PlanOption | None]], context: Contexts) -> int:
        """What drafts read prompts for; off where that does not pay off in the long run."""
        tokens = [
            [own.tokens for own in (each[index] for each in options) if own is not None]
            for index in range(len(self._plans))
        ]
        margin = 1.0 if self._prepared else TUNED.margin_of_off
        return self._load.drafting(self._plans, tokens, context, margin)

    @property
    def _nodes(self) -> list[int]:
        return [plan.num_nodes for plan in self._plans]

    def _describe(
        self, best: Allocation, probe: Probe | None, requests: Sequence[Request]
    ) -> Decision:
        plans, tokens, seconds = list(best.plans), best.tokens, best.seconds
        if probe is not None:
            indices = [probe.plans.get(s.request_id) for s in requests]
            plans = [old if new is None else new for old, new in zip(plans, indices, strict=True)]
            tokens, seconds = probe.tokens, probe.seconds
        counts = Counter(self._plans[index].name for index in plans)
        rate = self._first_rate()
        plain_s = self._seconds.iteration([StepShape.of(OFF, [s.cache_len for s in requests])])
        plain = len(requests) / plain_s if plain_s else 0.0
        goodput = tokens / seconds
        return Decision(dict(counts), goodput, seconds, tokens, rate, probe is not None, plain)

    def _first_rate(self) -> float:
        index = self._prepared or 1
        return self._acceptance.rates(self._plans[index])[0] if index < len(self._plans) else 0.0
