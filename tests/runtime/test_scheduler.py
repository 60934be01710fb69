"""Admission, chunked prefill, plan groups, and the bookkeeping after a pass."""

from __future__ import annotations

import pytest
import torch

from specc.config import OFF, SamplingParams, SpecPlan
from specc.errors import RequestError
from specc.runtime.kv_cache import BlockAllocator, CacheShape, KVCache
from specc.runtime.policy import FixedPolicy
from specc.runtime.runner import RunResult, StepResult
from specc.runtime.scheduler import Batch, Scheduler
from specc.runtime.sequence import Sequence

CHAIN = SpecPlan.from_widths([1, 1])
MAX_SEQ_LEN = 32


def make_scheduler(
    *, max_num_seqs: int = 2, chunk: int = 8, plan: SpecPlan = CHAIN, limit: int = MAX_SEQ_LEN
) -> tuple[Scheduler, KVCache]:
    shape = CacheShape(MAX_SEQ_LEN, max_nodes=3, block_size=4, max_num_seqs=max_num_seqs)
    cache = KVCache(shape, {}, torch.float32)
    plans = {OFF.name: OFF, CHAIN.name: CHAIN}
    return Scheduler(cache, plans, FixedPolicy(plan.name), chunk, limit), cache


def make_sequence(name: str, num_prompt: int = 4, **params) -> Sequence:
    sampling = SamplingParams(**{"max_tokens": 4, **params})
    prompt = list(range(num_prompt))
    return Sequence(name, prompt, sampling, max_seq_len=MAX_SEQ_LEN, num_drafts=1)


def run(batch: Batch, num_accepted: int = 0) -> RunResult:
    """What a runner would return whose target always says token 9."""
    steps = []
    for group in batch.groups:
        accepted = num_accepted if group.plan.widths else 0
        width = len(group.plan.widths) + 1
        output = [9] * (accepted + 1) + [-1] * (width - accepted - 1)
        lens = [s.cache_len + accepted + 1 for s in group.sequences]
        drafts = {0: lens} if group.plan.widths else {}
        count = len(group.sequences)
        steps.append(
            StepResult([accepted] * count, [output] * count, lens, drafts, {"verify": 0.1})
        )
    return RunResult([9 if span.is_last else None for span in batch.prefill], 0.5, steps)


def advance(scheduler: Scheduler, num_accepted: int = 0) -> Batch:
    batch = scheduler.schedule()
    scheduler.postprocess(batch, run(batch, num_accepted))
    return batch


def spans(batch: Batch) -> list[tuple[str, int, int]]:
    return [(span.sequence.request_id, span.start, span.end) for span in batch.prefill]


def groups(batch: Batch) -> dict[str, list[str]]:
    return {g.plan.name: [s.request_id for s in g.sequences] for g in batch.groups}


def test_admission_is_first_come_first_served() -> None:
    scheduler, _ = make_scheduler(chunk=100)
    for name in "abcd":
        scheduler.add(make_sequence(name, max_tokens=2 if name == "b" else 4))
    assert spans(advance(scheduler)) == [("a", 0, 4), ("b", 0, 4)]
    # b ends here; c joins while a goes on
    assert groups(advance(scheduler)) == {"chain-2": ["a", "b"]}
    batch = advance(scheduler)
    assert spans(batch) == [("c", 0, 4)]
    assert groups(batch) == {"chain-2": ["a"]}


def test_head_of_the_queue_waits_for_blocks_and_is_not_overtaken() -> None:
    scheduler, cache = make_scheduler(max_num_seqs=3)
    cache.allocator = BlockAllocator(8)
    # 4 + 4 tokens and 3 nodes: 3 blocks; 20 + 4 tokens and 3 nodes: 7 blocks
    for name, size in (("a", 4), ("big", 20), ("c", 4)):
        scheduler.add(make_sequence(name, size))
    scheduler.schedule()
    assert [s.request_id for s in scheduler.running] == ["a"]
    assert cache.allocator.num_free == 5
    assert [s.request_id for s in scheduler.waiting] == ["big", "c"]


def test_request_larger_than_the_cache_is_refused() -> None:
    scheduler, cache = make_scheduler()
    cache.allocator = BlockAllocator(2)
    with pytest.raises(RequestError, match="needs 3 KV cache blocks"):
        scheduler.add(make_sequence("a"))
    assert not scheduler.has_work


def test_prefill_is_chunked_over_sequences() -> None:
    scheduler, _ = make_scheduler(chunk=8, max_num_seqs=3)
    for name, size in (("a", 5), ("b", 12), ("c", 2)):
        scheduler.add(make_sequence(name, size))
    batches = [advance(scheduler) for _ in range(3)]
    assert [spans(batch) for batch in batches] == [
        [("a", 0, 5), ("b", 0, 3)],
        [("b", 3, 11)],
        [("b", 11, 12), ("c", 0, 2)],
    ]
    # prefill never holds up who is ready
    assert [groups(batch) for batch in batches] == [{}, {"chain-2": ["a"]}, {"chain-2": ["a"]}]


