"""A service: requests from any thread, updates, cancellation, failures, its end, and a soak."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specc.config import CompileConfig
from specc.errors import FaultError, OverloadError, RequestError
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.service.service import MAX_FAILURES, Service, Update
from specc.runtime.service.state import Health
from specc.runtime.service.stream import UpdateStream
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import engines
from tests.interleavings import Moody, NearTies, Solo
from tests.runtime.service_reader import Reader
from tests.soak import SoakFigures, assert_sound, run_soak

ROOT = Path(__file__).resolve().parents[3]
PLANS = (SpecPlan.from_widths((1, 1, 1)), SpecPlan.from_widths((1,)), SpecPlan.from_widths((2, 2)))
PROMPT = [5, 1, 4, 3]
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


class Gate:
    """Holds iterations back until a test opens it, from the first one or a later one.

    It may let them fail.
    """

    def __init__(self, service: Service) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.num_failures = 0
        # iterations that it does not hold back
        self.num_free = 0
        run = service.core.runner.run

        def gated(batch: Any) -> Any:
            if self.num_free:
                self.num_free -= 1
                return run(batch)
            self.reached.set()
            assert self.opened.wait(30)
            if self.num_failures:
                self.num_failures -= 1
                raise RuntimeError("a file /secret/path is gone")
            return run(batch)

        service.core.runner.run = gated  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


@pytest.fixture
def service(engine: Engine) -> Iterator[Service]:
    with Service(EngineCore(engine), max_waiting=2) as service:
        yield service


@pytest.fixture
def gate(service: Service) -> Iterator[Gate]:
    gate = Gate(service)
    yield gate
    gate.opened.set()


def test_updates_add_up_to_the_output(service: Service, greedy: Callable[..., list[int]]) -> None:
    readers = [Reader() for _ in range(2)]
    tickets = [
        service.submit(PROMPT, SamplingParams(temperature=0, max_tokens=9), r) for r in readers
    ]
    for reader, ticket in zip(readers, tickets, strict=True):
        last = reader.wait()
        assert reader.tokens == greedy(PROMPT, 9)
        assert last.finish_reason == "length"
        assert last.metrics is not None
        assert last.metrics.num_output_tokens == 9
        assert [update.is_last for update in reader.updates[:-1]] == [False] * (
            len(reader.updates) - 1
        )
        tokenizer = service.engine.tokenizer
        assert tokenizer is not None
        assert "".join(u.text for u in reader.updates) == tokenizer.decode(reader.tokens)
        assert ticket.is_done
        assert ticket.num_prompt_tokens == 4
    assert tickets[0].request_id != tickets[1].request_id


def test_logprobs_come_with_their_tokens(service: Service) -> None:
    reader = Reader()
    service.submit(PROMPT, SamplingParams(temperature=0, max_tokens=6, logprobs=2), reader)
    reader.wait()
    found = [entry for update in reader.updates for entry in update.logprobs or []]
    assert [next(iter(entry)) for entry in found] == reader.tokens


def test_a_bad_request_is_refused_at_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match="no tokens"):
        service.submit([], LONG, Reader())
    monkeypatch.setattr(service.engine.cache.allocator, "num_blocks", 1)
    with pytest.raises(RequestError, match="KV cache blocks"):
        service.submit(PROMPT, SamplingParams(temperature=0, max_tokens=8), Reader())
    assert service.num_open == 0


def test_names_of_open_requests_are_their_own(service: Service, gate: Gate) -> None:
    reader = Reader()
    service.submit(PROMPT, LONG, reader, request_id="mine")
    with pytest.raises(RequestError, match="'mine', which an open request has"):
        service.submit(PROMPT, LONG, Reader(), request_id="mine")
    gate.opened.set()
    reader.wait()
    assert service.drain(10)
    assert service.num_open == 0


def test_a_name_is_free_when_its_end_is_told(service: Service) -> None:
    first, second = Reader(), Reader()

    def told(update: Update) -> None:
        if update.is_last:
            service.submit(PROMPT, LONG, second, request_id="mine")
        first(update)

    service.submit(PROMPT, LONG, told, request_id="mine")
    first.wait()
    second.wait()
    assert second.tokens == first.tokens


def test_a_cancelled_request_gives_its_blocks_back(service: Service, gate: Gate) -> None:
    runs, waits = Reader(), Reader()
    ticket = service.submit(PROMPT, LONG, runs)
    assert gate.reached.wait(10)
    other = service.submit(PROMPT, LONG, waits)
    service.cancel(ticket)
    service.cancel(other)
    gate.opened.set()
    assert runs.wait().finish_reason == waits.wait().finish_reason == "abort"
    assert len(runs.tokens) < 40
    assert waits.tokens == []
    service.cancel(ticket)
    after = Reader()
    service.submit(PROMPT, SamplingParams(temperature=0, max_tokens=2), after)
    assert after.wait().finish_reason == "length"
    pool = service.engine.cache.allocator
    assert service.drain(10)
    assert pool.num_free == pool.num_blocks


def test_more_than_it_takes_is_refused(service: Service, gate: Gate) -> None:
    """Three run, two wait."""
    readers = [Reader() for _ in range(5)]
    service.submit(PROMPT, LONG, readers[0])
    assert gate.reached.wait(10)
    # the engine is busy: none of these runs yet
    for reader in readers[1:3]:
        service.submit(PROMPT, LONG, reader)
    with pytest.raises(OverloadError, match="2 requests wait already"):
        service.submit(PROMPT, LONG, Reader())
    gate.opened.set()
    for reader in readers[:3]:
        reader.wait()


def test_a_failure_costs_those_that_ran(service: Service, gate: Gate, greedy) -> None:
    # while the second fails, the third waits in the scheduler
    service.core.scheduler._max_num_seqs = 1
    gate.num_failures = 2
    hit, second, waits = Reader(), Reader(), Reader()
    service.submit(PROMPT, LONG, hit)
    assert gate.reached.wait(10)
    service.submit(PROMPT, LONG, second)
    service.submit(PROMPT, SamplingParams(temperature=0, max_tokens=5), waits)
    gate.opened.set()
    for reader in (hit, second):
        error = reader.wait().error
        assert isinstance(error, FaultError)
        assert "secret" not in str(error)
    assert waits.wait().finish_reason == "length"
    assert waits.tokens == greedy(PROMPT, 5)
    assert service.health is Health.OK
    assert service.drain(10)
    pool = service.engine.cache.allocator
    assert pool.num_free == pool.num_blocks


def test_an_engine_that_goes_on_failing_is_dead(service: Service, gate: Gate) -> None:
    gate.num_failures = MAX_FAILURES
    gate.opened.set()
    for i in range(MAX_FAILURES):
        assert service.health is (Health.FAILING if i else Health.OK)
        reader = Reader()
        service.submit(PROMPT, LONG, reader)
        assert reader.wait().error is not None
    assert service.health is Health.DEAD
    with pytest.raises(FaultError, match="out of use"):
        service.submit(PROMPT, LONG, Reader())


def test_a_callback_that_fails_costs_nobody_else(service: Service) -> None:
    def broken(update: Update) -> None:
        raise ValueError("no reader")

    service.submit(PROMPT, LONG, broken)
    reader = Reader()
    service.submit(PROMPT, LONG, reader)
    assert reader.wait().finish_reason == "length"


def test_drained_it_ends_what_is_open_and_takes_no_more(service: Service, gate: Gate) -> None:
    reader = Reader()
    service.submit(PROMPT, LONG, reader)
    assert gate.reached.wait(10)
    assert not service.drain(0.01)
    assert service.health is Health.DRAINING
    with pytest.raises(OverloadError, match="about to stop"):
        service.submit(PROMPT, LONG, Reader())
    gate.opened.set()
    assert service.drain(30)
    assert reader.wait().finish_reason == "length"


def test_closed_it_ends_everything(engine: Engine) -> None:
    service = Service(EngineCore(engine))
    gate, reader = Gate(service), Reader()
    service.submit(PROMPT, LONG, reader)
    assert gate.reached.wait(10)
    closing = threading.Thread(target=service.close)
    closing.start()
    while not service._is_closed:
        assert closing.is_alive()
    gate.opened.set()
    closing.join(10)
    assert reader.wait().finish_reason == "abort"
    assert engine.cache.allocator.num_free == engine.cache.allocator.num_blocks


def test_deadlines(service: Service, gate: Gate) -> None:
    reader = Reader()
    service.submit(PROMPT, LONG, reader, timeout_s=60)
    assert gate.reached.wait(10)
    # a limit short enough to wait for might end it before it runs
    (request,) = service.core.scheduler.running
    assert request.deadline_s is not None
    request.deadline_s -= 60
    gate.opened.set()
    assert reader.wait().finish_reason == "timeout"
    assert len(reader.tokens) < 40


def test_state(service: Service, gate: Gate) -> None:
    assert service.state().num_running == 0
    reader = Reader()
    service.submit(PROMPT, LONG, reader)
    assert gate.reached.wait(10)
    gate.opened.set()
    reader.wait()
    assert service.drain(10)
    for _ in range(100):
        state = service.state()
        if state.stats.num_requests:
            break
        threading.Event().wait(0.02)
    assert state.stats.num_requests == 1
    assert state.stats.num_output_tokens == 40
    assert (state.num_running, state.num_waiting, state.num_blocks_used) == (0, 0, 0)
    assert state.prefix_queries == 4
    assert state.num_blocks_cached > 0
    assert state.cache_usage == 0


def test_a_stream_for_asyncio(service: Service, greedy: Callable[..., list[int]]) -> None:
    async def read(max_tokens: int) -> list[Update]:
        stream = UpdateStream(service, PROMPT, SamplingParams(temperature=0, max_tokens=max_tokens))
        return [update async for update in stream]

    async def main() -> None:
        updates = await asyncio.gather(read(7), read(4))
        for found, count in zip(updates, (7, 4), strict=True):
            assert [t for update in found for t in update.token_ids] == greedy(PROMPT, count)
            assert [update.is_last for update in found] == [False] * (len(found) - 1) + [True]

    asyncio.run(main())


def test_what_a_slow_reader_missed_is_one_update(service: Service, greedy) -> None:
    async def main() -> list[Update]:
        stream = UpdateStream(
            service, PROMPT, SamplingParams(temperature=0, max_tokens=12, logprobs=0)
        )
        await asyncio.to_thread(lambda: service.drain(30))
        await asyncio.sleep(0)
        return [update async for update in stream]

    (update,) = asyncio.run(main())
    assert update.token_ids == greedy(PROMPT, 12)
    assert update.logprobs is not None
    assert [next(iter(entry)) for entry in update.logprobs] == update.token_ids
    assert update.finish_reason == "length"


def test_a_stream_that_is_closed_cancels(service: Service, gate: Gate) -> None:
    async def main() -> None:
        stream = UpdateStream(service, PROMPT, LONG)
        updates = stream.__aiter__()
        await anext(updates)
        await asyncio.to_thread(gate.reached.wait, 10)
        await updates.aclose()  # type: ignore[attr-defined]
        gate.opened.set()
        # while the loop runs: updates for one that is closed would cancel, too
        assert await asyncio.to_thread(service.drain, 10)

    gate.num_free = 2
    asyncio.run(main())
    assert gate.reached.is_set()
    pool = service.engine.cache.allocator
    assert pool.num_free == pool.num_blocks
    assert service.core.scheduler.stats.num_requests == 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("soak") / "engine"
    config = CompileConfig(
        plans=PLANS, max_seq_len=128, max_batch_size=8, backend="cpu", block_size=4, probe=False
    )
    models = ROOT / "examples" / "pair"
    return engines.build(models / "target", models / "draft", path, config)


def soak(path: Path, num_requests: int, seconds: float, **options: Any) -> SoakFigures:
    served, other = Engine.load(path, kv_cache_tokens=144), Engine.load(path)
    assert served.tokenizer is not None
    texts = ("def read(path):\n    with open(", "import os\n", "class Node:\n    def __init__(self")
    prompts = [served.tokenizer.encode(text * n).ids[:70] for n, text in enumerate(texts, 1)]
    prompts += [prompts[0] + prompts[1], prompts[0] + prompts[2]]
    core = EngineCore(served, policy=Moody(list(served.plans), random.Random(2)))
    with Service(core, max_waiting=64) as service:
        figures = run_soak(
            service,
            Solo(other),
            NearTies(other),
            prompts,
            num_requests=num_requests,
            seconds=seconds,
            **options,
        )
        assert_sound(service, figures)
    assert figures.num_ties <= figures.num_compared // 100
    assert figures.num_preemptions > 0
    assert figures.num_cached_tokens > 0
    assert figures.num_faults > 0
    return figures


@pytest.mark.slow
def test_soak_for_a_while(pair: Path) -> None:
    """As many requests as make it certain that each kind of end is there, however slow the machine.

    Of 700, none is refused, late or hit by a fault in one of 10,000 runs.
    """
    figures = soak(pair, 700, seconds=1, faults=0.02, max_tokens=16)
    assert figures.num_compared > 200


@pytest.mark.slow
def test_soak(pair: Path) -> None:
    """20,000 requests and ten minutes at least; memory stays as it is."""
    figures = soak(pair, 20_000, seconds=600)
    path = ROOT / "build" / "soak.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(figures.to_json(), indent=1) + "\n", encoding="utf-8")
    assert 0.95 < figures.growth < 1.05
