"""Continuous batching: which requests prefill, which step, and what a pass has changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from specc.errors import RequestError
from specc.runtime.drafters.host_drafts import HostDrafts
from specc.runtime.policies.base import Policy, check_policy
from specc.runtime.scheduling.batch import Batch, RunResult, Span, StepGroup
from specc.runtime.scheduling.beside import ALONE, Beside
from specc.runtime.scheduling.commit_batch import commit_prefill, commit_steps, commit_votes
from specc.runtime.scheduling.kv_cache import KVCache
from specc.runtime.scheduling.look_ahead import LookAhead
from specc.runtime.scheduling.plan_counts import PlanCounts
from specc.runtime.scheduling.prompt_spans import PromptSpans
from specc.runtime.scheduling.request import Request
from specc.runtime.scheduling.request_blocks import RequestBlocks
from specc.runtime.scheduling.request_queue import RequestQueue, turn_of
from specc.runtime.scheduling.step_groups import StepGroups
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF, SpecPlan, models_of

_NOTHING_QUEUED = LookAhead()


class Scheduler:
    """Admits requests by their turn, whenever a slot and the blocks of the next one are free.

    Requests take blocks as they grow. Where none is left for a plain step, the one whose turn is
    last gives up its own and computes its rows again later; so the one whose turn is first always
    ends. A request that finds no room is not overtaken by smaller ones.

    What is queued on a device is known to `InFlight`: here, the blocks of a batch that is held stay
    with its requests until `postprocess`.

    Args:
        cache: whose blocks requests own.
        plans: the engine's plans by name, `off` included.
        policy: picks the plan of each step.
        prefill_chunk: tokens of a prefill pass at most.
        position_limit: positions 0 … position_limit - 1 exist in every model; no draft token may
            lie after them.
        shares_prefixes: rows of a prompt are looked for among those of earlier requests.
        shares_outputs: suffix drafts look into earlier requests' outputs.
        shares_pass: prompts and steps of all plans go through the target together, and share
            `prefill_chunk`.
        cuts_trees: the target can verify a part of each request's tree; None: where `shares_pass`.
        window: of the target's layers, the smallest; 0 is no limit. A prompt's part of a shared
            pass is no longer.
        looks_ahead: steps can be queued after each other, so requests take blocks for several.
        clock: seconds, those of the requests.
    """

    def __init__(
        self,
        cache: KVCache,
        plans: Mapping[str, SpecPlan],
        policy: Policy,
        prefill_chunk: int,
        position_limit: int,
        *,
        shares_prefixes: bool = True,
        shares_outputs: bool = True,
        shares_pass: bool = False,
        cuts_trees: bool | None = None,
        window: int = 0,
        looks_ahead: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.stats = SpecStats()
        self.waiting = RequestQueue()
        self.running: list[Request] = []
        self.host_drafts = HostDrafts(plans, cache.shape.rows_per_block, shares_outputs)
        # requests of the last iteration by plan; prompt tokens that were looked for in the cache
        self.last_plans: dict[str, int] = {}
        self.num_looked_up = 0
        self.plan_counts = PlanCounts()
        has_heads = any(x.facts.pairs for x in models_of(plans.values()).values())
        self._blocks = RequestBlocks(cache, shares_prefixes, has_heads)
        self._max_num_seqs = cache.shape.max_num_seqs
        self._plans = plans
        self._position_limit = position_limit
        most_scored = self._max_num_seqs * cache.shape.max_nodes
        sizes = prefill_chunk, most_scored, shares_pass, window
        self._prompts = PromptSpans(*sizes, grid=self._blocks.grid)
        cuts_trees = shares_pass if cuts_trees is None else cuts_trees
        self._groups = StepGroups(self.host_drafts, position_limit, shares_pass, cuts_trees)
        self._looks_ahead = looks_ahead
        self._clock = clock
        self._has_deadlines = False
        self.use(policy)
        # dropped, until `abort`
        self._torn: list[Request] = []

    def use(self, policy: Policy) -> None:
        """Let this policy choose from the next iteration on; raises ConfigError: it is none."""
        check_policy(policy)
        self.policy = policy

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def check_fits(self, request: Request) -> None:
        """Raises RequestError: it needs more blocks than the cache has; from any thread."""
        self._blocks.check_fits(request)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it needs more blocks than the cache has.
        """
        self.check_fits(request)
        self.waiting.add(request)
        self._has_deadlines |= request.deadline_s is not None

    def abort(self, request: Request) -> None:
        """Drop a request, wherever it is; one that ended is left alone."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self._release(request)
        self._torn = [other for other in self._torn if other is not request]

    def check(self, requests: Iterable[Request]) -> None:
        """Look for requests that `recover` had to drop.

        Raises:
            RequestError: one of these is among them.
        """
        for request in requests if self._torn else ():
            if request in self._torn:
                raise RequestError(
                    f"request {request.request_id} was interrupted between two of its tokens",
                    "a step whose results are taken as a whole",
                    "send the request again",
                )

    def schedule(self, beside: Beside = ALONE) -> Batch:
        """Pick the work of the next iteration.

        Args:
            beside: of batches in flight, whose requests have no part in it. Then it may be that
                nobody can run: blocks may be taken until those are done.
        """
        if self._has_deadlines:
            self._end_late(beside)
        self._admit()
        batch = self._pick(_NOTHING_QUEUED, beside)
        assert batch is not None, "all results are known"
        return batch

    def schedule_ahead(self, queued: Iterable[Batch]) -> Batch | None:
        """Pick the work of the iteration after those that are queued, without their results.

        Rows, blocks and positions are judged by the longest that steps in flight may make their
        requests. One that is certain to end has no part; one that happens to end has a row that
        `postprocess` drops. A prompt whose last token is in flight takes its first step later.
        Nobody gives up blocks meanwhile.

        Args:
            queued: batches whose results nobody has seen.
        Returns:
            None where the results come first: the policy needs them, a deadline has passed, blocks
            or positions may run out, a draft has to read tokens that nobody knows yet, the host
            has drafts of its own to bring, or nothing would be sure to be of use.
        """
        if not self.may_look_ahead or self._late():
            return None
        self._admit()
        return self._pick(LookAhead(queued), ALONE)

    def _pick(self, ahead: LookAhead, beside: Beside) -> Batch | None:
        own = beside.share(self.running)
        ready = [s for s in own if s.is_prefilled]
        has_prompts = len(ready) < len(own)
        if ahead.is_queued:
            ready = [s for s in ready if s.num_tokens_left > ahead.least(s)]
            if not self._is_worth_it(ready, ahead):
                return None
        plan = self._plans[self.policy.choose(len(ready), self.stats)]
        if (groups := self._divide(ready, plan, ahead, beside)) is None:
            return None
        if not ahead.is_queued:
            groups = self._blocks.keep_steps(groups)
        self.last_plans = {g.plan.name: len(g.requests) for g in groups}
        spans: list[Span] = []
        if has_prompts:
            num_step_tokens = sum(g.num_nodes for g in groups)
            spans = self._prompts.spans(
                own, num_step_tokens, ahead, lambda s: self._groups.readers(s, plan)
            )
            spans = self._blocks.keep_states(spans)
        return Batch(spans, groups, len(self.running) + len(self.waiting))

    def _is_worth_it(self, ready: list[Request], ahead: LookAhead) -> bool:
        """A prompt goes on, or a row that no length limit ends."""
        return any(s.num_tokens_left > ahead.most(s) for s in ready) or any(
            not s.is_prefilled and ahead.prefilled(s) < s.prefill_end for s in self.running
        )

    def _divide(
        self, ready: list[Request], plan: SpecPlan, ahead: LookAhead, beside: Beside
    ) -> list[StepGroup] | None:
        """Which request runs which plan; those that cannot speculate are the last group, plain.

        None where that depends on results in flight.
        """
        groups = self._divided(ready, plan, ahead, beside)
        if groups and ahead.is_queued and self._blocks.may_keep(groups, ahead):
            groups = None
        if groups is None:
            self.policy.choose_again()
        return groups

    def _divided(
        self, ready: list[Request], plan: SpecPlan, ahead: LookAhead, beside: Beside
    ) -> list[StepGroup] | None:
        plans = [plan] * len(ready)
        if ready and (names := self.policy.choose_each(ready, self.stats)) is not None:
            plans = [self._plans[name] for name in names]
        own = self._groups.with_predictions(ready, plans, ahead)
        if own is None:
            return None
        wishes = {}
        for request, chosen in zip(ready, own, strict=True):
            wish = self._groups.wish(request, chosen, ahead)
            if wish is None:
                return None
            wishes[id(request)] = wish
        granted: Mapping[int, SpecPlan] = wishes
        if not ahead.is_queued:
            granted = self._grant(ready, wishes, beside)
        elif not self._blocks.grow_all(ready, wishes, ahead):
            return None
        if self._looks_ahead and self.may_look_ahead:
            self._blocks.take_ahead(ready, granted)
        return self._groups.of(ready, granted, ahead, self.policy)

    def _grant(
        self, ready: list[Request], wishes: Mapping[int, SpecPlan], beside: Beside
    ) -> dict[int, SpecPlan]:
        """Blocks for everyone's step, by their turns; plainly, or not at all, where they run out.

        Returns:
            the plan of those that still run, by identity.
        """
        blocks = self._blocks
        if not self._looks_ahead and blocks.hold_all(ready, wishes):
            return dict(wishes)
        granted: dict[int, SpecPlan] = {}
        for request in sorted(ready, key=turn_of):
            if not request.blocks:
                continue  # given up for somebody before it
            plan = wishes[id(request)]
            if not blocks.grow(request, plan):
                for other in beside.idle(self.running):
                    blocks.trim(other, granted.get(id(other), OFF))
                plan = plan if blocks.grow(request, plan) else OFF
            while not blocks.grow(request, plan):
                if (last := beside.gives_way(request, self.running)) is None:
                    break
                self._preempt(last)
                granted.pop(id(last), None)
                if last is request:
                    break
            else:
                granted[id(request)] = plan
        return granted

    @property
    def may_look_ahead(self) -> bool:
        """The policy chooses without the results of the last iteration, or can do so late."""
        return not self.policy.needs_results or self.policy.chooses_late

    def steps_in_a_row(self, batch: Batch, most: int) -> int:
        """How often the steps of a batch can run before anybody looks at their results.

        Once where results decide what comes next: somebody waits or has a deadline, prompts or
        several plans run, the policy or the host has a say in each step, or blocks, positions or
        tokens that are left of a request run out.

        Args:
            batch: just scheduled, with nothing in flight.
            most: steps, 1 or more.
        """
        if most == 1 or batch.prefill or len(batch.groups) != 1:
            return 1
        group = batch.groups[0]
        requests, plan = group.requests, group.plan
        if self.waiting or self._has_deadlines or len(requests) < len(self.running):
            return 1
        if group.extra or group.live or self.policy.needs_results:
            return 1
        if any(s.prediction is not None and s.prediction.is_awake for s in requests):
            return 1
        per_step = plan.max_depth + 1
        for request in requests:
            # its row of a step that it is certain to have no part in would be for nothing
            most = min(most, -(-request.num_tokens_left // per_step))
            if plan.speculates:
                room = self._position_limit - 1 - plan.max_depth - request.cache_len
                most = min(most, 1 + max(0, room) // per_step)
            if (rows := self._blocks.rows_to_checkpoint(request)) is not None:
                # a step that may come so far is looked at
                most = min(most, max(1, (rows - 1) // per_step))
        return self._blocks.steps_held(requests, plan, max(1, most))

    def hold(self, batch: Batch) -> None:
        """The batch is queued: until `postprocess`, the blocks of its requests stay theirs."""
        self._blocks.hold(batch.requests)

    def recover(self) -> None:
        """Give up what is held: the next iteration starts from what was committed.

        To be called after a failure, once the device is done with all that was queued. Repeating
        steps is safe: they write no row before `cache_len` or `draft_lens` but that of the last
        committed token, as it is, and every row after is written before it is read. A request
        between its tokens and its lengths cannot go on and is dropped: see `check`.

        States are the exception: a pass may have folded tokens that were never committed, or not.
        Requests that have some wait, and compute their rows again.
        """
        for request in [s for s in self.running if _is_torn(s)]:
            self._torn.append(request)
            self._release(request)
        self._release_finished()
        self._blocks.let_all_go()
        if self._blocks.has_states:
            for request in list(self.running):
                self._preempt(request)

    def postprocess(self, batch: Batch, result: RunResult) -> None:
        """Commit what the passes did: lengths, tokens, counters; release requests that ended."""
        left = self._blocks.left
        if batch.prefill:
            commit_prefill(batch, result, self.stats, left)
        commit_steps(
            batch, result, self.stats, self.plan_counts, left, self.host_drafts, self.policy
        )
        commit_votes(result, left)
        for request in self.running:
            self._blocks.publish(request)
        self._blocks.publish_states(batch.prefill)
        self._blocks.publish_steps(batch.groups)
        self._release_finished()
        if self._blocks.has_held:
            self._blocks.let_go(batch.requests)
        if not any(group.predicts for group in batch.groups):
            self.policy.observe_batch(batch, result)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_num_seqs:
            request = self.waiting.first
            if self._waits_for_leader(request):
                return
            is_first_time = not request.stats.num_preemptions
            if not self._blocks.admit(request, self.running):
                return
            self.waiting.pop()
            self.running.append(request)
            if is_first_time:
                self.num_looked_up += request.num_prompt_tokens
                self.stats.num_cached_tokens += request.cache_len

    def _waits_for_leader(self, request: Request) -> bool:
        """The rows of its prompt are on their way in another request, to be shared."""
        leader = request.leader
        if leader is None or leader.is_prefilled or not self._blocks.can_share(request):
            return False
        return any(other is leader for other in self.running)

    def _preempt(self, request: Request) -> None:
        """Take the blocks of a request away; it waits for others, to compute its rows again."""
        self.running.remove(request)
        self._blocks.preempt(request)
        self.stats.num_preemptions += 1
        self.waiting.add_again(request)

    def _late(self) -> list[Request]:
        """Requests whose deadline has passed."""
        if not self._has_deadlines:
            return []
        now_s = self._clock()
        everyone = (*self.running, *self.waiting)
        return [s for s in everyone if s.deadline_s is not None and s.deadline_s <= now_s]

    def _end_late(self, beside: Beside) -> None:
        for request in beside.idle(self._late()):
            if request in self.waiting:
                self.waiting.remove(request)
                self.stats.num_requests += 1
            request.end("timeout")
        self._release_finished()
        everyone = (*self.running, *self.waiting)
        self._has_deadlines = any(s.deadline_s is not None for s in everyone)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self._blocks.leave(request)

    def _release_finished(self) -> None:
        for request in [s for s in self.running if s.finish_reason is not None]:
            self._release(request)
            self.host_drafts.finish(request)
            self.stats.num_requests += 1
            own = request.stats
            self.stats.record_prediction(
                own.accepted_prediction_tokens, own.rejected_prediction_tokens
            )


def _is_torn(request: Request) -> bool:
    """A failure came between the tokens of a request and its committed rows, or its end."""
    if request.is_finished:
        # counted as the last thing, after its text and its events
        return request.stats.num_requests == 0
    return request.is_prefilled and len(request.token_ids) != request.cache_len + 1
