"""An engine that sleeps takes no memory, and answers as before when it is awake again."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.errors import ConfigError, EngineError, OutputError, OverloadError, RequestError
from specc.runtime.async_llm import AsyncLLM
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.service.between_steps import Nap
from specc.runtime.service.service import Service
from specc.speculation.plans import OFF
from specc.system.dropped_pages import drop_pages, drop_to_zeros
from specc.system.huge_pages import huge_buffer, huge_zeros
from tests.runtime.draft_pair import (
    PARAMS,
    PROMPTS,
    Pair,
    accepted,
    draft_tensors,
    tokens,
)
from tests.runtime.service_reader import ask
from tests.runtime.states_rig import build_hybrid
from tests.runtime.test_states import prompt_of, run
from tests.specc.server.serving import wait_for

LONG = [[*range(30, 54)]]


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


@pytest.mark.parametrize("make", [huge_buffer, huge_zeros])
def test_pages_go_back_to_the_system(make: Callable[[int], torch.Tensor]) -> None:
    size = 64 << 20
    tensor = make(size + 123)[5:]
    tensor.fill_(7)
    address, before = tensor.data_ptr(), resident_bytes()
    assert drop_to_zeros([tensor]) > 0.9 * size
    assert resident_bytes() < before - 0.9 * size
    assert tensor.data_ptr() == address
    assert not tensor.any()
    tensor.fill_(3)
    assert int(tensor.min()) == 3


def test_what_is_beside_stays() -> None:
    whole = torch.full((1 << 20,), 7, dtype=torch.uint8)
    assert drop_to_zeros([whole[1000:900_000]])
    assert not whole[1000:900_000].any()
    assert (whole[:1000] == 7).all()
    assert (whole[900_000:] == 7).all()
    small = torch.full((100,), 7, dtype=torch.uint8)
    assert drop_pages([small[10:20]]) == drop_to_zeros([small[10:20]]) == 0
    assert small.sum() == 7 * 90


@pytest.mark.parametrize("backend", ["eager", "cpu", "cpu-held"])
def test_outputs_are_those_of_before(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    pair: Pair = request.getfixturevalue("pair" if backend == "eager" else "cpu_pair")
    given: dict[str, Any] = {"mmap": backend == "cpu"} if backend != "eager" else {}
    engine = Engine.load(pair.engine, **given)
    with LLM(engine) as llm:
        expected, long = tokens(llm), tokens(llm, LONG)
        assert engine.cache.allocator.num_cached
        for _ in range(2):
            llm.sleep()
            llm.sleep(level=1)
            assert llm.is_sleeping
            # nothing that a pass reads is what it was; weights that are held are zeros
            assert not any(x.any() for slabs in engine.cache.slabs.values() for x in slabs)
            assert not engine.cache.history.any()
            if backend == "cpu-held":
                held = [w._buffer for w in engine.stored_weights]  # type: ignore[attr-defined]
                assert sum(int(x.count_nonzero()) for x in held) < 4 * 4096
            # a prefix that is found now would be one of zeros
            assert not engine.cache.allocator.num_cached
            llm.wake_up()
            llm.wake_up(tags=["weights", "kv_cache"])
            assert not llm.is_sleeping
            assert tokens(llm, LONG) == long
            assert tokens(llm) == expected


def test_prefixes_are_forgotten(pair: Pair) -> None:
    """Their rows are zeros: a request that found them would say something else."""
    with LLM(pair.engine) as llm:
        long = tokens(llm, LONG)
        assert tokens(llm, LONG) == long
        before = llm.get_metrics().num_cached_tokens
        assert before
        llm.sleep()
        llm.wake_up()
        assert tokens(llm, LONG) == long
        assert llm.get_metrics().num_cached_tokens == before


def test_states_are_forgotten() -> None:
    """Those of prefixes, too, of a target whose layers keep some."""
    engine = build_hybrid([OFF], prefill_chunk=16, num_checkpoints=20, grid=8)
    core, prompt = EngineCore(engine, OFF.name), prompt_of(25)
    first, again = (run(core, [prompt], 8, lambda: None)[0] for _ in range(2))
    assert again.stats.num_cached_tokens
    engine.sleep.begin()
    assert engine.cache.states is not None
    assert not any(x.any() for x in (*engine.cache.states.slabs, *engine.cache.states.replay))
    engine.sleep.end()
    # the second one finds what the first has left, under the keys of before
    after, last = (run(core, [prompt], 8, lambda: None)[0] for _ in range(2))
    outputs = [x.output_token_ids for x in (first, again, after, last)]
    assert outputs == outputs[:1] * 4
    assert not after.stats.num_cached_tokens
    assert last.stats.num_cached_tokens == again.stats.num_cached_tokens


@pytest.mark.parametrize("backend", ["eager", "cpu-held"])
def test_weights_that_are_in_no_file_of_the_engine(
    backend: str, request: pytest.FixtureRequest
) -> None:
    pair: Pair = request.getfixturevalue("pair" if backend == "eager" else "cpu_pair")
    engine = Engine.load(pair.engine, **({} if backend == "eager" else {"mmap": False}))
    with LLM(engine) as llm:
        expected = tokens(llm)
        llm.reload_draft(pair.right)
        own = draft_tensors(engine)
        llm.sleep()
        with pytest.raises(EngineError, match="sleeps"):
            llm.reload_draft(pair.wrong)
        llm.wake_up()
        assert all(torch.equal(x, own[key]) for key, x in draft_tensors(engine).items())
        assert accepted(llm) > 0.95
        assert tokens(llm) == expected


def test_requests_and_levels(pair: Pair) -> None:
    with LLM(pair.engine) as llm:
        stream = llm.stream(PROMPTS, PARAMS)
        next(stream)
        with pytest.raises(RequestError, match="while requests run"):
            llm.sleep()
        assert not llm.is_sleeping
        stream.close()
        for level in (0, 2):
            with pytest.raises(RequestError, match="level="):
                llm.sleep(level)
        llm.sleep()
        with pytest.raises(RequestError, match="call wake_up"):
            tokens(llm)
        with pytest.raises(RequestError, match="tags"):
            llm.wake_up(tags=["weights"])
        llm.wake_up()
        assert tokens(llm)


def test_another_llm_of_the_same_engine(pair: Pair) -> None:
    engine = Engine.load(pair.engine)
    one, two = LLM(engine), LLM(engine, plan="off")
    expected = tokens(two)
    one.sleep()
    with pytest.raises(RequestError, match="sleeps"):
        tokens(two)
    two.wake_up()
    assert tokens(one) == expected


def test_no_room_for_what_is_in_no_file(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(pair.engine) as llm:
        llm.reload_draft(pair.right)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
        with pytest.raises(OutputError, match="absent"):
            llm.sleep()
        assert not llm.is_sleeping
        assert accepted(llm) > 0.95


@pytest.mark.parametrize("mmap", [True, False])
def test_an_engine_that_was_altered_meanwhile(cpu_pair: Pair, tmp_path: Path, mmap: bool) -> None:
    path = shutil.copytree(cpu_pair.engine, tmp_path / "engine")
    with LLM(Engine.load(path, mmap=mmap)) as llm:
        expected = tokens(llm)
        llm.sleep()
        (file,) = path.glob("target/*.safetensors")
        data = file.read_bytes()
        with open(file, "r+b") as opened:
            opened.seek(len(data) - 40)
            opened.write(b"\0" * 8)
        with pytest.raises(EngineError, match="crc32"):
            llm.wake_up()
        assert llm.is_sleeping
        with open(file, "r+b") as opened:
            opened.write(data)
        llm.wake_up()
        assert tokens(llm) == expected


def test_an_engine_that_was_replaced_meanwhile(cpu_pair: Pair, tmp_path: Path) -> None:
    """What was loaded comes back: its files are kept open."""
    path = shutil.copytree(cpu_pair.engine, tmp_path / "engine")
    with LLM(Engine.load(path, mmap=False)) as llm:
        expected = tokens(llm)
        llm.sleep()
        shutil.rmtree(path)
        llm.wake_up()
        assert tokens(llm) == expected


def test_a_service_that_is_asked_to_sleep(pair: Pair) -> None:
    """Open requests end, later ones are refused until somebody wakes it."""
    expected = tokens(LLM(pair.engine, plan="off"))
    with Service(EngineCore(Engine.load(pair.engine))) as service:
        readers = [ask(service, prompt, PARAMS) for prompt in PROMPTS]
        service.operator.sleep()
        assert service.operator.is_asleep
        assert service.operator.nap is Nap.ASKED
        assert [reader.output() for reader in readers] == expected
        with pytest.raises(OverloadError, match="sleeps"):
            ask(service, PROMPTS[0], PARAMS)
        service.operator.sleep()
        service.operator.wake_up()
        service.operator.wake_up()
        assert service.operator.nap is Nap.AWAKE
        assert [ask(service, prompt, PARAMS).output() for prompt in PROMPTS] == expected
        with pytest.raises(RequestError, match="level=2"):
            service.operator.sleep(2)
        assert ask(service, PROMPTS[0], PARAMS).output() == expected[0]
        service.operator.sleep()
    # closed while it slept
    assert not service._thread.is_alive()


def test_a_service_that_falls_asleep(pair: Pair) -> None:
    """The next request wakes it, and waits for that."""
    expected = tokens(LLM(pair.engine, plan="off"))
    engine = Engine.load(pair.engine)
    with Service(EngineCore(engine), sleep_after_s=0.05) as service:
        for prompt, own in zip(PROMPTS, expected, strict=True):
            assert ask(service, prompt, PARAMS).output() == own
            wait_for(lambda: service.operator.is_asleep, "it stays awake", 30)
            assert service.operator.nap is Nap.IDLE
        assert ask(service, PROMPTS[0], PARAMS).output() == expected[0]
        wait_for(lambda: service.operator.is_asleep, "it stays awake", 30)
        # one that is asked to stay asleep does
        service.operator.sleep()
        with pytest.raises(OverloadError):
            ask(service, PROMPTS[0], PARAMS)
        service.operator.wake_up()
        assert ask(service, PROMPTS[1], PARAMS).output() == expected[1]
        assert engine.sleep.num_sleeps >= 5


def test_asked_to_sleep_while_a_request_wakes_it(cpu_pair: Pair) -> None:
    """It is woken for that one: weights that are held are zeros until then."""
    expected = tokens(LLM(cpu_pair.engine, plan="off"))
    engine = Engine.load(cpu_pair.engine, mmap=False)
    with Service(EngineCore(engine), sleep_after_s=0.05) as service:
        operator, reached, opened = service.operator, threading.Event(), threading.Event()
        wait_for(lambda: operator.is_asleep, "it stays awake", 30)
        wake = operator.wake

        def gated() -> None:
            reached.set()
            assert opened.wait(30)
            wake()

        operator.wake = gated  # type: ignore[method-assign]
        reader = ask(service, PROMPTS[0], PARAMS)
        assert reached.wait(30)
        thread = threading.Thread(target=operator.sleep)
        thread.start()
        wait_for(lambda: operator.nap is Nap.ASKED, "nobody is heard")
        opened.set()
        assert reader.output() == expected[0]
        thread.join(30)
        assert operator.is_asleep
        assert operator.nap is Nap.ASKED


def test_somebody_wakes_it_before_it_sleeps(pair: Pair) -> None:
    with Service(EngineCore(Engine.load(pair.engine))) as service:
        opened = threading.Event()
        run = service.core.runner.run

        def gated(batch: Any) -> Any:
            assert opened.wait(30)
            return run(batch)

        service.core.runner.run = gated  # type: ignore[method-assign]
        reader = ask(service, PROMPTS[0], PARAMS)
        thread = threading.Thread(target=service.operator.sleep)
        thread.start()
        wait_for(lambda: service.operator.nap is Nap.ASKED, "nobody is heard")
        waker = threading.Thread(target=service.operator.wake_up)
        waker.start()
        opened.set()
        for each in (waker, thread):
            each.join(30)
            assert not each.is_alive()
        assert reader.output()
        # whichever came last
        service.operator.wake_up()
        assert ask(service, PROMPTS[0], PARAMS).output() == reader.tokens


def test_a_service_that_ends_while_somebody_waits_for_it_to_sleep(pair: Pair) -> None:
    with Service(EngineCore(Engine.load(pair.engine))) as service:
        service.core.runner.run = lambda batch: time.sleep(0.2) or 1 / 0  # type: ignore
        service.submit(PROMPTS[0], PARAMS, lambda update: None)
        found: list[BaseException] = []

        def sleep() -> None:
            try:
                service.operator.sleep()
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=sleep)
        thread.start()
        wait_for(lambda: service.operator.nap is Nap.ASKED, "nobody is heard")
        service.close()
        thread.join(30)
        assert not thread.is_alive()
    with pytest.raises(OverloadError):
        service.operator.wake_up()


def test_asyncio(pair: Pair) -> None:
    async def run() -> list[int]:
        async with AsyncLLM(pair.engine, sleep_after_s=60.0) as llm:
            await llm.sleep()
            assert await llm.is_sleeping()
            with pytest.raises(OverloadError):
                async for _ in llm.generate({"prompt_token_ids": PROMPTS[0]}, PARAMS):
                    pass
            await llm.wake_up()
            prompt = {"prompt_token_ids": PROMPTS[0]}
            *_, last = [output async for output in llm.generate(prompt, PARAMS)]
            return list(last.outputs[0].token_ids)

    assert asyncio.run(run()) == tokens(LLM(pair.engine, plan="off"))[0]


def test_seconds_that_are_none(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="sleep_after_s"):
        AsyncLLM(pair.engine, sleep_after_s=0.0)
