"""New weights of a draft while its engine runs: no request is lost, and no output changes."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.artifact.backends import backend_names, facts_of
from specc.artifact.directory import read_manifest
from specc.compiler.draft_weights import write_draft_weights
from specc.config import CompileConfig
from specc.errors import ConfigError, EngineError, RequestError, WeightError
from specc.refuse_running import refuse_running
from specc.runtime.async_llm import AsyncLLM
from specc.runtime.core import EngineCore
from specc.runtime.draft_weights import exchange
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.service.service import Service
from specc.speculation.plans import SpecPlan
from tests import engines
from tests.conftest import save_tiny_llama
from tests.runtime.draft_pair import (
    PARAMS,
    PROMPTS,
    Pair,
    accepted,
    draft_tensors,
    target_bytes,
    tokens,
)
from tests.runtime.in_flight_rig import counting_rig
from tests.runtime.late_engine import Rig
from tests.runtime.service_reader import Reader, ask
from tests.specc.server.serving import wait_for


@pytest.mark.parametrize("backend", ["eager", "cpu", "cpu-held"])
def test_the_draft_changes_and_nothing_else(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    pair: Pair = request.getfixturevalue("pair" if backend == "eager" else "cpu_pair")
    files = {path: path.read_bytes() for path in pair.engine.rglob("*") if path.is_file()}
    given: dict[str, Any] = {"mmap": backend == "cpu"} if backend != "eager" else {}
    engine = Engine.load(pair.engine, **given)
    with LLM(engine, shares_prefixes=False) as llm:
        expected, before = tokens(llm), target_bytes(engine)
        assert accepted(llm) < 0.2
        version = llm.reload_draft(pair.right)
        assert (version.name, version.number) == ("draft_0", 1)
        assert accepted(llm) > 0.95
        assert tokens(llm) == expected
        assert target_bytes(engine) == before
        assert llm.reload_draft(pair.wrong, "draft_0").number == 2
        assert accepted(llm) < 0.2
        assert engine.draft_weights.num_reloads == 2
    # maps are private: no other process sees anything of it
    assert all(path.read_bytes() == data for path, data in files.items())


def test_a_file_that_is_refused_changes_nothing(pair: Pair, tmp_path: Path) -> None:
    engine = Engine.load(pair.engine)
    with LLM(engine) as llm:
        before = draft_tensors(engine)
        other = tmp_path / "draft"
        save_tiny_llama(other, 2, 1, intermediate_size=80)
        config = CompileConfig(max_seq_len=96, plans=(SpecPlan.from_widths((1,)),), probe=False)
        made = engines.build(pair.target, other, tmp_path / "engine", config)
        write_draft_weights(other, made, tmp_path / "of-another")
        damaged = bytearray(pair.right.read_bytes())
        damaged[-4:] = b"\xff\xff\xff\x7f"
        (tmp_path / "nan").write_bytes(damaged)
        (tmp_path / "short").write_bytes(pair.right.read_bytes()[:-1])
        for name in ("of-another", "nan", "short", "absent"):
            with pytest.raises(WeightError):
                llm.reload_draft(tmp_path / name)
        with pytest.raises(ConfigError, match="draft_1"):
            llm.reload_draft(pair.right, "draft_1")
        assert engine.draft_weights.versions["draft_0"].number == 0
        assert engine.draft_weights.num_failures == 5
        after = draft_tensors(engine)
        assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("half", [False, True])
def test_all_weights_or_none(failing: int, half: bool) -> None:
    """A copy that fails in the middle leaves what was there, also of the tensor it failed at."""
    own = {key: torch.full((4,), float(i)) for i, key in enumerate("abc")}
    new = {key: torch.full((4,), 10.0 + i) for i, key in enumerate("abc")}
    count = itertools.count()

    def copy(tensor: Tensor, value: Tensor) -> None:
        if next(count) == failing:
            if half:
                tensor[:2] = value[:2]
            raise RuntimeError("the device is gone")
        tensor.copy_(value)

    with pytest.raises(RuntimeError, match="gone"):
        exchange(own, new, copy)
    assert [x.tolist() for x in own.values()] == [[float(i)] * 4 for i in range(3)]
    exchange(own, {key: torch.full((4,), 10.0 + i) for i, key in enumerate("abc")})
    assert [x[0].item() for x in own.values()] == [10.0, 11.0, 12.0]


def test_rows_of_older_weights_are_not_found_any_more(pair: Pair) -> None:
    """Those of the target are: what a draft with new weights proposes follows from its own."""
    engine = Engine.load(pair.engine)
    with LLM(engine) as llm:
        long = [[*range(30, 54)]]
        expected = tokens(llm, long)
        pool = engine.cache.allocator
        assert any(pool._drafts.values())
        llm.reload_draft(pair.right)
        assert not any(pool._drafts.values())
        before = llm.get_metrics().num_cached_tokens
        # with rows of the old weights it would be wrong now and then
        assert accepted(llm, long) > 0.95
        assert llm.get_metrics().num_cached_tokens > before
        assert tokens(llm, long) == expected


def test_a_replaced_engine_lends_nothing_to_a_file(pair: Pair, tmp_path: Path) -> None:
    path = shutil.copytree(pair.engine, tmp_path / "engine")
    llm = LLM(path)
    program = path / read_manifest(path).models[1].program_file
    program.write_text(program.read_text() + " ")
    with pytest.raises(EngineError, match="sha256"):
        llm.reload_draft(pair.right)


def test_weights_stay_while_a_step_is_in_flight(tiny_models: Any, tmp_path: Path) -> None:
    """Where steps are queued ahead, what is queued is committed first; a stream goes on."""
    with counting_rig(tiny_models, tmp_path / "engines") as rig:
        assert rig.path.is_dir()
        llm = rig.llm("chain-3")
        expected = [list(o.outputs[0].token_ids) for o in rig.llm("off").generate(PROMPTS, PARAMS)]
        file = tmp_path / "new.safetensors"
        write_draft_weights(rig.path.parent / "draft", rig.path, file)
        found: dict[int, list[int]] = {i: [] for i in range(len(PROMPTS))}
        num_queued = num_reloads = 0
        for event in llm.stream(PROMPTS, PARAMS):
            found[event.index].append(event.token_id)
            if sum(map(len, found.values())) % 7 == 0:
                num_queued += len(llm._in_flight.queued)
                llm.reload_draft(file)
                num_reloads += 1
                assert not llm._in_flight.queued
        assert list(found.values()) == expected
        assert num_queued > 0
        assert num_reloads > 5
        assert rig.is_idle(llm)
        _swap_without_waiting(rig, llm, file)


def _swap_without_waiting(rig: Rig, llm: LLM, file: Path) -> None:
    drafts = rig.engine.draft_weights
    stream = llm.stream(PROMPTS, PARAMS)
    while not llm._in_flight.queued:
        next(stream)
    with pytest.raises(RuntimeError, match="in flight"):
        drafts.put(drafts.read(file))


@pytest.fixture
def service(pair: Pair) -> Iterator[Service]:
    with Service(EngineCore(Engine.load(pair.engine))) as service:
        yield service


def test_under_load(pair: Pair, service: Service) -> None:
    """Requests of many threads, and a reload after a reload: each output is its solo run."""
    prompts = [[i % 200, 7, i % 13] for i in range(40)]
    expected = tokens(LLM(pair.engine, plan="off"), prompts)
    readers = [ask(service, prompt, PARAMS) for prompt in prompts]
    for file in itertools.islice(itertools.cycle([pair.right, pair.wrong]), 12):
        service.operator.reload_draft(file)
    assert [reader.output() for reader in readers] == expected
    assert service.engine.draft_weights.num_reloads == 12
    assert service.num_open == 0
    with pytest.raises(WeightError):
        service.operator.reload_draft(pair.right.parent / "absent")


def test_a_service_whose_steps_are_queued_ahead(tiny_models: Any, tmp_path: Path) -> None:
    with counting_rig(tiny_models, tmp_path / "engines") as rig:
        expected = tokens(rig.llm("off"))
        file = tmp_path / "new.safetensors"
        write_draft_weights(rig.path.parent / "draft", rig.path, file)
        with Service(EngineCore(rig.engine, "chain-3")) as service:
            core, settle, advance = service.core, rig.engine.settle, service.core.advance
            num_queued: list[int] = []
            num_ended = 0

            def counted() -> None:
                nonlocal num_ended
                num_queued.append(len(core.in_flight.queued))
                has_work = core.scheduler.has_work
                settle()
                num_ended += has_work and not core.scheduler.has_work

            def held() -> bool:
                has_run = advance()
                wait_for(lambda: not core.in_flight.queued or service._orders, "no reload", 30)
                return has_run

            def reload(readers: list[Reader]) -> list[list[int]]:
                # at most one for each iteration, of which there are far fewer
                for _ in range(1000):
                    if service.num_open:
                        service.operator.reload_draft(file)
                assert service.num_open == 0, "nobody hears of an end"
                return [reader.output() for reader in readers]

            rig.engine.settle = counted  # type: ignore[method-assign]
            for _ in range(4):
                assert reload([ask(service, prompt, PARAMS) for prompt in PROMPTS]) == expected
            assert sum(num_queued) > 0
            # now that every step that is queued waits for a reload, some ends come by one
            core.advance = held  # type: ignore[method-assign]
            for token in dict.fromkeys(expected[0][4:12]):
                params = replace(PARAMS, stop_token_ids=[token])
                found = reload([ask(service, PROMPTS[0], params)])
                assert found == [expected[0][: expected[0].index(token) + 1]]
            assert num_ended > 0


def test_asyncio(pair: Pair) -> None:
    async def run() -> tuple[list[int], int]:
        async with AsyncLLM(pair.engine) as llm:
            version = await llm.reload_draft(pair.right)
            prompt = {"prompt_token_ids": PROMPTS[0]}
            *_, last = [output async for output in llm.generate(prompt, PARAMS)]
            return list(last.outputs[0].token_ids), version.number

    assert asyncio.run(run()) == (tokens(LLM(pair.engine, plan="off"))[0], 1)


def test_from_within_a_step(pair: Pair) -> None:
    llm = LLM(pair.engine)
    with llm.engine.turn, pytest.raises(RequestError, match="within a step"):
        llm.reload_draft(pair.right)


@pytest.mark.parametrize("backend", backend_names())
def test_backends_that_keep_copies_refuse(backend: str) -> None:
    facts = facts_of(backend)
    for what, is_refused in (
        ("reload_draft", facts.is_padded),
        ("sleep", facts.is_padded or facts.is_on_gpu),
    ):
        if is_refused:
            with pytest.raises(ConfigError, match=what):
                refuse_running(None, facts, what)
        else:
            refuse_running(None, facts, what)


def test_ranks_refuse(tmp_path: Path) -> None:
    manifest = read_manifest(engines.build_cut(tmp_path))
    for what in ("reload_draft", "sleep"):
        with pytest.raises(ConfigError, match="--tensor-parallel-size 2"):
            refuse_running(manifest, facts_of("eager"), what)
