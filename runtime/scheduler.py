"""Continuous batching: who prefills, who steps, and what a pass has changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from specc.errors import RequestError
from specc.metrics import SpecStats
from specc.plans import OFF, SpecPlan
from specc.runtime.host_drafts import HostDrafts
from specc.runtime.kv_cache import KVCache
from specc.runtime.policy import EachPolicy, Policy
from specc.runtime.program import draft_lens_of
from specc.runtime.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from specc.runtime.captured_step import PendingStep
    from specc.runtime.runner import RunResult


@dataclass(frozen=True)
class Span:
    """Tokens start … end - 1 of a sequence, to be fed causally.

    Args:
        drafts: drafts that take the same tokens in the same iteration.
    """

    sequence: Sequence
    start: int
    end: int
    drafts: tuple[int, ...] = ()

    @property
    def is_last(self) -> bool:
        """Ends the prompt, so that its last row yields the first output token."""
        return self.end == self.sequence.num_prompt_tokens


@dataclass(frozen=True)
class StepGroup:
    """Sequences that run one plan's step together.

    Args:
        extra: what the host brings to this step besides rows, see `StepInputs`.
    """

    plan: SpecPlan
    sequences: list[Sequence]
    extra: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """One iteration: at most one prefill pass, then a step for each plan in use."""

    prefill: list[Span] = field(default_factory=list)
    groups: list[StepGroup] = field(default_factory=list)


class Queued(NamedTuple):
    """A batch that the device has, and where its results will be."""

    batch: Batch
    pending: PendingStep


class Scheduler:
    """Admits requests in order of arrival, whenever a slot and blocks are free.

    A request reserves the blocks of its worst case, so none is ever preempted.

    `queued` holds the batches that were queued and not post-processed, in order: blocks of their
    sequences are not free, and `postprocess` takes the oldest one out.

    Args:
        cache: whose blocks sequences own.
        plans: the engine's plans by name, `off` included.
        policy: picks the plan of each step.
        prefill_chunk: tokens of a prefill pass at most.
        position_limit: positions 0 … position_limit - 1 exist in every model; no draft token may
            lie behind them.
    """

    def __init__(
        self,
        cache: KVCache,
        plans: Mapping[str, SpecPlan],
        policy: Policy,
        prefill_chunk: int,
        position_limit: int,
    ) -> None:
        self.stats = SpecStats()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.queued: deque[Queued] = deque()
        self.host_drafts = HostDrafts(plans)
        self._cache = cache
        self._plans = plans
        self._prefill_chunk = prefill_chunk
        self._position_limit = position_limit
        self.use(policy)
        # who left while a queued step held its blocks; and who was dropped, until `abort`
        self._left: list[Sequence] = []
        self._torn: list[Sequence] = []

    def use(self, policy: Policy) -> None:
        """Let this policy choose from the next iteration on."""
        self._policy = policy
        self._each = policy if isinstance(policy, EachPolicy) else None
        self._needs_results = getattr(policy, "needs_results", True)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a request.

        Raises:
            RequestError: it needs more blocks than the cache has.
        """
        needed, available = self._blocks_for(sequence), self._cache.allocator.num_blocks
        if needed > available:
            raise RequestError(
                f"request {sequence.request_id} needs {needed} KV cache blocks",
                f"at most {available}",
                "lower max_tokens, or shorten the prompt",
            )
        self.waiting.append(sequence)

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
        self._admit()
        ready = [sequence for sequence in self.running if sequence.is_prefilled]
        plan = self._plans[self._policy.choose(len(ready), self.stats)]
        groups = self._divide(ready, plan)
        spans = self._prefill_spans(plan) if len(ready) < len(self.running) else []
        return Batch(spans, groups)

    def _divide(self, ready: list[Sequence], plan: SpecPlan) -> list[StepGroup]:
        """Who runs which plan; whoever cannot speculate decodes plainly, in the last group."""
        plans = [plan] * len(ready)
        if ready and self._each is not None:
            plans = [self._plans[name] for name in self._each.choose_each(ready, self.stats)]
        members: dict[str, list[Sequence]] = {}
        plain: list[Sequence] = []
        for sequence, own in zip(ready, plans, strict=True):
            is_plain = not self._speculates(sequence, own)
            (plain if is_plain else members.setdefault(own.name, [])).append(sequence)
        groups = []
        for name, sequences in members.items():
            own = self._plans[name]
            groups.append(StepGroup(own, sequences, self.host_drafts.inputs(own, sequences)))
        return [*groups, StepGroup(OFF, plain)] if plain else groups

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
        if group.sequences != self.running or self._can_admit():
            return False
        most_tokens = group.plan.max_depth + 1
        shape = self._cache.shape
        for sequence in group.sequences:
            cache_len = sequence.cache_len + most_tokens
            # the bonus token has a place in the history, behind the rows of its step
            is_within = cache_len + shape.max_nodes < len(sequence.blocks) * shape.rows_per_block
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
        self._release_finished()
        if self._left:
            self._free_blocks()

    def _commit_prefill(self, batch: Batch, result: RunResult) -> None:
        if batch.prefill:
            self.stats.record_prefill_pass(result.prefill_s)
        for span, token in zip(batch.prefill, result.first_tokens, strict=True):
            sequence = span.sequence
            sequence.stats.record_prefill_pass(result.prefill_s)
            # in front of the first token: without that token, `_is_torn` then tells
            sequence.cache_len = span.end
            for draft in span.drafts:
                sequence.draft_lens[draft] = span.end
            if token is not None:
                sequence.append_first(token, result.first_logprobs.get(sequence.request_id))
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
        while self._can_admit():
            sequence = self.waiting.popleft()
            sequence.admit(self._cache.allocator.allocate(self._blocks_for(sequence)))
            self.running.append(sequence)

    def _can_admit(self) -> bool:
        """There is a slot for the first who waits, and there are blocks."""
        if not self.waiting or len(self.running) >= self._cache.shape.max_num_seqs:
            return False
        return self._blocks_for(self.waiting[0]) <= self._cache.allocator.num_free

    def _prefill_spans(self, plan: SpecPlan) -> list[Span]:
        spans = []
        budget = self._prefill_chunk
        for sequence in self.running:
            start = sequence.cache_len
            if sequence.is_prefilled or budget == 0:
                continue
            end = min(sequence.num_prompt_tokens, start + budget)
            budget -= end - start
            drafts: tuple[int, ...] = ()
            if self._speculates(sequence, plan, sequence.num_prompt_tokens):
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
        is_scored = plan.tile is not None and params.logprobs is not None
        return plan.speculates and params.speculative and fits and suits and not is_scored

    def _blocks_for(self, sequence: Sequence) -> int:
        return self._cache.shape.blocks_for(sequence.num_prompt_tokens, sequence.max_tokens)

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
            self._cache.allocator.free(sequence.blocks)
            sequence.blocks = []


def _is_torn(sequence: Sequence) -> bool:
    """A failure came between the tokens of a sequence and its committed rows, or its end."""
    if sequence.is_finished:
        # counted as the last thing, behind its text and its events
        return sequence.stats.num_requests == 0
    return sequence.is_prefilled and len(sequence.token_ids) != sequence.cache_len + 1
