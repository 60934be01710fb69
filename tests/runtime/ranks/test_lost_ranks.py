"""A rank that dies, stands still or fails: it is named, requests get errors, nobody is left."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from specc.errors import EngineError, RankError
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from tests.lossless import Zoo
from tests.runtime.ranks.conftest import OPTIONS
from tests.runtime.ranks.processes import ENDS_S, LedProcess, wait_gone
from tests.runtime.ranks.test_sharded_engine import path_of

STAGES = ("prefill", "draft", "verify", "accept", "idle")
LIMIT_S = 1.5


def cases() -> list[Any]:
    """Every rank, in every stage."""
    made = []
    for num_ranks in (2, 3):
        for rank in range(num_ranks):
            for stage in STAGES:
                case = (num_ranks, rank, stage)
                made.append(pytest.param(*case, id=f"{rank}-of-{num_ranks}-{stage}"))
    return made


# the default tier kills ranks of an engine that is cut: test_cut_ranks.py
@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "rank", "stage"), cases())
def test_a_rank_that_is_killed(engine_path: Path, num_ranks: int, rank: int, stage: str) -> None:
    with LedProcess(engine_path, {"num_ranks": num_ranks}, stage=stage) as led:
        led.expect("at")
        assert len(led.pids) == num_ranks
        os.kill(led.pids[rank], signal.SIGKILL)
        if rank:
            led.answer()
        code = led.ends(ENDS_S)
        if rank == 0:
            assert code == -signal.SIGKILL
            return
        assert code == 1
        found = f"rank {rank} (pid {led.pids[rank]}) was killed by signal 9 (SIGKILL)"
        assert found in led.errors()


# the default tier has them without processes: test_watch.py
@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "rank", "stage"), cases())
def test_a_rank_that_is_stopped(engine_path: Path, num_ranks: int, rank: int, stage: str) -> None:
    ranks = {"num_ranks": num_ranks, "timeout_s": LIMIT_S}
    with LedProcess(engine_path, ranks, stage=stage) as led:
        led.expect("at")
        os.kill(led.pids[rank], signal.SIGSTOP)
        if rank:
            led.answer()
        code = led.ends(LIMIT_S + ENDS_S)
        if rank == 0:
            # it cannot end itself: who follows does that
            assert code == -signal.SIGKILL
            assert f"rank 0 has given no sign of life for {LIMIT_S} s" in led.errors()
            return
        assert code == 1
        found = f"rank {rank} (pid {led.pids[rank]}) has given no sign of life for {LIMIT_S} s"
        assert f"{found}: it is stopped" in led.errors()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_with_the_limits_that_nobody_has_set(engine_path: Path, rank: int) -> None:
    """Ten seconds, though an order may take thirty."""
    with LedProcess(engine_path, {"num_ranks": 2}, stage="verify") as led:
        led.expect("at")
        begin_s = time.monotonic()
        os.kill(led.pids[rank], signal.SIGSTOP)
        if rank:
            led.answer()
        assert led.ends(12.0) == (1 if rank else -signal.SIGKILL)
        assert time.monotonic() - begin_s < 10.0
        assert f"rank {rank}" in led.errors()


def test_a_rank_that_stands_still_does_not_outlive_rank_0(engine_path: Path) -> None:
    """It cannot see that its connection has ended."""
    with LedProcess(engine_path, {"num_ranks": 2}, stage="idle") as led:
        led.expect("at")
        os.kill(led.pids[1], signal.SIGSTOP)
        os.kill(led.pids[0], signal.SIGKILL)
        assert led.ends(ENDS_S) == -signal.SIGKILL


@pytest.mark.slow
def test_an_idle_job_outlives_its_time_limits(zoo: Zoo) -> None:
    """Those of its collectives, too."""
    path = path_of(zoo, "llama", "eager", 2)
    ranks = {"num_ranks": 2, "timeout_s": 1.0}
    with LedProcess(path, ranks, stage="idle", idle_s=2.5, end_s=0) as led:
        first = led.expect("tokens")
        led.expect("at")
        led.answer()
        assert led.expect("tokens") == first
        assert led.ends(ENDS_S) == 0


@pytest.mark.slow
def test_a_job_that_is_stopped_as_a_whole_goes_on(engine_path: Path) -> None:
    """As Ctrl-Z and fg do: nobody takes the others' silence for theirs."""
    ranks = {"num_ranks": 2, "timeout_s": 1.0}
    with LedProcess(engine_path, ranks, stage="verify", end_s=0) as led:
        led.expect("at")
        for number, rest_s in ((signal.SIGSTOP, 3.0), (signal.SIGCONT, 1.5)):
            for pid in led.pids:
                os.kill(pid, number)
            time.sleep(rest_s)
        led.answer()
        assert len(led.expect("tokens")) == 40
        assert led.ends(ENDS_S) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("garbage", "bytes that are no message of a rank: b'GET / HTTP/1.1"),
        ("gap", "order "),
        ("wrong block", "index"),
    ],
)
def test_a_rank_that_cannot_follow_says_so(engine_path: Path, what: str, found: str) -> None:
    with LedProcess(engine_path, {"num_ranks": 2}, stage="idle") as led:
        led.expect("at")
        led.answer(what)
        assert led.ends(ENDS_S) == 1
        errors = led.errors()
        assert f"rank 1 (pid {led.pids[1]}) failed: " in errors
        line = next(line for line in errors.splitlines() if "failed: " in line)
        assert found in line


