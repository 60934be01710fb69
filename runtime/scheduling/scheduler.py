"""Continuous batching: which sequences prefill, which step, and what a pass has changed."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from specc.errors import RequestError
from specc.runtime.backends.program import draft_lens_of
from specc.runtime.drafts.host_drafts import HostDrafts
from specc.runtime.policies.base import EachPolicy, Policy, WholePolicy
from specc.runtime.scheduling.batch import Batch, Queued, Span, StepGroup
from specc.runtime.scheduling.commit_batch import commit_prefill, commit_steps
from specc.runtime.scheduling.kv_cache import KVCache
from specc.runtime.scheduling.look_ahead import LookAhead
from specc.runtime.scheduling.request_queue import RequestQueue, turn_of
from specc.runtime.scheduling.sequence import Sequence
from specc.runtime.scheduling.sequence_blocks import SequenceBlocks
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF, SpecPlan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specc.runtime.runner import RunResult
    from specc.runtime.scheduling.pending_batch import PendingBatch

# tokens that a sequence may grow by before its step has to come from the host again
_AHEAD = 64
# share of a prefill pass that prompts get however many tokens are decoded beside them
_LEAST_PREFILL = 8


class Scheduler:
    """Admits requests by their turn, whenever a slot and the blocks of the next one are free.

    Sequences take blocks as they grow. Where none is left for a plain step, the one whose turn is
    last gives up its own and computes its rows again later; so the one whose turn is first always
    ends. A request that finds no room is not overtaken by smaller ones.

    `queued` holds the batches that were queued and not post-processed, in order: blocks of their
    sequences are not free, and `postprocess` takes the oldest one out.

    Args:
        cache: whose blocks sequences own.
        plans: the engine's plans by name, `off` included.
        policy: picks the plan of each step.
        prefill_chunk: tokens of a prefill pass at most.
        position_limit: positions 0 … position_limit - 1 exist in every model; no draft token may
            lie after them.
        shares_prefixes: rows of a prompt are looked for among those of earlier requests.
        shares_pass: prompts and steps of all plans go through the target together, and share
            `prefill_chunk`.
        window: of the target's layers, the smallest; 0 is no limit. A prompt's part of a shared
            pass is no longer.
        looks_ahead: steps can be queued after each other, so sequences take blocks for several.
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
        # left while a queued step held their blocks; and dropped, until `abort`
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
        """Pick the work of the next iteration; nothing is in flight."""
        self._end_late()
        self._admit()
        batch = self._pick(LookAhead())
        assert batch is not None, "all results are known"
        return batch

    def schedule_ahead(self) -> Batch | None:
        """Pick the work of the iteration after those that are queued, without their results.

        Rows, blocks and positions are judged by the longest that steps in flight may make their
        sequences. One that is certain to end has no part; one that happens to end has a row that
        `postprocess` drops. A prompt whose last token is in flight takes its first step later.
        Nobody gives up blocks meanwhile.

        Returns:
            None where the results come first: the policy needs them, a deadline has passed, blocks
            or positions may run out, a draft has to read tokens that nobody knows yet, the host
            has drafts of its own to bring, or nothing would be sure to be of use.
        """
        if not self._may_look_ahead or self._late():
            return None
        self._admit()
        return self._pick(LookAhead(self.queued))

    def _pick(self, ahead: LookAhead) -> Batch | None:
        ready = [s for s in self.running if s.is_prefilled and s.num_tokens_left > ahead.least(s)]
        if ahead and not self._is_worth_it(ready, ahead):
            return None
        plan = self._plans[self.policy.choose(len(ready), self.stats)]
        if (groups := self._divide(ready, plan, ahead)) is None:
            return None
        num_step_tokens = sum(g.plan.num_nodes * len(g.sequences) for g in groups)
        spans = self._prefill_spans(plan, num_step_tokens, ahead)
        self.last_plans = Counter({g.plan.name: len(g.sequences) for g in groups})
        return Batch(spans, groups, len(self.running) + len(self.waiting))

    def _is_worth_it(self, ready: list[Sequence], ahead: LookAhead) -> bool:
        """A prompt goes on, or a row that no length limit ends."""
        return any(s.num_tokens_left > ahead.most(s) for s in ready) or any(
            not s.is_prefilled and ahead.prefilled(s) < s.prefill_end for s in self.running
        )

    def _divide(
        self, ready: list[Sequence], plan: SpecPlan, ahead: LookAhead
    ) -> list[StepGroup] | None:
        """Which sequence runs which plan; those that cannot speculate are the last group, plain.

        None where that depends on results in flight.
        """
        plans = [plan] * len(ready)
        if ready and self._each is not None:
            plans = [self._plans[name] for name in self._each.choose_each(ready, self.stats)]
        wishes = {}
        for sequence, chosen in zip(ready, plans, strict=True):
            wish = self._wish(sequence, chosen, ahead)
            if wish is None:
                return None
            wishes[id(sequence)] = wish
        granted: Mapping[int, SpecPlan] = wishes
        if not ahead:
            granted = self._grant(ready, wishes)
        elif not self._has_blocks_for(ready, wishes, ahead):
            return None
        if self._looks_ahead and self._may_look_ahead:
            self._take_ahead(ready, granted)
        members: dict[str, list[Sequence]] = {}
        for sequence in ready:
            if (own := granted.get(id(sequence))) is not None:
                members.setdefault(own.name, []).append(sequence)
        plain = members.pop(OFF.name, [])
        groups = [self._group(self._plans[name], own, ahead) for name, own in members.items()]
        return [*groups, self._group(OFF, plain, ahead)] if plain else groups

    def _group(self, plan: SpecPlan, sequences: list[Sequence], ahead: LookAhead) -> StepGroup:
        extra = self.host_drafts.inputs(plan, sequences) if plan.speculates else {}
        tokens = tuple(map(ahead.most, sequences)) if ahead else ()
        lags = any(ahead.lags(sequence, plan) for sequence in sequences)
        return StepGroup(plan, sequences, extra, tokens, lags)

    def _wish(self, sequence: Sequence, plan: SpecPlan, ahead: LookAhead) -> SpecPlan | None:
        """What a sequence runs of what the policy chose; None where results in flight decide."""
        least, most = ahead.least(sequence), ahead.most(sequence)
        does = self._speculates(sequence, plan, sequence.cache_len + most)
        if not most:
            return plan if does else OFF
        if self._speculates(sequence, plan, sequence.cache_len + least) != does:
            return None
        if does and (ahead.lags(sequence, plan) or self.host_drafts.brings(plan)):
            return None
        return plan if does else OFF

    def _has_blocks_for(
        self, ready: list[Sequence], wishes: Mapping[int, SpecPlan], ahead: LookAhead
    ) -> bool:
        """Blocks for everyone's step, wherever those in flight end; False where they run out."""
        for sequence in ready:
            plan, most = wishes[id(sequence)], ahead.most(sequence)
            if not self._blocks.grow(sequence, plan, most):
                return False
            if not self._blocks.holds(sequence, plan, sequence.cache_len + most):
                return False
        return True

    def _take_ahead(self, ready: list[Sequence], granted: Mapping[int, SpecPlan]) -> None:
        """Blocks for several steps, so that tables rarely change."""
        blocks = self._blocks
        for sequence in ready:
            own = granted.get(id(sequence))
            more = min(_AHEAD, sequence.num_tokens_left)
            # not at the cost of somebody's next step
            if own and blocks.missing(sequence, own, more) + len(ready) <= blocks.num_free:
                blocks.grow(sequence, own, more)

    def _grant(self, ready: list[Sequence], wishes: Mapping[int, SpecPlan]) -> dict[int, SpecPlan]:
        """Blocks for everyone's step, by their turns; plainly, or not at all, where they run out.

        Returns:
            the plan of those that still run, by identity.
        """
        blocks = self._blocks
        if not self._looks_ahead and all(
            blocks.holds(sequence, wishes[id(sequence)], sequence.cache_len) for sequence in ready
        ):
            return dict(wishes)
        granted: dict[int, SpecPlan] = {}
        for sequence in sorted(ready, key=turn_of):
            if not sequence.blocks:
                continue  # given up for somebody before it
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
        return granted

    @property
    def _may_look_ahead(self) -> bool:
        """The policy chooses without the results of the last iteration, or can do so late."""
        policy = self.policy
        return not getattr(policy, "needs_results", True) or getattr(policy, "chooses_late", False)

    def hold(self, batch: Batch, pending: PendingBatch) -> None:
        """The batch is queued: until `postprocess`, the blocks of its sequences stay theirs."""
        self.queued.append(Queued(batch, pending))

    def forget_queued(self) -> None:
        """Give up what is queued: the next iteration starts from what was committed.

        To be called after a failure, once the device is done with all of it. Repeating steps is
        safe: they write no row before `cache_len` or `draft_lens` but that of the last
        committed token, as it is, and every row after is written before it is read. A
        sequence between its tokens and its lengths cannot go on and is dropped: see `check`.
        """
        self.queued.clear()
        for sequence in [s for s in self.running if _is_torn(s)]:
            self._torn.append(sequence)
            self._release(sequence)
        self._release_finished()
        self._free_blocks()

    def postprocess(self, batch: Batch, result: RunResult) -> None:
        """Commit what the passes did: lengths, tokens, counters; release requests that ended."""
        if self.queued:
            assert self.queued[0].batch is batch, "batches end in the order of their start"
            self.queued.popleft()
        commit_prefill(batch, result, self.stats, self._left)
        commit_steps(batch, result, self.stats, self._left, self.host_drafts, self._each)
        for sequence in self.running:
            self._blocks.publish(sequence)
        self._release_finished()
        if self._left:
            self._free_blocks()
        if self._whole is not None:
            self._whole.observe_batch(batch, result)

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

    def _prefill_spans(self, plan: SpecPlan, num_step_tokens: int, ahead: LookAhead) -> list[Span]:
        spans = []
        budget = self._prefill_chunk
        longest = budget
        rows_left = self._max_num_seqs * self._max_nodes
        if self._shares_pass and num_step_tokens:
            budget = max(budget - num_step_tokens, budget // _LEAST_PREFILL, 1)
            longest = min(budget, self._window or budget)
        for sequence in self.running:
            if sequence.is_prefilled or budget == 0:
                continue
            start = ahead.prefilled(sequence)
            if start == sequence.prefill_end:
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
                # a draft that lags behind catches up later, before its first step
                known = ahead.drafts_at(sequence, start)
                drafts = tuple(i for i in draft_lens_of(plan) if i in known)
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
        """Free the blocks of those that left, but for those that a queued step still uses."""
        used = {id(s) for batch, _ in self.queued for g in batch.groups for s in g.sequences}
        used |= {id(span.sequence) for batch, _ in self.queued for span in batch.prefill}
        for sequence in [s for s in self._left if id(s) not in used]:
            self._left.remove(sequence)
            self._blocks.release(sequence.blocks)
            sequence.blocks = []


def _is_torn(sequence: Sequence) -> bool:
    """A failure came between the tokens of a sequence and its committed rows, or its end."""
    if sequence.is_finished:
        # counted as the last thing, after its text and its events
        return sequence.stats.num_requests == 0
    return sequence.is_prefilled and len(sequence.token_ids) != sequence.cache_len + 1
