"""Groups of ranks: who opens them, and what the others are told when one dies, hangs or strays."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.errors import RankError
from specc.kernels import native
from specc.kernels.ranks import rank_error
from specc.runtime.ranks.group import SharedGroup
from tests.rank_processes import rank_processes, run_ranks, timed_error

TRANSPORTS = ("shared", "sockets")
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    native.load()


def add(*values: float) -> Any:
    return torch.ops.specc_cpu.all_reduce(torch.tensor(values))


def wait_for_one_that_never_comes(group: SharedGroup, met: Any) -> tuple[str, float, str]:
    """Rank 2 sleeps after the first collective; what the others are told, and when."""
    add(1.0)
    met.release()
    if group.rank == 2:
        time.sleep(60)
    text, seconds = timed_error(add, 2.0)
    # nobody goes on with a group that has failed
    again, _ = timed_error(add, 3.0)
    return text, seconds, again


@pytest.mark.parametrize(
    ("number", "transport"),
    [
        pytest.param(signal.SIGKILL, "shared", id="kill-shared", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, "sockets", id="kill-sockets"),
        pytest.param(signal.SIGSTOP, "shared", id="stop-shared"),
        pytest.param(signal.SIGSTOP, "sockets", id="stop-sockets", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_gone_or_hangs(number, transport):
    """The time limit ends the wait and names the rank; over TCP death is seen at once."""
    options = {"transport": transport, "time_limit": 3.0}
    met = FORK.Semaphore(0)
    with rank_processes(3, wait_for_one_that_never_comes, met, **options) as ranks:
        for _ in range(3):
            assert met.acquire(timeout=20)
        ranks.signal(2, number)
        answers = [ranks.result(rank, 20) for rank in (0, 1)]
        pid = ranks.processes[2].pid
    for text, seconds, again in answers:
        error = rank_error(RuntimeError(text))
        assert error is not None
        assert "rank 2" in error.found
        assert "rank 1" not in error.found
        assert "all_reduce of float32 [1, 1] (collective 2)" in error.found
        assert "last collective 1" in error.found
        assert f"pid {pid}" in error.found
        assert "3.0 s" in error.needed
        assert again == text
        if number == signal.SIGSTOP:
            assert seconds > 2.0
        elif transport == "sockets":
            assert seconds < 2.0
    if transport == "shared":
        # the heart of a process that is stopped or dead does not beat
        ages = [
            float(x) for text, _, _ in answers for x in re.findall(r"heartbeat ([\d.]+) s", text)
        ]
        assert ages
        assert min(ages) > 0.5


def wait_for_a_watcher(group: SharedGroup) -> tuple[str, float]:
    """Rank 1 hangs; a thread of rank 0, as a watcher would, ends the wait of all."""
    begin = time.monotonic()
    if group.rank == 0:
        threading.Timer(0.5, group.abort, ("rank 1 (pid 4711) was killed by signal 9",)).start()
    if group.rank == 1:
        time.sleep(60)
    text, _ = timed_error(add, 1.0)
    return text, time.monotonic() - begin


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_abort_wakes_all(transport):
    options = {"transport": transport, "time_limit": 50.0}
    with rank_processes(3, wait_for_a_watcher, **options) as ranks:
        answers = [ranks.result(rank, 20) for rank in (0, 2)]
    for text, _ in answers:
        assert text.startswith("found:  rank 1 (pid 4711) was killed by signal 9\nneeded: ")
    # rank 2 may have come later than the rank whose timer it is
    assert answers[0][1] > 0.4


def leave_early(group: SharedGroup) -> str | None:
    """Rank 1 ends in an error of its own."""
    add(1.0)
    if group.rank == 1:
        return None
    return timed_error(add, 2.0)[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_closes_the_group(transport):
    with rank_processes(3, leave_early, transport=transport, time_limit=50.0) as ranks:
        texts = [ranks.result(rank, 10) for rank in (0, 2)]
        pid = ranks.processes[1].pid
    for text in texts:
        assert f"rank 1 (pid {pid}) has closed the group" in text


def disagree(group: SharedGroup, kind: str) -> tuple[str, float]:
    """Rank 1 calls something else; the last rank agrees with rank 0."""
    operators = torch.ops.specc_cpu
    add(1.0)
    x = torch.ones(4, 8)
    strayed = {
        "size": lambda: operators.all_reduce(torch.ones(4, 9)),
        "shape": lambda: operators.all_reduce(torch.ones(8, 4)),
        "dtype": lambda: operators.all_reduce(torch.ones(4, 16, dtype=torch.bfloat16)),
        "kind": lambda: operators.gather_rows(x),
        "large": lambda: operators.all_reduce(torch.ones(512, 512)),
    }
    if group.rank == 1:
        return timed_error(strayed[kind])
    return timed_error(operators.all_reduce, x)


@pytest.mark.default("shape-shared", "shape-sockets", "kind-shared")
@pytest.mark.parametrize(
    ("kind", "transport"),
    [
        pytest.param(
            kind,
            transport,
            marks=[] if transport == "shared" or kind == "shape" else [pytest.mark.slow],
        )
        for kind in ("size", "shape", "dtype", "kind", "large")
        for transport in TRANSPORTS
    ],
)
def test_ranks_that_disagree(kind, transport):
    answers = run_ranks(3, disagree, kind, transport=transport, time_limit=20.0)
    for text, seconds in answers:
        assert seconds < 5
        error = rank_error(RuntimeError(text))
        assert error is not None
        assert "rank 1 calls" in error.found
        assert error.found.count(" calls ") == 2
        assert error.needed == "the same collective on every rank"
    if transport == "shared":
        assert len({text for text, _ in answers}) == 1


def count_calls(group: SharedGroup, looked: Any) -> list[Any]:
    for _ in range(5):
        add(1.0)
    time.sleep(1.5)
    states = group.states()
    # nobody leaves before the other has looked
    looked.wait(20)
    return states


def test_what_ranks_know_of_each_other():
    for states in run_ranks(2, count_calls, FORK.Barrier(2)):
        assert [state.rank for state in states] == [0, 1]
        assert [state.num_collectives for state in states] == [5, 5]
        assert len({state.pid for state in states}) == 2
        # hearts beat every 0.2 s
        assert all(state.heartbeat_age_s < 1.2 for state in states)


@pytest.fixture
def alone() -> Any:
    """A group of two whose rank 1 never comes."""
    group = SharedGroup.create(2, time_limit=0.3)
    yield group
    group.close()


def test_ranks_that_do_not_open_it(alone):
    with pytest.raises(RankError, match=r"rank 1 not there after 0\.2 s"):
        alone.wait_for_all(0.2)


def test_one_group_at_a_time(alone):
    with pytest.raises(RankError, match="a second group of ranks in this process"):
        SharedGroup.create(1)
    assert alone.position == 0


def test_a_closed_group(alone):
    alone.close()
    alone.close()
    with pytest.raises(RuntimeError, match="a process that is no rank"):
        add(1.0)
    with pytest.raises(RankError, match="a process that is no rank"):
        torch.ops.specc.all_reduce(torch.ones(1))
    again = SharedGroup.create(1)
    assert torch.ops.specc.all_reduce(torch.ones(1)).tolist() == [1.0]
    again.close()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 1.0, 4096), "0 ranks"),
        ((65, 1.0, 4096), "65 ranks"),
        ((2, 0.0, 4096), "a time limit of 0"),
        ((2, float("nan"), 4096), "a time limit of nan"),
        ((2, 1.0, 100), "slots of 100 bytes"),
        ((2, 1.0, 2**40), "slots of 1099511627776 bytes"),
    ],
)
def test_groups_that_cannot_be(values, message):
    num_ranks, time_limit, slot_bytes = values
    with pytest.raises(RankError, match=message):
        SharedGroup.create(num_ranks, time_limit, slot_bytes)


OPEN = """
import sys
from specc.errors import RankError
from specc.kernels import native
native.load()
from specc.runtime.ranks.group import SharedGroup
for call in sys.argv[1:]:
    ticket, rank, num_ranks = call.rsplit(",", 2)
    try:
        SharedGroup.open(ticket, int(rank), int(num_ranks))
        print("opened", end="\\0")
    except RankError as error:
        print(error, end="\\0")
