"""What an iteration has done, taken over by its sequences: lengths, tokens, counters."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from specc.runtime.drafts.host_drafts import HostDrafts
from specc.runtime.policies.base import EachPolicy
from specc.runtime.scheduling.batch import Batch
from specc.runtime.scheduling.sequence import Sequence
from specc.speculation.metrics import SpecStats

if TYPE_CHECKING:
    from specc.runtime.runner import RunResult


def commit_prefill(
    batch: Batch, result: RunResult, stats: SpecStats, left: Collection[Sequence]
) -> None:
    """Take over what passes over prompts have done.

    Args:
        batch: as it ran.
        result: of it.
        stats: of the engine.
        left: whose rows are dropped: they left while the batch was in flight.
    """
    rows = zip(batch.prefill, result.first_tokens, strict=True)
    rows_left = [(span, token) for span, token in rows if span.sequence not in left]
    if rows_left:
        stats.record_prefill_pass(result.prefill_s)
    for span, token in rows_left:
        sequence = span.sequence
        sequence.stats.record_prefill_pass(result.prefill_s)
        if (scored := result.prompt_logprobs.get(sequence.request_id)) is not None:
            # a sequence that was preempted in its prompt has these already
            sequence.prompt_logprobs[span.start :] = scored
        # before the first token: without that token, `Scheduler` then tells that it is torn
        sequence.cache_len = span.end
        for draft in span.drafts:
            sequence.draft_lens[draft] = span.end
        if token is not None:
            sequence.append_first(token, result.first_logprobs.get(sequence.request_id))
            if sequence.has_output:
                stats.record_first_token(sequence.stats.first_token_s)
            stats.num_prompt_tokens += sequence.num_prompt_tokens


def commit_steps(
    batch: Batch,
    result: RunResult,
    stats: SpecStats,
    left: Collection[Sequence],
    host_drafts: HostDrafts,
    policy: EachPolicy | None,
) -> None:
    """Take over what the steps of all groups have done.

    Args:
        batch: as it ran.
        result: of it.
        stats: of the engine.
        left: see `commit_prefill`.
        host_drafts: learn from steps whose rows all count.
        policy: likewise.
    """
    no_logprobs: list[None] = [None] * len(result.steps)
    logprobs = result.logprobs or no_logprobs
    for group, step, scores in zip(batch.groups, result.steps, logprobs, strict=True):
        rows = [(i, s) for i, s in enumerate(group.sequences) if s not in left]
        if not rows:
            continue
        stats.record_step_pass(step.stage_s)
        if len(rows) == len(group.sequences):
            host_drafts.observe(group.plan, group.sequences, group.extra, step)
        for i, sequence in rows:
            num_accepted = step.num_accepted[i]
            tokens = step.output_tokens[i][: num_accepted + 1]
            num_emitted = sequence.append(tokens, scores[i] if scores else None)
            sequence.cache_len = step.next_cache_len[i]
            # a draft whose length is not moved any more would catch up
            for draft, lengths in step.draft_lens.items():
                sequence.draft_lens[draft] = lengths[i]
            sequence.stats.record_step_pass(step.stage_s)
            for counters in (sequence.stats, stats):
                counters.record_step(group.plan.level_sizes, num_accepted, num_emitted)
        if len(rows) == len(group.sequences) and policy is not None:
            policy.observe(group, step)
