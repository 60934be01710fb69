"""Blocks that run out, prefixes that are there already, priorities, and deadlines."""

from __future__ import annotations

import random
from typing import Any

import pytest

from specc.drafters.registry import head_draft
from specc.runtime.scheduling.batch import Batch
from specc.runtime.scheduling.request import Request
from specc.runtime.scheduling.request_queue import RequestQueue, turn_of
from specc.runtime.scheduling.scheduler import Scheduler
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF
from tests.runtime.scheduling.test_scheduler import (
    CHAIN,
    MAX_SEQ_LEN,
    advance,
    groups,
    make_scheduler,
    run,
    spans,
)


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def request(name: str, prompt: list[int], clock: Any = None, **options: Any) -> Request:
    extra = {key: options.pop(key) for key in ("priority", "timeout_s") if key in options}
    params = SamplingParams(**{"temperature": 0, "max_tokens": 4, **options})
    if clock is not None:
        extra["clock"] = clock
    return Request(name, prompt, params, max_seq_len=MAX_SEQ_LEN, num_drafts=1, **extra)


def names(requests: Any) -> list[str]:
    return [s.request_id for s in requests]


def test_a_request_without_blocks_takes_them_from_the_last_one() -> None:
    """Two prompts of 2 blocks fill a cache of 5 with what the first needs to grow."""
    scheduler, cache = make_scheduler(num_blocks=5, plan=OFF, chunk=100)
    first = request("a", [1] * 7, max_tokens=10)
    second = request("b", [2] * 6, max_tokens=8)
    scheduler.add(first)
    scheduler.add(second)
    advance(scheduler)
    assert names(scheduler.running) == ["a"], "room is left for the one that runs"
    # it can be admitted after the growth of the first
    while not scheduler.waiting or len(scheduler.running) < 2:
        if first.is_finished:
            break
        advance(scheduler)
    outputs = {}
    while scheduler.has_work:
        advance(scheduler)
    for one in (first, second):
        outputs[one.request_id] = len(one.output_token_ids)
    assert outputs == {"a": 10, "b": 8}
    assert cache.allocator.num_free == 5


def test_preemption_keeps_tokens_and_computes_their_rows_again() -> None:
    scheduler, cache = make_scheduler(num_blocks=8, plan=OFF, chunk=100, max_num_seqs=2)
    first = request("a", [1] * 9, max_tokens=20)
    second = request("b", [2] * 9, max_tokens=9)
    scheduler.add(first)
    scheduler.add(second)
    while not second.stats.num_preemptions:
        advance(scheduler)
        assert sum(len(s.blocks) for s in (first, second)) == 8 - cache.allocator.num_free
        assert first.stats.num_preemptions == 0, "whose turn is last gives way"
    assert scheduler.stats.num_preemptions == 1
    assert second.blocks == []
    assert (second.cache_len, second.draft_lens) == (0, [0])
    kept = list(second.output_token_ids)
    assert kept
    assert names(scheduler.waiting) == ["b"]
    assert groups(advance(scheduler)) == {"off": ["a"]}
    again: list[Batch] = []
    while not second.is_finished:
        batch = advance(scheduler)
        if any(span.request is second for span in batch.prefill):
            again.append(batch)
    (batch,) = again
    # all but the last token, whose row the next step writes; no token is drawn
    assert spans(batch) == [("b", 0, 9 + len(kept) - 1)]
    assert not batch.prefill[0].is_last
    assert second.output_token_ids[: len(kept)] == kept
    assert len(second.output_token_ids) == 9
    assert second.stats.num_first_tokens == 1
    while scheduler.has_work:
        advance(scheduler)
    assert len(first.output_token_ids) == 20
    assert cache.allocator.num_free == 8


def test_speculation_gives_way_before_a_request_does() -> None:
    """One block is left: enough for a plain step of both, not for the nodes of both trees."""
    scheduler, _ = make_scheduler(num_blocks=5, chunk=100)
    first, second = request("a", [1] * 5, max_tokens=6), request("b", [2] * 6, max_tokens=2)
    for one in (first, second):
        scheduler.add(one)
    advance(scheduler)
    assert names(scheduler.running) == ["a", "b"], "2 blocks each"
    batch = scheduler.schedule()
    assert groups(batch) == {"chain-2": ["a"], "off": ["b"]}
    scheduler.postprocess(batch, run(batch))
    assert scheduler.stats.num_preemptions == 0


