"""Continuous batching: who prefills, who steps, and what a pass has changed."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from specc.errors import RequestError
from specc.metrics import SpecStats
from specc.plans import OFF, SpecPlan
from specc.runtime.batch import Batch, Queued, Span, StepGroup
from specc.runtime.host_drafts import HostDrafts
from specc.runtime.kv_cache import KVCache
from specc.runtime.policy import EachPolicy, Policy, WholePolicy
from specc.runtime.program import draft_lens_of
from specc.runtime.request_queue import RequestQueue, turn_of
from specc.runtime.sequence import Sequence
from specc.runtime.sequence_blocks import SequenceBlocks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specc.runtime.captured_step import PendingStep
    from specc.runtime.runner import RunResult

# tokens that a sequence may grow by before its step has to come from the host again
_AHEAD = 64
# share of a prefill pass that prompts get however many tokens are decoded beside them
_LEAST_PREFILL = 8


class Scheduler:
    """Admits requests by their turn, whenever a slot and the blocks of the next one are free.

    Sequences take blocks as they grow. Where none is left for a plain step, whoever's turn is last
    gives up its own and computes its rows again later; so whoever's turn is first always ends. A
    request that finds no room is not overtaken by smaller ones.

    `queued` holds the batches that were queued and not post-processed, in order: blocks of their
    sequences are not free, and `postprocess` takes the oldest one out.

    Args:
        cache: whose blocks sequences own.
        plans: the engine's plans by name, `off` included.
        policy: picks the plan of each step.
        prefill_chunk: tokens of a prefill pass at most.
        position_limit: positions 0 … position_limit - 1 exist in every model; no draft token may
            lie behind them.
        shares_prefixes: rows of a prompt are looked for among those of earlier requests.
        shares_pass: prompts and steps of all plans go through the target together, and share
            `prefill_chunk`.
        window: of the target's layers, the smallest; 0 is no limit. A prompt's part of a shared
            pass is no longer.
        looks_ahead: steps can be queued behind each other, so sequences take blocks for several.
        clock: seconds, those of the sequences.
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
        shares_pass: bool = False,
        window: int = 0,
        looks_ahead: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.stats = SpecStats()
        self.waiting = RequestQueue()
        self.running: list[Sequence] = []
        self.queued: deque[Queued] = deque()
        self.host_drafts = HostDrafts(plans)
        # sequences of the last iteration by plan; prompt tokens that were looked for in the cache
        self.last_plans: Counter[str] = Counter()
        self.num_looked_up = 0
        self._blocks = SequenceBlocks(cache, shares_prefixes)
        self._max_num_seqs = cache.shape.max_num_seqs
        self._max_nodes = cache.shape.max_nodes
        self._plans = plans
        self._prefill_chunk = prefill_chunk
        self._position_limit = position_limit
        self._shares_pass = shares_pass
        self._window = window
        self._looks_ahead = looks_ahead
        self._clock = clock
        self._has_deadlines = False
        self.use(policy)
        # who left while a queued step held its blocks; and who was dropped, until `abort`
        self._left: list[Sequence] = []
        self._torn: list[Sequence] = []

    def use(self, policy: Policy) -> None:
        """Let this policy choose from the next iteration on."""
        self.policy = policy
        self._each = policy if isinstance(policy, EachPolicy) else None
        self._whole = policy if isinstance(policy, WholePolicy) else None

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def check_fits(self, sequence: Sequence) -> None:
        """Raises RequestError: it needs more blocks than the cache has; from any thread."""
        self._blocks.check_fits(sequence)

    def add(self, sequence: Sequence) -> None:
        """Queue a request.

        Raises:
            RequestError: it needs more blocks than the cache has.
        """
        self.check_fits(sequence)
        self.waiting.add(sequence)
        self._has_deadlines |= sequence.deadline_s is not None

    def abort(self, sequence: Sequence) -> None:
        """Drop a request, wherever it is; one that ended is left alone."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self._release(sequence)
        self._torn = [other for other in self._torn if other is not sequence]

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Look for requests that `forget_queued` had to drop.

        Raises:
            RequestError: one of these is among them.
        """
        for sequence in sequences if self._torn else ():
            if sequence in self._torn:
                raise RequestError(
                    f"request {sequence.request_id} was interrupted between two of its tokens",
                    "a step whose results are taken as a whole",
                    "send the request again",
                )

    def schedule(self) -> Batch:
        """Pick the work of the next iteration."""
        self._end_late()
        self._admit()
        ready = [sequence for sequence in self.running if sequence.is_prefilled]
        plan = self._plans[self.policy.choose(len(ready), self.stats)]
        groups = self._divide(ready, plan)
        num_step_tokens = sum(g.plan.num_nodes * len(g.sequences) for g in groups)
        spans = self._prefill_spans(plan, num_step_tokens)
        self.last_plans = Counter({g.plan.name: len(g.sequences) for g in groups})
        return Batch(spans, groups, len(self.running) + len(self.waiting))

    def _divide(self, ready: list[Sequence], plan: SpecPlan) -> list[StepGroup]:
        """Who runs which plan; whoever cannot speculate decodes plainly, in the last group."""
        plans = [plan] * len(ready)
        if ready and self._each is not None:
            plans = [self._plans[name] for name in self._each.choose_each(ready, self.stats)]
        wishes = {
            id(sequence): own if self._speculates(sequence, own) else OFF
            for sequence, own in zip(ready, plans, strict=True)
        }
        granted = self._grant(ready, wishes)
        members: dict[str, list[Sequence]] = {}
        for sequence in ready:
            if (own := granted.get(id(sequence))) is not None:
                members.setdefault(own.name, []).append(sequence)
        plain = members.pop(OFF.name, [])
        groups = []
        for name, sequences in members.items():
            own = self._plans[name]
            groups.append(StepGroup(own, sequences, self.host_drafts.inputs(own, sequences)))
        return [*groups, StepGroup(OFF, plain)] if plain else groups

    def _grant(self, ready: list[Sequence], wishes: Mapping[int, SpecPlan]) -> dict[int, SpecPlan]:
        """Blocks for everyone's step, by their turns; plainly, or not at all, where they run out.

        Returns:
            the plan of those who still run, by identity.
        """
        blocks = self._blocks
        if not self._looks_ahead and all(
            blocks.holds(sequence, wishes[id(sequence)], sequence.cache_len) for sequence in ready
        ):
            return dict(wishes)
        granted: dict[int, SpecPlan] = {}
        for sequence in sorted(ready, key=turn_of):
            if not sequence.blocks:
                continue  # given up for somebody in front of it
            plan = wishes[id(sequence)]
            if not blocks.grow(sequence, plan):
                for other in self.running:
                    blocks.trim(other, granted.get(id(other), OFF))
                plan = plan if blocks.grow(sequence, plan) else OFF
            while not blocks.grow(sequence, plan):
                last = max(reversed(self.running), key=turn_of)
                self._preempt(last)
                granted.pop(id(last), None)
                if last is sequence:
                    break
            else:
                granted[id(sequence)] = plan
        if self._looks_ahead and not self._needs_results:
            # the next steps can then be queued without a word of the host
            for sequence in ready:
                own = granted.get(id(sequence))
                ahead = min(_AHEAD, sequence.num_tokens_left)
                # not at the cost of somebody's next step
                if own and blocks.missing(sequence, own, ahead) + len(ready) <= blocks.num_free:
                    blocks.grow(sequence, own, ahead)
        return granted

    @property
    def _needs_results(self) -> bool:
        return getattr(self.policy, "needs_results", True)

    def hold(self, batch: Batch, pending: PendingStep) -> None:
        """The batch is queued: until `postprocess`, the blocks of its sequences stay theirs."""
        self.queued.append(Queued(batch, pending))

    def forget_queued(self) -> None:
        """Give up what is queued: the next iteration starts from what was committed.

        To be called behind a failure, once the device is done with all of it. Repeating steps is
        safe: they write no row in front of `cache_len` or `draft_lens` but that of the last
        committed token, as it is, and every row behind is written before it is read. Who was
        caught between its tokens and its lengths cannot go on and is dropped: see `check`.
        """
        self.queued.clear()
        for sequence in [s for s in self.running if _is_torn(s)]:
            self._torn.append(sequence)
            self._release(sequence)
        self._release_finished()
        self._free_blocks()

    def repeats(self, batch: Batch) -> bool:
        """Whether the iteration behind a queued step is that step again, whatever its results are.

        The same plan then runs over the same sequences, but for one that happens to end:
        `postprocess` drops its row of the repetition. No sequence may be certain to end, or reach
        behind its blocks or the last position where all of its draft tokens are accepted.

        Args:
            batch: one step, whose results nobody has seen yet.
        """
        group = batch.groups[0]
        if self._needs_results or group.extra:
            return False
        if group.sequences != self.running or self._can_admit() or self._late():
            return False
        most_tokens = group.plan.max_depth + 1
        for sequence in group.sequences:
            cache_len = sequence.cache_len + most_tokens
            is_within = self._blocks.holds(sequence, group.plan, cache_len)
            is_same = not group.plan.speculates or self._speculates(sequence, group.plan, cache_len)
            if sequence.num_tokens_left == 1 or not is_within or not is_same:
                return False
        # a row that no length limit ends makes the repetition worth its while
        return any(sequence.num_tokens_left > most_tokens for sequence in group.sequences)

    def postprocess(self, batch: Batch, result: RunResult) -> None:
        """Commit what the passes did: lengths, tokens, counters; release requests that ended."""
        if self.queued:
            assert self.queued[0].batch is batch, "batches end in the order of their start"
            self.queued.popleft()
        self._commit_prefill(batch, result)
        self._commit_steps(batch, result)
        for sequence in self.running:
            self._blocks.publish(sequence)
        self._release_finished()
        if self._left:
            self._free_blocks()
        if self._whole is not None:
            self._whole.observe_batch(batch, result)

    def _commit_prefill(self, batch: Batch, result: RunResult) -> None:
        if batch.prefill:
            self.stats.record_prefill_pass(result.prefill_s)
        for span, token in zip(batch.prefill, result.first_tokens, strict=True):
            sequence = span.sequence
            sequence.stats.record_prefill_pass(result.prefill_s)
            if (scored := result.prompt_logprobs.get(sequence.request_id)) is not None:
                # whoever was preempted in its prompt has these already
                sequence.prompt_logprobs[span.start :] = scored
            # in front of the first token: without that token, `_is_torn` then tells
            sequence.cache_len = span.end
            for draft in span.drafts:
                sequence.draft_lens[draft] = span.end
            if token is not None:
                sequence.append_first(token, result.first_logprobs.get(sequence.request_id))
                if sequence.has_output:
                    self.stats.record_first_token(sequence.stats.first_token_s)
                self.stats.num_prompt_tokens += sequence.num_prompt_tokens

    def _commit_steps(self, batch: Batch, result: RunResult) -> None:
        no_logprobs: list[None] = [None] * len(result.steps)
        logprobs = result.logprobs or no_logprobs
        for group, step, scores in zip(batch.groups, result.steps, logprobs, strict=True):
            rows = [(i, s) for i, s in enumerate(group.sequences) if s not in self._left]
            if not rows:
                continue
            self.stats.record_step_pass(step.stage_s)
            if len(rows) == len(group.sequences):
                self.host_drafts.observe(group.plan, group.sequences, group.extra, step)
            for i, sequence in rows:
                num_accepted = step.num_accepted[i]
                tokens = step.output_tokens[i][: num_accepted + 1]
                num_emitted = sequence.append(tokens, scores[i] if scores else None)
                sequence.cache_len = step.next_cache_len[i]
                # a draft whose length is not moved any more would catch up
                for draft, lengths in step.draft_lens.items():
                    sequence.draft_lens[draft] = lengths[i]
                sequence.stats.record_step_pass(step.stage_s)
                for stats in (sequence.stats, self.stats):
                    stats.record_step(group.plan.level_sizes, num_accepted, num_emitted)
            if len(rows) == len(group.sequences) and self._each is not None:
                self._each.observe(group, step)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_num_seqs:
            sequence = self.waiting.first
            if self._waits_for_leader(sequence):
                return
            is_first_time = not sequence.stats.num_preemptions
            if not self._blocks.admit(sequence, self.running):
                return
            self.waiting.pop()
            self.running.append(sequence)
            if is_first_time:
                self.num_looked_up += sequence.num_prompt_tokens
                self.stats.num_cached_tokens += sequence.cache_len

    def _can_admit(self) -> bool:
        """There is a slot for the first who waits, and there are blocks."""
        if not self.waiting or len(self.running) >= self._max_num_seqs:
            return False
        if self._waits_for_leader(self.waiting.first):
            return False
        return self._blocks.can_admit(self.waiting.first, self.running)

    def _waits_for_leader(self, sequence: Sequence) -> bool:
        """The rows of its prompt are on their way in another request, to be shared."""
        leader = sequence.leader
        if leader is None or leader.is_prefilled or not self._blocks.can_share(sequence):
            return False
        return any(other is leader for other in self.running)

    def _preempt(self, sequence: Sequence) -> None:
        """Take the blocks of a sequence away; it waits for others, to compute its rows again."""
        self.running.remove(sequence)
        self._blocks.release(sequence.preempt())
        self.stats.num_preemptions += 1
        self.waiting.add_again(sequence)

    def _late(self) -> list[Sequence]:
        """Requests whose deadline has passed."""
        if not self._has_deadlines:
            return []
        now_s = self._clock()
        everyone = (*self.running, *self.waiting)
        return [s for s in everyone if s.deadline_s is not None and s.deadline_s <= now_s]

    def _end_late(self) -> None:
        for sequence in self._late():
            if sequence in self.waiting:
                self.waiting.remove(sequence)
                self.stats.num_requests += 1
            sequence.end("timeout")
        self._release_finished()

    def _prefill_spans(self, plan: SpecPlan, num_step_tokens: int) -> list[Span]:
        spans = []
        budget = self._prefill_chunk
        longest = budget
        rows_left = self._max_num_seqs * self._max_nodes
        if self._shares_pass and num_step_tokens:
            budget = max(budget - num_step_tokens, budget // _LEAST_PREFILL, 1)
            longest = min(budget, self._window or budget)
        for sequence in self.running:
            start = sequence.cache_len
            if sequence.is_prefilled or budget == 0:
                continue
            end = min(sequence.prefill_end, start + min(budget, longest))
            if sequence.is_scored:
                # their logits take no more memory than those of the largest step
                if not rows_left:
                    continue
                end = min(end, start + rows_left)
                rows_left -= end - start
            budget -= end - start
            drafts: tuple[int, ...] = ()
            if self._speculates(sequence, plan, sequence.prefill_end):
                # a draft that lags behind catches up later, in front of its first step
                lens = sequence.draft_lens
                drafts = tuple(i for i in draft_lens_of(plan) if lens[i] == start)
            spans.append(Span(sequence, start, end, drafts))
        return spans

    def _speculates(self, sequence: Sequence, plan: SpecPlan, cache_len: int | None = None) -> bool:
        """The plan drafts, the request can take part, and the deepest node has a position."""
        cache_len = sequence.cache_len if cache_len is None else cache_len
        fits = cache_len + plan.max_depth < self._position_limit
        params = sequence.params
        suits = params.is_greedy or params.rule_id in plan.rules
        # trees in tiles leave no logits behind
        is_scored = (
            params.logprobs is not None
            or params.structured_outputs is not None
            or params.has_controls
        )
        is_lost = plan.tile is not None and is_scored
        return plan.speculates and params.speculative and fits and suits and not is_lost

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._left.append(sequence)
        self._free_blocks()

    def _release_finished(self) -> None:
        for sequence in [s for s in self.running if s.is_finished]:
            self._release(sequence)
            self.host_drafts.finish(sequence)
            self.stats.num_requests += 1

    def _free_blocks(self) -> None:
        """Free the blocks of those who left, but for those that a queued step still uses."""
        used = {id(s) for batch, _ in self.queued for g in batch.groups for s in g.sequences}
        for sequence in [s for s in self._left if id(s) not in used]:
            self._left.remove(sequence)
            self._blocks.release(sequence.blocks)
            sequence.blocks = []


def _is_torn(sequence: Sequence) -> bool:
    """A failure came between the tokens of a sequence and its committed rows, or its end."""
    if sequence.is_finished:
        # counted as the last thing, behind its text and its events
        return sequence.stats.num_requests == 0
    return sequence.is_prefilled and len(sequence.token_ids) != sequence.cache_len + 1