"""


def open_elsewhere(*calls: tuple[object, int, int]) -> list[str]:
    """What another process hears that opens (ticket, rank, number of ranks), one by one."""
    texts = [",".join(map(str, call)) for call in calls]
    command = [sys.executable, "-P", "-c", OPEN, *texts]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\0")[:-1]


@pytest.mark.slow
def test_who_may_open_it(alone, tmp_path):
    (tmp_path / "other").write_bytes(b"specc-interface:" + bytes(100_000))
    (tmp_path / "empty").write_bytes(b"")
    said = open_elsewhere(
        (alone.ticket, 1, 3),
        (alone.ticket, 2, 2),
        (alone.ticket, 0, 2),
        (tmp_path / "other", 1, 2),
        (tmp_path / "empty", 1, 2),
        (tmp_path / "none", 1, 2),
        (alone.ticket, 1, 2),
    )
    expected = (
        "found:  a group of 2 ranks\nneeded: one of 3",
        "found:  rank 2\nneeded: 0 … 1",
        f"opened by process {os.getpid()} already",
        "is no shared memory of ranks",
        "is no shared memory of ranks",
        "cannot be opened",
        "opened",
    )
    assert len(said) == len(expected)
    for text, part in zip(said, expected, strict=True):
        assert part in text
    alone.wait_for_all(1)
    # the number of the descriptor is that of another file since, or of none
    assert open_elsewhere((alone.ticket, 1, 2)) != ["opened"]


def test_nothing_is_left_of_killed_ranks():
    def files() -> set[Path]:
        places = (Path("/dev/shm"), Path("/tmp"))
        return {path for place in places for path in place.glob("*specc-ranks*")}

    before = files()
    with rank_processes(2, wait_for_a_watcher, time_limit=30.0) as ranks:
        maps = Path(f"/proc/{ranks.processes[0].pid}/maps")
        end = time.monotonic() + 20
        while "memfd:specc-ranks (deleted)" not in maps.read_text(encoding="utf-8"):
            assert time.monotonic() < end, "no shared memory"
            time.sleep(0.02)
        for rank in (0, 1):
            ranks.signal(rank, signal.SIGKILL)
    # another worker's file of that name is there for a moment, where memory has no descriptor
    left, end = files() - before, time.monotonic() + 20
    while left and time.monotonic() < end:
        time.sleep(0.1)
        left &= files()
    assert not left


@pytest.mark.slow
def test_a_group_imports_nothing_of_torch_distributed():
    """What torch imports by itself is not counted."""
    code = """
        import sys
        import torch
        before = set(sys.modules)
        from specc.kernels import native
        from specc.runtime.ranks.group import SharedGroup
        native.load()
        group = SharedGroup.create(1)
        torch.ops.specc.all_reduce(torch.ones(2))
        group.close()
        new = {name for name in sys.modules if name.startswith("torch.distributed")} - before
        assert not new, new
        assert "specc.runtime.ranks.sockets" not in sys.modules
        assert not torch.distributed.is_initialized()
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(code)]
    subprocess.run(command, check=True, timeout=60)


JOIN = """
import sys
import torch
from specc.errors import RankError
from specc.kernels import native
native.load()
from specc.runtime.ranks.sockets import join_sockets
try:
    group = join_sockets(sys.argv[1], int(sys.argv[2]), 2, float(sys.argv[3]))
except RankError as error:
    print(error)
else:
    print(torch.ops.specc.all_reduce(torch.tensor([2.0 + group.rank])).tolist())
    group.close()
    assert not torch.distributed.is_initialized()
"""


def join(address: str, rank: int, limit: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", JOIN, address, str(rank), str(limit)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.slow
def test_hosts_meet_at_an_address():
    address = f"tcp://127.0.0.1:{free_port()}"
    processes = [join(address, rank, 30) for rank in (0, 1)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["[5.0]\n"] * 2


@pytest.mark.slow
def test_an_address_where_nobody_is():
    said = join(f"tcp://127.0.0.1:{free_port()}", 1, 1.0).communicate(timeout=60)[0]
    assert "found:  rank 1 of 2 did not meet the others at tcp://127.0.0.1:" in said
    assert "needed: all ranks at this address within 1 s" in said