@pytest.mark.parametrize("seed", range(8))
def test_everyone_ends_however_few_blocks_there_are(seed: int) -> None:
    """Random lengths, priorities and cancellations; the pool is just enough for the largest."""
    dice = random.Random(seed)
    clock = Clock()
    scheduler, cache = make_scheduler(
        num_blocks=9, max_num_seqs=5, chunk=6, clock=clock, shares_prefixes=bool(seed % 2)
    )
    everyone: list[Request] = []
    cancelled: set[str] = set()
    for i in range(40):
        clock.now_s += dice.random()
        prompt = [dice.randrange(3) for _ in range(dice.randint(1, 14))]
        one = request(
            str(i), prompt, clock, max_tokens=dice.randint(1, 18), priority=dice.randrange(3)
        )
        everyone.append(one)
        scheduler.add(one)
        for _ in range(dice.randrange(4)):
            advance(scheduler, dice.randrange(3))
            check_blocks(scheduler, cache, everyone)
        if dice.random() < 0.2:
            victim = dice.choice(everyone)
            if not victim.is_finished:
                cancelled.add(victim.request_id)
                scheduler.abort(victim)
    for _ in range(3000):
        if not scheduler.has_work:
            break
        clock.now_s += 1
        advance(scheduler, dice.randrange(3))
        check_blocks(scheduler, cache, everyone)
    assert not scheduler.has_work
    assert scheduler.stats.num_preemptions > 0
    for one in everyone:
        if one.request_id not in cancelled:
            assert len(one.output_token_ids) == one.max_tokens
    assert cache.allocator.num_free == 9


def check_blocks(scheduler: Scheduler, cache: Any, everyone: list[Request]) -> None:
    """Every block has as many users as requests that list it; what can change has one."""
    held = [block for one in everyone for block in one.blocks]
    assert len(set(held)) == cache.allocator.num_blocks - cache.allocator.num_free
    for one in scheduler.running:
        first_open = one.cache_len // 4
        for block in one.blocks[first_open:]:
            assert held.count(block) == 1
            assert not cache.allocator.has_key(block)
        for i, block in enumerate(one.blocks[:first_open]):
            for other in scheduler.running:
                if block in other.blocks:
                    end = 4 * (i + 1)
                    assert other.blocks.index(block) == i
                    assert other.token_ids[:end] == one.token_ids[:end]


def test_a_prefix_is_found_whole_blocks_at_a_time() -> None:
    scheduler, _ = make_scheduler(chunk=100, shares_prefixes=True, max_num_seqs=3)
    first = request("a", list(range(10)))
    scheduler.add(first)
    advance(scheduler)
    # the same first 9 tokens: two blocks of 4
    second = request("b", [*range(9), 99, 98])
    scheduler.add(second)
    batch = scheduler.schedule()
    assert spans(batch) == [("b", 8, 11)]
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    assert second.draft_lens == [8]
    assert batch.prefill[0].drafts == (0,)
    assert second.stats.num_cached_tokens == scheduler.stats.num_cached_tokens == 8
    assert scheduler.num_looked_up == 21


def test_one_token_of_a_prompt_is_always_fed() -> None:
    scheduler, _ = make_scheduler(chunk=100, shares_prefixes=True)
    scheduler.add(request("a", list(range(8)), max_tokens=8))
    advance(scheduler)
    scheduler.add(request("b", list(range(8))))
    assert spans(scheduler.schedule()) == [("b", 4, 8)]


def test_other_tokens_before_are_another_prefix() -> None:
    scheduler, _ = make_scheduler(chunk=100, shares_prefixes=True)
    scheduler.add(request("a", [7, 7, 7, 7, 1, 2, 3, 4, 5], max_tokens=8))
    advance(scheduler)
    scheduler.add(request("b", [8, 8, 8, 8, 1, 2, 3, 4, 5]))
    assert spans(scheduler.schedule()) == [("b", 0, 9)]


def test_what_follows_the_committed_rows_is_not_published() -> None:
    """A chain of 2 at cache_len 7 reaches into rows 7 … 9: the second block is not full yet."""
    scheduler, cache = make_scheduler(chunk=100, shares_prefixes=True)
    first = request("a", list(range(7)), max_tokens=12)
    scheduler.add(first)
    advance(scheduler)
    batch = scheduler.schedule()
    assert not cache.allocator.has_key(first.blocks[1])
    scheduler.postprocess(batch, run(batch, 0))
    assert first.cache_len == 8
    assert cache.allocator.has_key(first.blocks[1])


def test_a_draft_that_lags_shares_only_what_it_has_seen() -> None:
    scheduler, _ = make_scheduler(chunk=100, shares_prefixes=True, max_num_seqs=4)
    plain = request("a", list(range(10)), speculative=False, max_tokens=10)
    scheduler.add(plain)
    advance(scheduler)
    assert plain.draft_lens == [0]
    second = request("b", list(range(10)), max_tokens=10)
    scheduler.add(second)
    batch = scheduler.schedule()
    assert (second.cache_len, second.draft_lens) == (8, [0])
    # it lags behind where prefill starts, and catches up before its first step
    assert batch.prefill[0].drafts == ()
    scheduler.postprocess(batch, run(batch))
    advance(scheduler)
    assert second.draft_lens == [second.cache_len]
    third = request("c", list(range(10)))
    scheduler.add(third)
    scheduler.schedule()
    assert (third.cache_len, third.draft_lens) == (8, [8])


