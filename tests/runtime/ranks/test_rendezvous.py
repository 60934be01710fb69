"""Ranks that a launcher has started: they find each other, or say why not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specc.errors import ConfigError, EngineError
from specc.runtime.engine import Engine
from specc.runtime.ranks.rank_options import RankOptions
from specc.runtime.ranks.rendezvous import Launched, Rendezvous
from tests.runtime.ranks.conftest import OPTIONS
from tests.runtime.ranks.processes import ENDS_S, SCRIPT, LedProcess

GIVEN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def test_a_launch_is_read() -> None:
    launched = Launched.from_environment({**GIVEN, "TORCHELASTIC_RUN_ID": "a"})
    assert launched == Launched(1, 2, 1, 0, "127.0.0.1", 29500, False, "a/0")
    assert list(launched.local_ranks) == [1]
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "2"}
    launched = Launched.from_environment({**GIVEN, **agent, "TORCHELASTIC_RESTART_COUNT": "3"})
    assert launched == Launched(1, 2, 2, 1, "127.0.0.1", 29500, True, "none/3")
    assert list(launched.local_ranks) == [0, 1]
    second = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    launched = Launched.from_environment({**GIVEN, **second})
    assert launched is not None
    assert list(launched.local_ranks) == [4, 5, 6, 7]


@pytest.mark.parametrize("environment", [{}, {**GIVEN, "WORLD_SIZE": "1"}, {"WORLD_SIZE": "2"}])
def test_no_launch(environment: Mapping[str, str]) -> None:
    assert Launched.from_environment(environment) is None


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"RANK": "2"}, "RANK=2"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE="),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3"),
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "LOCAL_RANK=2"),
        ({"MASTER_ADDR": None}, "RANK without MASTER_ADDR"),
    ],
)
def test_a_launch_that_cannot_be(changes: dict[str, str | None], found: str) -> None:
    merged = {**GIVEN, **changes}
    given = {name: value for name, value in merged.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        Launched.from_environment(given)
    assert caught.value.found == found


def test_a_launch_of_another_size(engine_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(0, 3, free_port()).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match=r"launch of 3 processes \(WORLD_SIZE\), and an engine of"
    ):
        Engine.load(engine_path, ranks=OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_store_that_cannot_be_reached(
    engine_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    for name, value in variables(rank, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    # nobody listens there
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    options = RankOptions(2, start_timeout_s=0.5, ends_process=False)
    begin_s = time.monotonic()
    with pytest.raises(EngineError, match=r"no store at 127.0.0.1:\d+ \(MASTER_ADDR, MASTER_PORT"):
        Engine.load(engine_path, ranks=options)
    assert time.monotonic() - begin_s < 15


def test_a_rank_that_does_not_come_is_named(
    engine_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables(0, 3, free_port()).items():
        monkeypatch.setenv(name, value)
    options = replace(OPTIONS, num_ranks=3, start_timeout_s=0.3)
    with pytest.raises(EngineError, match=r"rank 1, rank 2: absent after 0.3 s"):
        Engine.load(engine_path, ranks=options)


def test_strangers_are_turned_away() -> None:
    """Of those that connect, only ranks with the secret of the store are taken."""
    port = free_port()
    leader = Rendezvous(Launched(0, 2, 2, 0, "127.0.0.1", port, False, "t/0"), OPTIONS)
    follower = Rendezvous(Launched(1, 2, 2, 1, "127.0.0.1", port, False, "t/0"), OPTIONS)

    class Going:
        is_closing = False

    accepted: list[Any] = []
    thread = threading.Thread(target=lambda: accepted.extend(leader.accept(Going())))  # type: ignore[arg-type]
    thread.start()
    where = json.loads(follower._open_store().get(follower._key))
    wrong = struct.pack("<4sII16s", b"spcH", 0, 1, bytes(16))
    other = struct.pack("<4sII16s", b"spcH", 0, 7, bytes.fromhex(where["secret"]))
    for greeting in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", wrong, other, b"spc"):
        with socket.create_connection((where["host"], where["port"]), 5) as stranger:
            stranger.sendall(greeting)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(10)
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""
    assert not accepted
    channels = follower.connect()
    thread.join(10)
    assert [one.rank for one in accepted] == [1]
    for channel in (*channels, accepted[0].orders, accepted[0].signs):
        channel.close()


@pytest.fixture
def launched(engine_path: Path) -> Iterator[tuple[LedProcess, subprocess.Popen[bytes]]]:
    """Rank 0, and rank 1 as a launcher would have started it."""
    port = free_port()
    ranks = {"num_ranks": 2, "timeout_s": 1.5}
    follower = subprocess.Popen(
        [sys.executable, "-P", str(SCRIPT), str(engine_path), json.dumps({"ranks": ranks})],
        env={**os.environ, **variables(1, 2, port)},
        stderr=subprocess.PIPE,
    )
    environment = variables(0, 2, port)
    try:
        with LedProcess(engine_path, ranks, environment, stage="verify", end_s=0) as led:
            yield led, follower
    finally:
        follower.kill()
        follower.wait()
        assert follower.stderr is not None
        follower.stderr.close()


@pytest.mark.slow
def test_launched_ranks_follow_over_tcp(launched) -> None:
    led, follower = launched
    led.expect("at")
    assert led.pids[1] == follower.pid
    led.answer()
    assert len(led.expect("tokens")) == 40
    assert led.ends(ENDS_S) == 0
    assert follower.wait(ENDS_S) == 0


@pytest.mark.slow
def test_a_launched_rank_that_is_killed(launched) -> None:
    led, follower = launched
    led.expect("at")
    follower.kill()
    led.answer()
    assert led.ends(ENDS_S) == 1
    # its exit code is the launcher's
    assert f"rank 1 (pid {follower.pid}, {os.uname().nodename}) has closed its" in led.errors()


@pytest.mark.slow
def test_a_launched_rank_0_that_is_killed(launched) -> None:
    led, follower = launched
    led.expect("at")
    led.process.kill()
    assert follower.wait(ENDS_S) == 1
    assert b"ends: rank 0 is gone" in follower.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_launched_rank_that_is_stopped(launched, rank: int) -> None:
    led, follower = launched
    led.expect("at")
    os.kill(led.pids[rank], signal.SIGSTOP)
    if rank == 0:
        # on another host, nobody could end it
        assert follower.wait(1.5 + ENDS_S) == 1
        assert b"rank 0 has given no sign of life for 1.5 s" in follower.stderr.read()
        os.kill(led.pids[0], signal.SIGCONT)
        assert led.process.wait(ENDS_S) == 1
    else:
        assert led.process.wait(1.5 + ENDS_S) == 1
        assert "has given no sign of life for 1.5 s" in led.errors()


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_torchrun(engine_path: Path, is_killed: bool) -> None:
    """With its own store, on the port that it gives to all ranks."""
    options = json.dumps({"ranks": {"num_ranks": 3}, "stage": "verify", "end_s": 0})
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    run = subprocess.Popen(
        [*command, str(SCRIPT), str(engine_path), options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert run.stdout is not None
        pids = json.loads(run.stdout.readline())["pids"]
        assert len(pids) == 3
        assert json.loads(run.stdout.readline()) == {"at": "verify"}
        if is_killed:
            os.kill(pids[2], signal.SIGKILL)
        out, errors = run.communicate(b"\n", 60)
        if is_killed:
            assert run.returncode == 1
            assert b"rank 2 (pid %d" % pids[2] in errors
        else:
            assert run.returncode == 0, errors.decode()
            assert len(json.loads(out)["tokens"]) == 40
    finally:
        run.kill()
        run.communicate()
