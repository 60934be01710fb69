"""Admission, chunked prefill, plan groups, and the bookkeeping after a pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from specc.errors import RequestError
from specc.runtime.backends.step_io import StepResult
from specc.runtime.policies.base import FixedPolicy
from specc.runtime.scheduling.batch import Batch, RunResult
from specc.runtime.scheduling.kv_cache import CacheShape, KVCache
from specc.runtime.scheduling.request import Request
from specc.runtime.scheduling.scheduler import Scheduler
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, SpecPlan

CHAIN = SpecPlan.from_widths([1, 1])
MAX_SEQ_LEN = 32


def make_scheduler(
    *,
    max_num_seqs: int = 2,
    chunk: int = 8,
    plan: SpecPlan = CHAIN,
    limit: int = MAX_SEQ_LEN,
    num_blocks: int | None = None,
    block_size: int = 4,
    **options: Any,
) -> tuple[Scheduler, KVCache]:
    shape = CacheShape(MAX_SEQ_LEN, 3, block_size, max_num_seqs, num_blocks)
    cache = KVCache(shape, {}, torch.float32)
    plans = {OFF.name: OFF, CHAIN.name: CHAIN, plan.name: plan}
    policy = FixedPolicy(plan.name)
    options = {"shares_prefixes": False} | options
    return Scheduler(cache, plans, policy, chunk, limit, **options), cache


def make_request(name: str, num_prompt: int = 4, **params) -> Request:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 4, **params})
    prompt = list(range(num_prompt))
    return Request(name, prompt, sampling, max_seq_len=MAX_SEQ_LEN, num_drafts=1)


def run(batch: Batch, num_accepted: int = 0) -> RunResult:
    """What a runner would return whose target always says token 9."""
    steps = []
    for group in batch.groups:
        accepted = num_accepted if group.plan.widths else 0
        width = len(group.plan.widths) + 1
        output = [9] * (accepted + 1) + [-1] * (width - accepted - 1)
        lens = [s.cache_len + accepted + 1 for s in group.requests]
        drafts = {0: lens} if group.plan.widths else {}
        count = len(group.requests)
        steps.append(
            StepResult([accepted] * count, [output] * count, lens, drafts, {"verify": 0.1})
        )
    return RunResult([9 if span.is_last else None for span in batch.prefill], 0.5, steps)


def advance(scheduler: Scheduler, num_accepted: int = 0) -> Batch:
    batch = scheduler.schedule()
    scheduler.postprocess(batch, run(batch, num_accepted))
    return batch


def spans(batch: Batch) -> list[tuple[str, int, int]]:
    return [(span.request.request_id, span.start, span.end) for span in batch.prefill]


def groups(batch: Batch) -> dict[str, list[str]]:
    return {g.plan.name: [s.request_id for s in g.requests] for g in batch.groups}


def test_admission_is_first_come_first_served() -> None:
    scheduler, _ = make_scheduler(chunk=100)
    for name in "abcd":
        scheduler.add(make_request(name, max_tokens=2 if name == "b" else 4))
    assert spans(advance(scheduler)) == [("a", 0, 4), ("b", 0, 4)]
    # b ends here; c joins while a goes on
    assert groups(advance(scheduler)) == {"chain-2": ["a", "b"]}
    batch = advance(scheduler)
    assert spans(batch) == [("c", 0, 4)]
    assert groups(batch) == {"chain-2": ["a"]}


def test_head_of_the_queue_waits_for_blocks_and_is_not_overtaken() -> None:
    scheduler, cache = make_scheduler(max_num_seqs=3, num_blocks=8)
    # 4 tokens and 2 rows: 2 blocks; 20 tokens and 2 rows: 6 blocks, and one that a may still need
    for name, size in (("a", 4), ("big", 20), ("c", 4)):
        scheduler.add(make_request(name, size))
    assert scheduler.schedule().num_unfinished == 3
    assert [s.request_id for s in scheduler.running] == ["a"]
    assert cache.allocator.num_free == 6
    assert [s.request_id for s in scheduler.waiting] == ["big", "c"]


def test_request_larger_than_the_cache_is_refused() -> None:
    scheduler, _ = make_scheduler(num_blocks=2)
    with pytest.raises(RequestError, match="needs 3 KV cache blocks"):
        scheduler.add(make_request("a"))
    assert not scheduler.has_work


def test_prefill_is_chunked_over_sequences() -> None:
    scheduler, _ = make_scheduler(chunk=8, max_num_seqs=3)
    for name, size in (("a", 5), ("b", 12), ("c", 2)):
        scheduler.add(make_request(name, size))
    batches = [advance(scheduler) for _ in range(3)]
    assert [spans(batch) for batch in batches] == [
        [("a", 0, 5), ("b", 0, 3)],
        [("b", 3, 11)],
        [("b", 11, 12), ("c", 0, 2)],
    ]
    # prefill never holds up requests that are ready
    assert [groups(batch) for batch in batches] == [{}, {"chain-2": ["a"]}, {"chain-2": ["a"]}]


def test_plain_requests_run_the_off_plan() -> None:
    scheduler, _ = make_scheduler(chunk=100)
    scheduler.add(make_request("a"))
    scheduler.add(make_request("b", speculative=False))
    batch = advance(scheduler)
    assert [span.drafts for span in batch.prefill] == [(0,), ()]
    assert groups(advance(scheduler)) == {"chain-2": ["a"], "off": ["b"]}


@pytest.mark.parametrize(("num_prompt", "plan"), [(29, "chain-2"), (30, "off")])
def test_no_node_lies_beyond_the_last_position(num_prompt: int, plan: str) -> None:
    """Root at num_prompt, deepest node at num_prompt + 2; positions end at 31."""
    scheduler, _ = make_scheduler(chunk=100)
    scheduler.add(make_request("a", num_prompt, max_tokens=10))
    batch = advance(scheduler)
    assert batch.prefill[0].drafts == ((0,) if plan == "chain-2" else ())
    assert groups(advance(scheduler)) == {plan: ["a"]}


def test_a_draft_of_a_smaller_context_limits_speculation_only() -> None:
    scheduler, _ = make_scheduler(limit=8)
    scheduler.add(make_request("a", 5, max_tokens=4))
    advance(scheduler)
    assert groups(advance(scheduler)) == {"chain-2": ["a"]}
    assert groups(advance(scheduler)) == {"off": ["a"]}


def test_lengths_follow_the_passes() -> None:
    scheduler, _ = make_scheduler(chunk=3)
    request = make_request("a", 4, max_tokens=10)
    scheduler.add(request)
    advance(scheduler)
    assert (request.cache_len, request.draft_lens) == (3, [3])
    assert request.output_token_ids == []
    advance(scheduler)
    assert (request.cache_len, request.draft_lens) == (4, [4])
    assert request.output_token_ids == [9]
    advance(scheduler, num_accepted=2)
    assert (request.cache_len, request.draft_lens) == (7, [7])
    assert len(request.token_ids) == request.cache_len + 1


def test_a_draft_that_lags_behind_is_not_fed_a_later_chunk() -> None:
    scheduler, _ = make_scheduler(chunk=2)
    request = make_request("a", 4)
    scheduler.add(request)
    advance(scheduler)
    request.draft_lens = [0]
    assert advance(scheduler).prefill[0].drafts == ()


def test_trimmed_tokens_are_counted_and_dropped() -> None:
    scheduler, _ = make_scheduler()
    request = make_request("a", max_tokens=3)
    scheduler.add(request)
    advance(scheduler)
    advance(scheduler, num_accepted=2)
    assert request.output_token_ids == [9, 9, 9]
    assert request.is_finished
    for stats in (request.stats, scheduler.stats):
        assert stats.num_trimmed_tokens == 1
        assert stats.num_output_tokens == 3
        assert stats.mean_acceptance_length == 2.0
        assert stats.num_requests == 1
        assert stats.num_prompt_tokens == 4
        assert (stats.num_prefill_passes, stats.num_step_passes) == (1, 1)
        assert stats.prefill_s == 0.5


def test_engine_counts_a_shared_pass_once() -> None:
    scheduler, _ = make_scheduler(chunk=100)
    requests = [make_request(name) for name in "ab"]
    for request in requests:
        scheduler.add(request)
    advance(scheduler)
    advance(scheduler)
    assert scheduler.stats.num_step_passes == scheduler.stats.num_prefill_passes == 1
    assert scheduler.stats.num_steps == 2
    assert scheduler.stats.verify_s == pytest.approx(0.1)
    assert [s.stats.verify_s for s in requests] == pytest.approx([0.1, 0.1])


def test_blocks_come_back() -> None:
    scheduler, cache = make_scheduler(chunk=100)
    total = cache.allocator.num_free
    requests = [make_request(name) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    scheduler.schedule()
    scheduler.abort(requests[0])
    scheduler.abort(requests[2])
    scheduler.abort(requests[2])
    assert [s.request_id for s in scheduler.running] == ["b"]
    while scheduler.has_work:
        advance(scheduler)
    assert cache.allocator.num_free == total
    assert scheduler.stats.num_requests == 1
    scheduler.abort(requests[1])


def running(scheduler: Scheduler, *requests: Request) -> Batch:
    """Admit and prefill; returns the first batch of steps, queued."""
    for request in requests:
        scheduler.add(request)
    advance(scheduler)
    batch = scheduler.schedule()
    assert not batch.prefill
    scheduler.hold(batch)
    return batch


def test_blocks_in_flight_stay_taken_and_rows_of_a_request_that_left_are_dropped() -> None:
    scheduler, cache = make_scheduler(chunk=100)
    ends, goes_on = make_request("a", max_tokens=4), make_request("b", max_tokens=20)
    batch = running(scheduler, ends, goes_on)
    scheduler.hold(batch)
    free = cache.allocator.num_free
    scheduler.postprocess(batch, run(batch, 2))
    assert ends.is_finished
    assert scheduler.running == [goes_on]
    assert cache.allocator.num_free == free
    assert len(ends.blocks) == 3
    scheduler.postprocess(batch, run(batch, 2))
    assert cache.allocator.num_free == free + 3
    assert ends.blocks == []
    assert len(ends.output_token_ids) == 4
    assert ends.stats.num_steps == 1
    assert len(goes_on.output_token_ids) == 7
    assert (scheduler.stats.num_steps, scheduler.stats.num_step_passes) == (3, 2)


def test_a_step_whose_rows_are_all_dropped_is_not_counted() -> None:
    scheduler, cache = make_scheduler()
    request = make_request("a", max_tokens=20)
    batch = running(scheduler, request)
    before = dataclasses.asdict(scheduler.stats)
    scheduler.abort(request)
    assert request.blocks
    scheduler.postprocess(batch, run(batch, 2))
    assert dataclasses.asdict(scheduler.stats) == before
    assert not scheduler.has_work
    assert cache.allocator.num_free == cache.allocator.num_blocks


def test_what_is_forgotten_starts_from_what_was_committed() -> None:
    """Two steps were queued; one row of the first was committed, and one request has left."""
    scheduler, cache = make_scheduler(chunk=100, max_num_seqs=3)
    requests = [make_request(name, max_tokens=20) for name in "abc"]
    batch = running(scheduler, *requests)
    scheduler.hold(batch)
    total = cache.allocator.num_blocks
    scheduler.abort(requests[2])
    assert requests[2].blocks
    first = run(batch, 2)

    class Stop(Exception):
        pass

    def fail(*_: object) -> int:
        raise Stop

    requests[1].append = fail  # type: ignore[method-assign]
    with pytest.raises(Stop):
        scheduler.postprocess(batch, first)
    del requests[1].append
    scheduler.recover()
    assert requests[2].blocks == []
    assert [(s.cache_len, s.draft_lens) for s in requests[:2]] == [(7, [7]), (4, [4])]
    scheduler.check(requests)
    assert groups(scheduler.schedule()) == {"chain-2": ["a", "b"]}
    for request in requests[:2]:
        scheduler.abort(request)
    assert cache.allocator.num_free == total


def test_a_request_that_ended_when_another_failed_is_released() -> None:
    scheduler, cache = make_scheduler(chunk=100)
    ends, goes_on = make_request("a", max_tokens=4), make_request("b", max_tokens=20)
    batch = running(scheduler, ends, goes_on)
    with pytest.raises(IndexError):
        scheduler.postprocess(batch, dataclasses.replace(run(batch, 2), steps=[half(batch)]))
    assert ends.is_finished
    scheduler.recover()
    assert scheduler.running == [goes_on]
    assert ends.blocks == []
    assert scheduler.stats.num_requests == 1
    scheduler.abort(goes_on)
    assert cache.allocator.num_free == cache.allocator.num_blocks


def half(batch: Batch) -> StepResult:
    """Results of the first request alone."""
    (step,) = run(batch, 2).steps
    return step._replace(num_accepted=step.num_accepted[:1])


def test_a_torn_request_is_dropped_until_its_caller_knows() -> None:
    scheduler, cache = make_scheduler(chunk=100)
    requests = [make_request(name, max_tokens=20) for name in "ab"]
    running(scheduler, *requests)
    requests[0].append([9])
    scheduler.recover()
    assert scheduler.running == [requests[1]]
    scheduler.check(requests[1:])
    with pytest.raises(RequestError, match="request a was interrupted"):
        scheduler.check(requests)
    for request in requests:
        scheduler.abort(request)
    scheduler.check(requests)
    assert cache.allocator.num_free == cache.allocator.num_blocks


def test_a_prompt_without_its_first_token_is_torn() -> None:
    scheduler, _ = make_scheduler(chunk=100)
    request = make_request("a")
    scheduler.add(request)
    batch = scheduler.schedule()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    request.append_first = fail  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        scheduler.postprocess(batch, run(batch))
    scheduler.recover()
    assert not scheduler.has_work
    with pytest.raises(RequestError, match="request a was interrupted"):
        scheduler.check([request])