def test_a_block_of_a_head_is_shared_with_the_token_after_it() -> None:
    """Its last row is made of that token: sequences that go on otherwise do not share it."""
    plan = CHAIN.with_drafters({"draft_0": head_draft(0)})
    scheduler, cache = make_scheduler(chunk=100, shares_prefixes=True, max_num_seqs=4, plan=plan)
    # the first token follows the whole second block: it is known once the prompt is done
    first = request("a", list(range(8)), max_tokens=8)
    scheduler.add(first)
    batch = scheduler.schedule()
    assert not cache.allocator.has_key(first.blocks[1])
    scheduler.postprocess(batch, run(batch))
    assert cache.allocator.has_key(first.blocks[1])
    after = first.token_ids[8]
    for name, token, shared in (("b", after, 8), ("c", after + 1, 4)):
        other = request(name, [*range(8), token, 50])
        scheduler.add(other)
        scheduler.schedule()
        assert (name, other.cache_len, other.draft_lens) == (name, shared, [shared])
    assert other.blocks[1] != first.blocks[1]


def test_prefixes_outlive_their_requests_until_blocks_are_needed() -> None:
    scheduler, cache = make_scheduler(chunk=100, shares_prefixes=True, num_blocks=6)
    scheduler.add(request("a", list(range(9)), max_tokens=1))
    advance(scheduler)
    assert not scheduler.has_work
    assert cache.allocator.num_free == 6
    assert cache.allocator.num_cached == 2
    again = request("b", list(range(9)), max_tokens=1)
    scheduler.add(again)
    advance(scheduler)
    assert again.stats.num_cached_tokens == 8
    scheduler.add(request("c", [9] * 18, max_tokens=1))
    advance(scheduler)
    last = request("d", list(range(9)), max_tokens=1)
    scheduler.add(last)
    advance(scheduler)
    # of the two blocks, the end of the prefix went first
    assert last.stats.num_cached_tokens == 4


def test_a_dense_cache_shares_nothing() -> None:
    scheduler, _ = make_scheduler(chunk=100, shares_prefixes=True, block_size=0)
    scheduler.add(request("a", list(range(10)), max_tokens=8))
    advance(scheduler)
    scheduler.add(request("b", list(range(10))))
    assert spans(scheduler.schedule()) == [("b", 0, 10)]


def test_turns_follow_priority_and_nobody_waits_for_ever() -> None:
    clock, queue = Clock(), RequestQueue()
    late = request("late", [1], clock, priority=1)
    queue.add(late)
    clock.now_s = 1.0
    queue.add(request("soon", [1], clock))
    queue.add(request("next", [1], clock))
    clock.now_s = 2.0
    queue.add(request("urgent", [1], clock, priority=-1))
    assert names(queue) == ["urgent", "soon", "next", "late"]
    clock.now_s = 11.0
    queue.add(request("newer", [1], clock))
    assert names(queue) == ["urgent", "soon", "next", "late", "newer"]
    back = queue.pop()
    queue.remove(late)
    queue.add_again(back)
    assert names(queue) == ["urgent", "soon", "next", "newer"]
    assert late not in queue
    assert turn_of(back) == -8.0


def test_a_request_that_gives_way_is_before_equal_turns_again() -> None:
    clock, queue = Clock(), RequestQueue()
    first, second, third = (request(name, [1], clock) for name in "abc")
    queue.add(second)
    queue.add(third)
    queue.add_again(first)
    assert names(queue) == ["a", "b", "c"]
    scheduler, _ = make_scheduler(plan=OFF, max_num_seqs=1)
    scheduler.add(first)
    scheduler.add(second)
    advance(scheduler)
    scheduler._preempt(first)
    assert names(scheduler.waiting) == ["a", "b"]


def test_rows_that_are_computed_again_yield_no_first_token() -> None:
    """A chunk that happens to end where the prompt does, of a request that has output."""
    scheduler, _ = make_scheduler(plan=OFF, chunk=6)
    one = request("a", [1] * 6, max_tokens=8)
    scheduler.add(one)
    for _ in range(4):
        advance(scheduler)
    assert len(one.output_token_ids) == 4
    scheduler._preempt(one)
    batch = advance(scheduler)
    assert spans(batch) == [("a", 0, 6)]
    assert not batch.prefill[0].is_last
    assert len(one.output_token_ids) == 4


