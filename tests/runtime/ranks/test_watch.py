"""What rank 0 makes of what it hears, and of silence: against followers that a test plays."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.errors import EngineError, RankError, SpeccError
from specc.runtime.ranks import rank_options
from specc.runtime.ranks.channel import Channel
from specc.runtime.ranks.job import Follower, Job
from specc.runtime.ranks.leader import end_job
from specc.runtime.ranks.lost_rank import ended, state_of
from specc.runtime.ranks.orders import Kind, Message, beat, json_message, json_of
from specc.runtime.ranks.rank_group import Copies
from specc.runtime.ranks.rank_options import RankOptions
from specc.runtime.ranks.watch import Watch

FACTS = {"specc": "1", "torch": "2", "engine": "abc"}
LIMIT_S = 1.0


class Player:
    """A follower whose every word a test says."""

    def __init__(self, rank: int) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.rank = rank
        self.orders, self.signs = (Channel(pair[1]) for pair in pairs)
        self.follower = Follower(rank, *(Channel(pair[0]) for pair in pairs))
        self.done = self.position = 0
        self.is_beating = True
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def hello(self, **changes: str) -> None:
        data = {"pid": 4700 + self.rank, "host": "h", **FACTS, **changes}
        self.signs.send(json_message(Kind.HELLO, data))

    def start(self) -> None:
        self.hello()
        self.signs.send(Message(Kind.READY))
        self._thread.start()

    def _beat(self) -> None:
        while self.is_beating:
            try:
                self.signs.send(beat(self.done, self.position))
            except OSError:
                return
            time.sleep(0.05)


class Game:
    """A job and its players.

    Args:
        num_ranks: rank 0 included.
        options: of `RankOptions`.
    """

    def __init__(self, num_ranks: int = 3, **options: Any) -> None:
        self.players = [Player(rank) for rank in range(1, num_ranks)]
        given = {"timeout_s": LIMIT_S, "ends_process": False, **options}
        self.job = Job(RankOptions(num_ranks, **given), FACTS, {"x": 1}, Copies(0, num_ranks))
        self.watch = Watch(self.job, lambda job: iter([p.follower for p in self.players]))

    def start(self) -> None:
        self.watch.start()
        for player in self.players:
            player.start()
        self.job.wait_ready()

    def lost(self, seconds: float = 5.0) -> SpeccError:
        """Wait until the job is given up; returns why."""
        self.watch.join(seconds)
        assert not self.watch.is_alive()
        assert self.job.failure is not None
        return self.job.failure


@pytest.fixture
def play() -> Iterator[Callable[..., Game]]:
    games: list[Game] = []

    def make(*args: Any, **options: Any) -> Game:
        games.append(Game(*args, **options))
        return games[-1]

    yield make
    for game in games:
        for player in game.players:
            player.is_beating = False
            player.signs.close()
            player.orders.close()
        end_job(game.job, game.watch)


def test_all_get_the_same_orders_after_what_they_have_to_load(play) -> None:
    game = play()
    game.start()
    numbers = [game.job.order(Kind.PASS, (torch.arange(4), None), 0), game.job.order(Kind.COMMIT)]
    assert numbers == [1, 2]
    for player in game.players:
        first = player.orders.receive()
        assert json_of(first) == {"x": 1, "rank": player.rank, "group": "copies"}
        second, third = player.orders.receive(), player.orders.receive()
        assert (second.kind, second.sequence, third.kind) == (Kind.PASS, 1, Kind.COMMIT)
        assert second.tensors[0].tolist() == [0, 1, 2, 3]
        assert second.tensors[1] is None


@pytest.mark.slow
def test_nobody_is_lost_who_beats_and_has_nothing_to_do(play) -> None:
    game = play()
    game.start()
    time.sleep(2 * LIMIT_S)
    assert game.job.failure is None
    assert game.watch.is_alive()


@pytest.mark.slow
def test_who_gets_on_slowly_is_not_lost(play) -> None:
    game = play()
    game.start()
    for _ in range(4):
        game.job.order(Kind.COMMIT)
    for number in range(1, 4):
        time.sleep(LIMIT_S / 2)
        for player in game.players:
            player.done = number
    assert game.job.failure is None


GONE = RankError("a collective of rank 0 failed", "all ranks", "start again")


@pytest.mark.parametrize(
    "error",
    [GONE, RuntimeError(f"{GONE}\nException raised from a compiled program")],
    ids=["alone", "in-a-program"],
)
def test_a_collective_that_fails_waits_for_its_cause(play, error: Exception) -> None:
    """Rank 0 feels that another is gone before its watch sees which."""
    game = play()
    game.start()
    player = game.players[1]

    def vanish() -> None:
        player.is_beating = False
        player.signs.close()

    later = threading.Timer(0.3, vanish)
    later.start()
    try:
        game.job.fail_of(error)
    finally:
        later.join()
    assert "rank 2 (pid 4702, h) has closed its connection" in str(game.lost())


def test_what_fails_on_rank_0_alone_is_said_at_once(play) -> None:
    game = play()
    game.start()
    begin_s = time.monotonic()
    game.job.fail_of(ZeroDivisionError("of rank 0"))
    assert time.monotonic() - begin_s < 2
    assert "ZeroDivisionError: of rank 0" in str(game.lost())


def test_a_silent_rank_is_named(play) -> None:
    game = play()
    game.start()
    game.players[1].is_beating = False
    begin_s = time.monotonic()
    assert game.lost().found == f"rank 2 (pid 4702, h) has given no sign of life for {LIMIT_S:g} s"
    assert time.monotonic() - begin_s < LIMIT_S + 2


def test_silence_counts_before_a_long_order_does(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_options, "_SILENT_S", LIMIT_S)
    game = play(timeout_s=5 * LIMIT_S)
    game.start()
    game.job.order(Kind.PASS)
    time.sleep(2 * LIMIT_S)
    assert game.job.failure is None
    game.players[0].is_beating = False
    found = f"rank 1 (pid 4701, h) has given no sign of life for {LIMIT_S:g} s"
    assert game.lost(2 * LIMIT_S + 1).found == found


def test_a_silent_rank_is_named_not_those_who_wait_for_it(play) -> None:
    """In a collective all stand still; the others still beat when their time is over."""
    game = play(timeout_s=2.0)
    game.start()
    game.job.order(Kind.PASS)
    time.sleep(0.5)
    game.players[1].is_beating = False
    assert "rank 2 (pid 4702, h) has given no sign" in game.lost().found


@pytest.mark.parametrize("late", [1, 2])
def test_a_rank_that_does_not_get_on_is_named(play, late: int) -> None:
    """Of those that wait for each other, it is the one that has come less far."""
    game = play()
    game.start()
    for _ in range(3):
        game.job.order(Kind.PASS)
    for player in game.players:
        player.done = 2
        player.position = 10 if player.rank == late else 11
    found = game.lost().found
    assert found.startswith(f"rank {late} (pid {4700 + late}, h) does not get on with order 3 of 3")


@pytest.mark.slow
def test_a_rank_that_gives_orders_no_end_is_named(play) -> None:
    """It beats, but reads nothing: whoever writes to it is woken with the cause."""
    game = play(2)
    game.start()

    def give() -> None:
        while True:
            game.job.order(Kind.PASS, (torch.zeros(1 << 16),))

    with pytest.raises(RankError, match=r"rank 1 \(pid 4701, h\) does not get on with order 1 of"):
        give()


def test_a_rank_that_hangs_up_is_named(play) -> None:
    game = play()
    game.start()
    game.players[0].is_beating = False
    game.players[0].signs.close()
    assert game.lost().found == "rank 1 (pid 4701, h) has closed its connection, idle"


def test_a_rank_that_sends_garbage_is_named(play) -> None:
    game = play()
    game.start()
    game.players[0].signs.send_bytes(b"HTTP/1.1 200 OK\r\n" * 4)
    found = game.lost().found
    assert found.startswith("rank 1 (pid 4701, h) sent bytes that are no message of a rank: b'HTTP")


def test_a_rank_that_reports_an_error_is_quoted(play) -> None:
    game = play()
    game.start()
    game.job.order(Kind.PASS)
    game.players[1].signs.send(json_message(Kind.ERROR, {"found": "no room", "do": "x"}))
    failure = game.lost()
    assert isinstance(failure, RankError)
    assert failure.found == "rank 2 (pid 4702, h) failed: no room"


def test_who_has_failed_is_told_to_the_others(play) -> None:
    game = play()
    game.start()
    game.players[0].signs.send(json_message(Kind.ERROR, {"found": "no room"}))
    game.lost()
    heard = [message.kind for message in game.players[1].signs.received()]
    assert Kind.ERROR in heard
    assert game.players[1].signs.is_ended


def test_an_error_while_loading_is_the_engines(play) -> None:
    game = play(2)
    game.watch.start()
    game.players[0].hello()
    error = {"found": "target/weights is missing", "needed": "a file", "do": "copy it"}
    game.players[0].signs.send(json_message(Kind.ERROR, error))
    with pytest.raises(EngineError, match=r"rank 1 \(pid 4701, h\): target/weights is missing"):
        game.job.wait_ready()


@pytest.mark.parametrize("name", [*FACTS])
def test_ranks_share_versions_and_engine(play, name: str) -> None:
    game = play(2)
    game.watch.start()
    game.players[0].hello(**{name: "other"})
    with pytest.raises(EngineError, match=rf"rank 1 .* with {name} other\nneeded: {name}"):
        game.job.wait_ready()


def test_a_rank_that_never_gets_ready_is_named(play) -> None:
    game = play(3, timeout_s=20.0, start_timeout_s=0.8)
    game.watch.start()
    game.players[0].start()
    game.players[1].hello()
    with pytest.raises(EngineError, match=r"rank 2 \(pid 4702, h\): not ready after 0.8 s"):
        game.job.wait_ready()


def test_loading_may_take_longer_than_an_order(play) -> None:
    game = play(2, start_timeout_s=20.0)
    game.watch.start()
    player = game.players[0]
    player.hello()
    player._thread.start()
    time.sleep(2 * LIMIT_S)
    player.signs.send(Message(Kind.READY))
    game.job.wait_ready()
    game.job.order(Kind.PASS)
    time.sleep(LIMIT_S / 3)
    assert game.job.failure is None


def test_ranks_hear_of_the_end(play) -> None:
    game = play()
    game.start()
    ending = threading.Thread(target=end_job, args=(game.job, game.watch))
    ending.start()
    for player in game.players:
        kinds = [player.orders.receive().kind for _ in range(2)]
        assert kinds == [Kind.SETUP, Kind.END]
        player.is_beating = False
        player.signs.close()
    ending.join(3)
    assert not ending.is_alive()
    with pytest.raises(RankError, match="told to end"):
        game.job.order(Kind.PASS)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "has closed its connection"),
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-9, "was killed by signal 9 (SIGKILL)"),
        (-11, "was killed by signal 11 (SIGSEGV)"),
        (-60, "was killed by signal 60"),
    ],
)
def test_ends_have_words(code: int | None, words: str) -> None:
    assert ended(code) == words


def comes_to(pid: int, state: str) -> bool:
    deadline = time.monotonic() + 10
    while state_of(pid) != state and time.monotonic() < deadline:
        time.sleep(0.01)
    return state_of(pid) == state


def test_states_have_words() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        # first it reads its packages, for which it may wait for the disk
        assert comes_to(process.pid, "")
        os.kill(process.pid, signal.SIGSTOP)
        assert comes_to(process.pid, ": it is stopped")
    finally:
        process.kill()
        process.wait()
    assert not Path(f"/proc/{process.pid}").exists()
    assert state_of(process.pid) == ""
