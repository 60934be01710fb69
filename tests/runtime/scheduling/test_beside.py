"""Batches of disjoint requests in flight: who is in the next one, and whose blocks are whose."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Sequence

import pytest

from specc.runtime.scheduling.batch import Batch, StepGroup
from specc.runtime.scheduling.beside import Beside
from specc.runtime.scheduling.request import Request
from specc.runtime.scheduling.scheduler import Scheduler
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF
from tests.runtime.scheduling.test_scheduler import CHAIN, MAX_SEQ_LEN, make_scheduler, run


def requests_of(count: int) -> list[Request]:
    """Requests whose turns are one after the other."""
    ticks = itertools.count()
    return [
        Request(
            str(i), [1, 2, 3], SamplingParams(temperature=0, max_tokens=4), max_seq_len=MAX_SEQ_LEN,
            clock=lambda: float(next(ticks)),
        )
        for i in range(count)
    ]  # fmt: skip


def batch_of(requests: Sequence[Request]) -> Batch:
    return Batch(groups=[StepGroup(OFF, list(requests))])


def test_a_batch_has_an_equal_part_of_those_whose_turn_is_first() -> None:
    a, b, c, d, e = requests_of(5)
    # as they were admitted
    running = [c, a, e, b, d]
    assert Beside(most=1).share(running) == running
    assert Beside(most=2).share(running) == [c, a, b]
    assert Beside([batch_of([a, b, c])], 2).share(running) == [e, d]
    assert Beside([batch_of([a]), batch_of([b, c])], 3).share(running) == [e, d]
    assert Beside([batch_of(running)], 2).share(running) == []
    assert not Beside()
    assert Beside([batch_of([a])])


def test_who_is_in_flight_gives_nothing_up() -> None:
    a, b, c, d = running = requests_of(4)
    assert Beside().gives_way(a, running) is d
    assert Beside([batch_of([d])]).gives_way(a, running) is c
    assert Beside([batch_of([b, d])]).gives_way(a, running) is c


def test_a_request_waits_for_later_ones_in_flight() -> None:
    """Its rows would be computed again, although blocks of another are free soon."""
    a, b, c, d = running = requests_of(4)
    assert Beside([batch_of([d])]).gives_way(c, running) is None
    assert Beside([batch_of([b, c, d])]).gives_way(a, running) is None
    # nobody after it: the others go first
    assert Beside([batch_of([a, b])]).gives_way(d, running) is d
    assert Beside().gives_way(d, running) is d


class Served:
    """Requests that are served with so many batches in flight; every schedule is looked at."""

    def __init__(self, scheduler: Scheduler, most: int) -> None:
        self.scheduler, self.most = scheduler, most
        self.queued: deque[Batch] = deque()
        self.num_beside = self.num_waits = 0

    def iterate(self, num_accepted: int) -> None:
        while len(self.queued) < self.most:
            batch = self.scheduler.schedule(Beside(self.queued, self.most))
            self.check(batch)
            if not batch.requests:
                idle = Beside(self.queued).idle(self.scheduler.running)
                self.num_waits += bool(idle)
                break
            self.scheduler.hold(batch)
            self.num_beside += bool(self.queued)
            self.queued.append(batch)
        assert self.queued, "somebody waits, and nobody runs"
        batch = self.queued.popleft()
        self.scheduler.postprocess(batch, run(batch, num_accepted))

    def check(self, batch: Batch) -> None:
        """All that is in flight has the blocks that it reads and writes, and nobody else has."""
        batches = [*self.queued, batch]
        members = [request for one in batches for request in one.requests]
        assert len({*map(id, members)}) == len(members), "a request is in two batches"
        blocks = [block for request in self.scheduler.running for block in request.blocks]
        assert len({*blocks}) == len(blocks)
        for one in batches:
            for group in one.groups:
                for request in group.requests:
                    assert request in self.scheduler.running, "it was taken away from a stage"
                    rows = request.cache_len + group.plan.num_reached_rows
                    assert rows <= 4 * len(request.blocks), (request.request_id, group.plan.name)
            for span in one.prefill:
                assert span.end <= 4 * len(span.request.blocks)


@pytest.mark.parametrize("most", [2, 3])
def test_blocks_of_trees_in_flight_are_not_trimmed(most: int) -> None:
    """Random loads in caches that are too small: all end, as long as they were to be."""
    num_beside = num_waits = num_preemptions = 0
    for seed in range(30):
        dice = random.Random(seed)
        scheduler, cache = make_scheduler(
            num_blocks=dice.randrange(9, 16), max_num_seqs=5, chunk=6, looks_ahead=False
        )
        served = Served(scheduler, most)
        lengths = {str(i): dice.randrange(2, 16) for i in range(8)}
        requests = []
        while len(requests) < len(lengths) or scheduler.has_work:
            if len(requests) < len(lengths) and dice.random() < 0.5:
                name = str(len(requests))
                params = SamplingParams(temperature=0, max_tokens=lengths[name], ignore_eos=True)
                prompt = [1] * dice.randrange(1, 12)
                requests.append(
                    Request(name, prompt, params, max_seq_len=MAX_SEQ_LEN, num_drafts=1)
                )
                scheduler.add(requests[-1])
            elif scheduler.has_work:
                served.iterate(dice.randrange(CHAIN.max_depth + 1))
        assert [request.num_output_tokens for request in requests] == [*lengths.values()]
        assert cache.allocator.num_free == cache.shape.num_blocks
        num_beside += served.num_beside
        num_waits += served.num_waits
        num_preemptions += scheduler.stats.num_preemptions
    assert num_beside > 100
    assert min(num_waits, num_preemptions) > 3


def test_a_late_request_in_flight_ends_with_the_tokens_of_its_batch() -> None:
    now_s = 0.0
    scheduler, _ = make_scheduler(chunk=100, clock=lambda: now_s)
    requests = [
        Request(
            name, [1, 2, 3], SamplingParams(temperature=0, max_tokens=9),
            max_seq_len=MAX_SEQ_LEN, num_drafts=1,
            clock=lambda: now_s, timeout_s=5.0,
        )
        for name in "ab"
    ]  # fmt: skip
    for request in requests:
        scheduler.add(request)
    first = scheduler.schedule(Beside(most=2))
    scheduler.hold(first)
    now_s = 6.0
    second = scheduler.schedule(Beside([first], 2))
    assert [request.finish_reason for request in requests] == [None, "timeout"]
    assert not second.requests
    scheduler.postprocess(first, run(first))
    assert requests[0].num_output_tokens == 1
    assert not scheduler.schedule(Beside(most=2)).requests
    assert requests[0].finish_reason == "timeout"