def test_deadlines_end_requests_that_wait_and_that_run() -> None:
    clock = Clock()
    scheduler, _ = make_scheduler(chunk=100, max_num_seqs=1, clock=clock)
    runs = request("a", [1] * 4, clock, max_tokens=20, timeout_s=5.0)
    waits = request("b", [1] * 4, clock, timeout_s=4.0)
    other = request("c", [1] * 4, clock)
    for one in (runs, waits, other):
        scheduler.add(one)
    advance(scheduler)
    batch = scheduler.schedule()
    scheduler.hold(batch)
    clock.now_s = 4.0
    scheduler.postprocess(batch, run(batch))
    scheduler.schedule()
    assert (waits.finish_reason, waits.stats.num_requests) == ("timeout", 1)
    assert names(scheduler.running) == ["a"]
    clock.now_s = 5.0
    batch = scheduler.schedule()
    assert runs.finish_reason == "timeout"
    assert runs.output_token_ids == [9, 9]
    assert runs.blocks == []
    assert spans(batch) == [("c", 0, 4)]
    assert scheduler.stats.num_requests == 2


def test_looking_ahead_waits_for_a_deadline() -> None:
    clock = Clock()
    scheduler, _ = make_scheduler(chunk=100, clock=clock)
    scheduler.add(request("a", [1] * 4, clock, max_tokens=20, timeout_s=5.0))
    advance(scheduler)
    batch = scheduler.schedule()
    scheduler.hold(batch)
    assert scheduler.schedule_ahead([batch]) is not None
    clock.now_s = 5.0
    assert scheduler.schedule_ahead([batch]) is None


def test_prompts_and_steps_share_a_pass() -> None:
    scheduler, _ = make_scheduler(chunk=16, shares_pass=True, max_num_seqs=3)
    scheduler.add(request("a", [1] * 4, max_tokens=20))
    scheduler.add(request("b", [2] * 4, max_tokens=20))
    advance(scheduler)
    scheduler.add(request("c", [3] * 24))
    batch = scheduler.schedule()
    # two chains of 2 are 6 nodes
    assert groups(batch) == {"chain-2": ["a", "b"]}
    assert spans(batch) == [("c", 0, 10)]
    assert CHAIN.num_nodes == 3


def test_steps_never_stop_a_prompt() -> None:
    scheduler, _ = make_scheduler(chunk=8, shares_pass=True, max_num_seqs=4)
    for name in "abc":
        scheduler.add(request(name, [1] * 2, max_tokens=20))
    advance(scheduler)
    scheduler.add(request("d", [3] * 4))
    assert spans(scheduler.schedule()) == [("d", 0, 1)]


def test_a_prefix_of_a_draft_ends_where_one_block_lacks_it() -> None:
    """Two requests had the same first block: the one that others find has no rows of the draft."""
    scheduler, cache = make_scheduler(chunk=100, shares_prefixes=True, max_num_seqs=4)
    plain = request("a", list(range(5)), speculative=False, max_tokens=10)
    fed = request("b", list(range(9)), max_tokens=10)
    # both are admitted before either has committed anything
    scheduler.add(plain)
    scheduler.add(fed)
    advance(scheduler)
    assert fed.blocks[0] != plain.blocks[0]
    assert cache.allocator.drafts_of(plain.blocks[0]) == 0
    assert cache.allocator.drafts_of(fed.blocks[1]) == 1
    third = request("c", list(range(9)))
    scheduler.add(third)
    scheduler.schedule()
    assert third.blocks[:2] == [plain.blocks[0], fed.blocks[1]]
    assert (third.cache_len, third.draft_lens) == (8, [0])


def test_steps_in_a_row_leave_a_block_for_everybody() -> None:
    """Blocks of 4 rows: what is free for more steps is taken, but not what a next step needs."""
    scheduler, cache = make_scheduler(
        num_blocks=8, plan=OFF, chunk=100, max_num_seqs=2, looks_ahead=False
    )
    first = request("a", [1] * 5, max_tokens=18)
    scheduler.add(first)
    advance(scheduler)
    batch = scheduler.schedule()
    taken = cache.allocator.allocate(cache.allocator.num_free - 1)
    size = cache.shape.rows_per_block

    def steps_held() -> int:
        return 1 + len(first.blocks) * size - first.cache_len - OFF.num_reached_rows

    count = scheduler.steps_in_a_row(batch, 12)
    assert cache.allocator.num_free == 1
    assert count == steps_held() < 12
    cache.allocator.free(taken[:3])
    more = scheduler.steps_in_a_row(batch, 12)
    assert cache.allocator.num_free >= 1
    assert more == min(12, steps_held()) > count
