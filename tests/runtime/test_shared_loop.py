"""One `LLM` and its threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from specc.errors import RequestError
from specc.runtime.llm import LLM
from specc.runtime.shared_loop import FairLock, SharedLoop
from specc.sampling.params import SamplingParams

WAIT_S = 60


def in_threads(*works: Callable[[], object]) -> list[object]:
    """What each gives or raises; all begin at the same time."""
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> object:
        barrier.wait(WAIT_S)
        try:
            return work()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(run, work) for work in works]
        return [future.result(WAIT_S) for future in futures]


def is_idle(llm: LLM) -> bool:
    allocator = llm.engine.cache.allocator
    return not llm._scheduler.has_work and allocator.num_free == allocator.num_blocks


def test_four_threads_get_what_they_would_alone(make_engine, prompts) -> None:
    prompts = prompts[2:5]
    llm = LLM(make_engine(), plan="tree-3-2-1")
    params = [
        SamplingParams(max_tokens=3 + i, temperature=i % 2, seed=i, n=1 + i % 3) for i in range(4)
    ]
    alone = [[o.outputs for o in llm.generate(prompts, own)] for own in params]
    before = llm.get_metrics()

    def generate(i: int) -> Callable[[], object]:
        return lambda: [o.outputs for o in llm.generate(prompts, params[i])]

    def stream(i: int) -> list[list[list[int]]]:
        tokens: list[list[list[int]]] = [[[] for _ in range(params[i].n)] for _ in prompts]
        for event in llm.stream(prompts, params[i]):
            assert event.token_id is not None
            tokens[event.index][event.output].append(event.token_id)
        return tokens

    works = [generate(i) if i % 2 else (lambda i=i: stream(i)) for i in range(4)]
    for i, found in enumerate(in_threads(*works)):
        if i % 2:
            assert found == alone[i]
        else:
            assert found == [[c.token_ids for c in outputs] for outputs in alone[i]]
    assert is_idle(llm)
    after = llm.get_metrics()
    assert after.num_requests == 2 * before.num_requests
    # three at a time in both cases, but no thread ever waits alone
    assert after.num_step_passes - before.num_step_passes <= before.num_step_passes


def test_threads_share_batches(make_engine, prompts) -> None:
    engine = make_engine(max_num_seqs=3)
    llm = LLM(engine, plan="off")
    params = SamplingParams(temperature=0, max_tokens=40)
    one = llm.generate([prompts[0]], params)[0].metrics
    before = llm.get_metrics().num_step_passes
    in_threads(*[lambda: llm.generate([prompts[0]], params)] * 3)
    passes = llm.get_metrics().num_step_passes - before
    assert passes < 2 * one.num_step_passes


@pytest.mark.slow
def test_an_error_of_one_thread_is_its_own(make_engine, prompts, greedy, monkeypatch) -> None:
    """Bad requests, failed passes, and streams that are dropped, beside requests that go on."""
    llm = LLM(make_engine(), plan="chain-4")
    run, count = llm._runner.run, iter(range(1 << 30))

    def fail_now_and_then(batch: object) -> object:
        if next(count) in (11, 40):
            raise MemoryError("no memory")
        return run(batch)

    monkeypatch.setattr(llm._runner, "run", fail_now_and_then)
    params = SamplingParams(temperature=0, max_tokens=20)

    def drop() -> str:
        for _ in range(3):
            stream = llm.stream(prompts, params)
            for _, _ in zip(range(4), stream, strict=False):
                pass
            stream.close()
        return "dropped"

    def refuse() -> object:
        return llm.generate([[1], []], params)

    works = [lambda: llm.generate(prompts, params)] * 3
    found = in_threads(*works, drop, refuse)
    assert isinstance(found[-1], RequestError)
    want = [greedy(prompt, 20) for prompt in prompts]
    kinds = set()
    for result in found[:-2]:
        kinds.add(type(result))
        if isinstance(result, list):
            assert [o.outputs[0].token_ids for o in result] == want
        else:
            assert isinstance(result, MemoryError)
    assert kinds == {list, MemoryError}
    assert found[-2] == "dropped" or isinstance(found[-2], MemoryError)
    assert is_idle(llm)
    monkeypatch.undo()
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == want


def test_a_stream_is_read_while_others_generate(make_engine, prompts, greedy) -> None:
    """One thread leads; the reader is woken for each of its tokens, and goes when it has all."""
    llm = LLM(make_engine(), plan="tree-3-2-1")
    want = [greedy(prompt, 20) for prompt in prompts]
    is_done = threading.Event()

    def generate() -> bool:
        while not is_done.is_set():
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20))
            assert [o.outputs[0].token_ids for o in outputs] == want
        return True

    def read() -> list[int]:
        try:
            tokens = [
                e.token_id
                for e in llm.stream(prompts[4], SamplingParams(temperature=0, max_tokens=20))
            ]
        finally:
            is_done.set()
        return tokens

    assert in_threads(generate, generate, read) == [True, True, want[4]]


def test_two_llms_of_one_engine_in_two_threads(make_engine, prompts, greedy) -> None:
    engine = make_engine()
    llms = [LLM(engine, plan="chain-4"), LLM(engine, plan="tree-3-2-1")]
    works = [
        lambda llm=llm: [
            llm.generate([prompts[i]], SamplingParams(temperature=0, max_tokens=9))[0]
            .outputs[0]
            .token_ids
            for i in range(4)
        ]
        for llm in llms
    ]
    want = [greedy(prompts[i], 9) for i in range(4)]
    assert in_threads(*works) == [want, want]


def test_a_stream_that_is_collected_within_an_iteration(make_engine, prompts, greedy) -> None:
    """Its requests leave after the iteration, not in the middle of it."""
    llm = LLM(make_engine(), plan="chain-4")
    # of its own accord it would not end before the other one
    stream = llm.stream(prompts[4], SamplingParams(temperature=0, max_tokens=90, ignore_eos=True))
    next(stream)
    streams = [stream]
    del stream

    run, running = llm._runner.run, []

    def collect(batch: object) -> object:
        streams.clear()
        running.append(len(llm._scheduler.running))
        return run(batch)

    llm._runner.run = collect  # type: ignore[method-assign, assignment]
    (output,) = llm.generate([prompts[1]], SamplingParams(temperature=0, max_tokens=20))
    assert output.outputs[0].token_ids == greedy(prompts[1], 20)
    assert running[0] == 2
    assert running[-1] == 1
    assert is_idle(llm)


def test_closed_by_another_thread(make_engine, prompts) -> None:
    llm = LLM(make_engine(), plan="off")
    engine = llm.engine
    begun = threading.Event()

    def read() -> None:
        for _ in llm.stream(prompts, SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)):
            begun.set()
            time.sleep(0.001)

    def close() -> None:
        assert begun.wait(WAIT_S)
        llm.close()

    error, _ = in_threads(read, close)
    assert isinstance(error, RequestError)
    assert error.found == "an LLM that was closed"
    assert engine.cache.allocator.num_free == engine.cache.allocator.num_blocks


def test_a_child_of_a_fork_is_told(make_engine) -> None:
    llm = LLM(make_engine())
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            llm.generate("a")
            os.write(writer, b"no error")
        except RequestError as error:
            os.write(writer, error.do.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert "spawn" in answer.read()
    os.waitpid(child, 0)
    assert llm.generate("a")


def test_a_lock_is_handed_on_in_order() -> None:
    lock, seen = FairLock(), []

    def take(name: int) -> None:
        with lock:
            seen.append(name)

    with lock:
        threads = []
        for name in range(5):
            threads.append(threading.Thread(target=take, args=(name,)))
            threads[-1].start()
            while len(lock._gates) <= name:
                time.sleep(0.001)
        assert lock.is_mine
        assert seen == []
    for thread in threads:
        thread.join(WAIT_S)
    assert seen == list(range(5))
    with lock:
        assert lock.is_mine
    assert not lock.is_mine


def test_a_served_caller_goes_while_the_leader_goes_on() -> None:
    count, is_first, has_gone = 0, threading.Event(), threading.Event()

    def advance() -> None:
        nonlocal count
        count += 1
        is_first.set()
        time.sleep(0.001)

    loop = SharedLoop(FairLock(), advance)

    def wait() -> None:
        assert is_first.wait(WAIT_S)
        seen = count
        loop.run(lambda: count > seen + 3)
        has_gone.set()

    in_threads(lambda: loop.run(lambda: has_gone.is_set() or count > 20_000), wait)
    assert has_gone.is_set()
    assert count <= 20_000


def test_what_is_done_between_iterations_is_seen_before_the_next_one() -> None:
    count, is_first, is_done = 0, threading.Event(), False

    def advance() -> None:
        nonlocal count
        count += 1
        is_first.set()
        # the lock goes to whoever waits for it when this iteration ends
        while count == 1 and not loop._lock._gates:
            time.sleep(0.001)

    loop = SharedLoop(FairLock(), advance)

    def close() -> None:
        nonlocal is_done
        is_done = True

    def do() -> None:
        assert is_first.wait(WAIT_S)
        loop.do(close)

    in_threads(lambda: loop.run(lambda: is_done or count >= 50), do)
    assert is_done
    assert count == 1


def test_the_next_one_leads_where_the_leader_fails() -> None:
    count, is_first = 0, threading.Event()

    def advance() -> None:
        nonlocal count
        is_first.set()
        if count == 5:
            # not before somebody waits
            while not loop._lock._gates:
                time.sleep(0.001)
        if count == 6:
            count += 1
            raise MemoryError
        count += 1

    loop = SharedLoop(FairLock(), advance)

    def wait() -> str:
        assert is_first.wait(WAIT_S)
        loop.run(lambda: count >= 12)
        return "served"

    failed, served = in_threads(lambda: loop.run(lambda: count >= 9), wait)
    assert isinstance(failed, MemoryError)
    assert served == "served"
    assert count == 12
    # nobody leads any more
    loop.run(lambda: count >= 20)
    assert count == 20