def test_plain_requests_run_the_off_plan() -> None:
    scheduler, _ = make_scheduler(chunk=100)
    scheduler.add(make_sequence("a"))
    scheduler.add(make_sequence("b", speculative=False))
    batch = advance(scheduler)
    assert [span.drafts for span in batch.prefill] == [(0,), ()]
    assert groups(advance(scheduler)) == {"chain-2": ["a"], "off": ["b"]}


@pytest.mark.parametrize(("num_prompt", "plan"), [(29, "chain-2"), (30, "off")])
def test_no_node_lies_behind_the_last_position(num_prompt: int, plan: str) -> None:
    """Root at num_prompt, deepest node at num_prompt + 2; positions end at 31."""
    scheduler, _ = make_scheduler(chunk=100)
    scheduler.add(make_sequence("a", num_prompt, max_tokens=10))
    batch = advance(scheduler)
    assert batch.prefill[0].drafts == ((0,) if plan == "chain-2" else ())
    assert groups(advance(scheduler)) == {plan: ["a"]}


def test_a_draft_of_a_smaller_context_limits_speculation_only() -> None:
    scheduler, _ = make_scheduler(limit=8)
    scheduler.add(make_sequence("a", 5, max_tokens=4))
    advance(scheduler)
    assert groups(advance(scheduler)) == {"chain-2": ["a"]}
    assert groups(advance(scheduler)) == {"off": ["a"]}


def test_lengths_follow_the_passes() -> None:
    scheduler, _ = make_scheduler(chunk=3)
    sequence = make_sequence("a", 4, max_tokens=10)
    scheduler.add(sequence)
    advance(scheduler)
    assert (sequence.cache_len, sequence.draft_lens) == (3, [3])
    assert sequence.output_token_ids == []
    advance(scheduler)
    assert (sequence.cache_len, sequence.draft_lens) == (4, [4])
    assert sequence.output_token_ids == [9]
    advance(scheduler, num_accepted=2)
    assert (sequence.cache_len, sequence.draft_lens) == (7, [7])
    assert len(sequence.token_ids) == sequence.cache_len + 1


def test_a_draft_that_lags_behind_is_not_fed_a_later_chunk() -> None:
    scheduler, _ = make_scheduler(chunk=2)
    sequence = make_sequence("a", 4)
    scheduler.add(sequence)
    advance(scheduler)
    sequence.draft_lens = [0]
    assert advance(scheduler).prefill[0].drafts == ()


def test_trimmed_tokens_are_counted_and_dropped() -> None:
    scheduler, _ = make_scheduler()
    sequence = make_sequence("a", max_tokens=3)
    scheduler.add(sequence)
    advance(scheduler)
    advance(scheduler, num_accepted=2)
    assert sequence.output_token_ids == [9, 9, 9]
    assert sequence.is_finished
    for stats in (sequence.stats, scheduler.stats):
        assert stats.num_trimmed_tokens == 1
        assert stats.num_output_tokens == 3
        assert stats.mean_acceptance_length == 2.0
        assert stats.num_requests == 1
        assert stats.num_prompt_tokens == 4
        assert (stats.num_prefill_passes, stats.num_step_passes) == (1, 1)
        assert stats.prefill_s == 0.5


def test_engine_counts_a_shared_pass_once() -> None:
    scheduler, _ = make_scheduler(chunk=100)
    sequences = [make_sequence(name) for name in "ab"]
    for sequence in sequences:
        scheduler.add(sequence)
    advance(scheduler)
    advance(scheduler)
    assert scheduler.stats.num_step_passes == scheduler.stats.num_prefill_passes == 1
    assert scheduler.stats.num_steps == 2
    assert scheduler.stats.verify_s == pytest.approx(0.1)
    assert [s.stats.verify_s for s in sequences] == pytest.approx([0.1, 0.1])


def test_blocks_come_back() -> None:
    scheduler, cache = make_scheduler(chunk=100)
    total = cache.allocator.num_free
    sequences = [make_sequence(name) for name in "abc"]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.schedule()
    scheduler.abort(sequences[0])
    scheduler.abort(sequences[2])
    scheduler.abort(sequences[2])
    assert [s.request_id for s in scheduler.running] == ["b"]
    while scheduler.has_work:
        advance(scheduler)
    assert cache.allocator.num_free == total
    assert scheduler.stats.num_requests == 1
    scheduler.abort(sequences[1])