# the default tier has it of an engine that is cut: test_cut_ranks.py
@pytest.mark.slow
def test_open_requests_of_a_service_get_an_error(engine_path: Path) -> None:
    options: dict[str, Any] = {"stage": "verify", "is_service": True}
    with LedProcess(engine_path, {"num_ranks": 2}, **options) as led:
        led.expect("at")
        os.kill(led.pids[1], signal.SIGKILL)
        led.answer()
        assert led.expect("error")["error"] == "FaultError"
        assert led.ends(ENDS_S) == 1
        assert "was killed by signal 9" in led.errors()


@pytest.mark.slow
def test_signals_of_the_terminal_are_for_rank_0(engine_path: Path) -> None:
    """Ctrl-C reaches all; who follows ends when rank 0 says so."""
    with LedProcess(engine_path, {"num_ranks": 2}, stage="verify", end_s=0) as led:
        led.expect("at")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(led.pids[1], number)
        led.answer()
        assert len(led.expect("tokens")) == 40
        assert led.ends(ENDS_S) == 0


@pytest.mark.slow
def test_an_interrupt_comes_between_orders(engine_path: Path) -> None:
    """Ctrl-C within a pass waits for its end, and then ends the process as it always does."""
    with LedProcess(engine_path, {"num_ranks": 2}, stage="verify") as led:
        led.expect("at")
        os.kill(led.pids[0], signal.SIGINT)
        time.sleep(0.3)
        assert led.process.poll() is None
        led.answer()
        assert led.ends(ENDS_S) == -signal.SIGINT
        errors = led.errors()
        assert "KeyboardInterrupt" in errors
        assert "rank" not in errors.splitlines()[-1]


@pytest.mark.slow
def test_without_an_end_of_the_process_every_call_fails(engine_path: Path) -> None:
    engine = Engine.load(engine_path, ranks=OPTIONS)
    llm = LLM(engine, plan="tree-3-2-1")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert llm.generate([[1, 2, 3]], params)
    (pid,) = engine.target.leader.pids
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    def go_on() -> None:
        # orders that nobody reads any more are no error at once
        for _ in range(100):
            llm.generate([[1, 2, 3]], params)

    for _ in range(2):
        with pytest.raises(RankError, match=rf"rank 1 \(pid {pid}\) was killed by signal 9"):
            go_on()
    engine.target.leader.close()


def test_a_pass_that_fails_on_rank_0_ends_the_job(engine_path: Path) -> None:
    """The others may wait in it for a rank that never comes."""
    engine = Engine.load(engine_path, ranks=OPTIONS)
    pids = [pid for pid in engine.target.leader.pids if pid]
    llm = LLM(engine, plan="tree-3-2-1")

    def fail(*inputs: Any) -> Any:
        raise RuntimeError("of the program")

    engine.target.program = fail
    with pytest.raises(RankError, match=r"rank 0 .* failed in order 1: RuntimeError: of the prog"):
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8))
    assert not wait_gone(pids, ENDS_S)


def test_a_rank_that_cannot_load_the_engine(
    engine_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here: for lack of the module that ranks run."""
    monkeypatch.setattr("specc.runtime.ranks.launch._MODULE", "specc.runtime.ranks.nothing")
    with pytest.raises(EngineError, match=r"rank 1 .* ended with exit code 1 while it loaded"):
        Engine.load(engine_path, ranks=OPTIONS)


@pytest.mark.slow
def test_a_rank_with_another_engine(
    engine_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another host, where the same path is another engine."""
    other = shutil.copytree(engine_path, tmp_path / "other")
    manifest = other / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"created": "2', '"created": "1'))
    from specc.runtime.ranks import launch

    start = launch._start
    monkeypatch.setattr(
        launch, "_start", lambda rank, setup: start(rank, setup | {"path": str(other)})
    )
    made = launch.Job
    monkeypatch.setattr(
        launch,
        "Job",
        lambda options, facts, setup, group: made(
            options, facts, setup | {"path": str(other)}, group
        ),
    )
    with pytest.raises(EngineError, match=r"rank 1 \(pid \d+\) with engine [0-9a-f]{16}"):
        Engine.load(engine_path, ranks=OPTIONS)
