"""What an iteration has done, taken over by its requests: lengths, tokens, counters."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from specc.errors import EngineError
from specc.runtime.drafters.host_drafts import HostDrafts
from specc.runtime.policies.base import Policy
from specc.runtime.scheduling.batch import Batch, RunResult
from specc.runtime.scheduling.plan_counts import PlanCounts
from specc.runtime.scheduling.request import Request
from specc.speculation.metrics import SpecStats


def commit_prefill(
    batch: Batch, result: RunResult, stats: SpecStats, left: Collection[Request]
) -> None:
    """Take over what passes over prompts have done.

    Args:
        left: whose rows are dropped: they left while the batch was in flight.
    """
    rows = zip(batch.prefill, result.first_tokens, strict=True)
    rows_left = [(span, token) for span, token in rows if span.request not in left]
    if rows_left:
        stats.record_prefill_pass(result.prefill_s)
    for span, token in rows_left:
        request = span.request
        request.stats.record_prefill_pass(result.prefill_s)
        if (scored := result.prompt_logprobs.get(request.request_id)) is not None:
            # a request that was preempted in its prompt has these already
            request.prompt_logprobs[span.start :] = scored
        # before the first token: without that token, `Scheduler` then tells that it is torn
        request.cache_len = span.end
        for draft in span.drafts:
            request.draft_lens[draft] = span.end
        if token is not None:
            request.append_first(token, result.first_logprobs.get(request.request_id))
            if request.has_output:
                stats.record_first_token(request.stats.first_token_s)
            stats.num_prompt_tokens += request.num_prompt_tokens


def commit_votes(result: RunResult, left: Collection[Request]) -> None:
    """Take over what queries say about the blocks of their requests.

    Args:
        left: see `commit_prefill`.
    """
    for vote in result.votes:
        if vote.request not in left:
            vote.request.block_choice.add(vote.mass, vote.num_voters, vote.length)


def commit_steps(
    batch: Batch,
    result: RunResult,
    stats: SpecStats,
    plan_counts: PlanCounts,
    left: Collection[Request],
    host_drafts: HostDrafts,
    policy: Policy,
) -> None:
    """Take over what the steps of all groups have done.

    Args:
        left: see `commit_prefill`.
        host_drafts: learn from steps whose rows all count.
        policy: likewise.
    """
    no_logprobs: list[None] = [None] * len(result.steps)
    logprobs = result.logprobs or no_logprobs
    num_together = sum(len(group.requests) for group in batch.groups)
    for group, step, scores in zip(batch.groups, result.steps, logprobs, strict=True):
        rows = [(i, s) for i, s in enumerate(group.requests) if s not in left]
        if not rows:
            continue
        stats.record_step_pass(step.stage_s)
        of_plan = plan_counts.begin(group.plan.name, len(rows), num_together)
        if len(rows) == len(group.requests):
            host_drafts.observe(group.plan, group.requests, group.extra, step)
        for i, request in rows:
            num_accepted = step.num_accepted[i]
            cache_len = request.cache_len + num_accepted + 1
            if not 0 <= num_accepted <= group.plan.max_depth or step.next_cache_len[i] != cache_len:
                raise EngineError(
                    f"a step of plan {group.plan.name} that accepted {num_accepted} tokens and set"
                    f" the cache's length from {request.cache_len} to {step.next_cache_len[i]}",
                    f"0 to {group.plan.max_depth} accepted tokens, and a cache that is longer by"
                    " one more than these",
                    "compile the engine again",
                )
            tokens = step.output_tokens[i][: num_accepted + 1]
            num_emitted = request.append(tokens, scores[i] if scores else None)
            request.cache_len = step.next_cache_len[i]
            # a draft whose length is not moved any more would catch up
            for draft, lengths in step.draft_lens.items():
                request.draft_lens[draft] = lengths[i]
            levels = group.levels(i)
            for counters in (request.stats, stats, of_plan):
                counters.record_step(levels, num_accepted, num_emitted)
                if group.predicts and request.prediction and request.prediction.proposed:
                    proposed = request.prediction.proposed
                    num_same = _num_same(proposed, tokens[:num_accepted])
                    counters.record_prediction_step(
                        len(proposed), num_same, num_accepted, num_emitted
                    )
            request.stats.record_step_pass(step.stage_s)
        # what a prediction had says nothing of what the policy's plans are worth
        if len(rows) == len(group.requests) and not group.predicts:
            policy.observe(group, step)


def _num_same(proposed: Sequence[int], tokens: Sequence[int]) -> int:
    """Tokens that two begin with alike."""
    pairs = zip(proposed, tokens, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
