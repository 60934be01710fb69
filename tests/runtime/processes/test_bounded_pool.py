"""Children that work on data of strangers: what a job may cost, and what its end costs others."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from specc.errors import FaultError, OverloadError, RequestError
from specc.runtime.processes import bounded_pool, fork_server
from specc.runtime.processes.bounded_child import ChildLimits
from specc.runtime.processes.bounded_pool import BoundedPool, Cancellation, JobCancelled
from specc.runtime.processes.fork_server import AnswerTooLarge, ChildDied, ChildTimeout, JobFailed

HERE = Path(__file__).resolve().parent
TARGET = "bounded_jobs:Jobs"
SMALL = ChildLimits(cpu_seconds=10.0, memory_bytes=64 << 20, answer_bytes=10_000)


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    """The children look for modules where their parent does."""
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture
def pool():
    with_setup = BoundedPool(TARGET, lambda: {"from": "parent"}, SMALL, max_waiting=3)
    yield with_setup
    with_setup.close()


def in_thread(call):
    """Start a call; its result or error is in the list when the thread has ended."""
    ended = []

    def run():
        try:
            ended.append(call())
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, ended


def wait_for(condition, seconds=20.0):
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "it does not happen"
        time.sleep(0.005)


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def niceness_of(pid):
    return os.getpriority(os.PRIO_PROCESS, pid)


def test_data_and_setup_arrive_and_the_child_stays(pool):
    value = {"text": "ä\u2028\x00", "list": [1, 2.5, None, True]}
    assert pool.run(["echo", value]) == value
    assert pool.run(["setup"]) == {"from": "parent"}
    assert len({pool.run(["pid"]) for _ in range(5)}) == 1
    assert pool.run(["pid"]) != os.getpid()


def test_a_child_is_small(pool):
    """Torch and numpy would make every replacement of a child wait for seconds."""
    loaded = set(pool.run(["modules"]))
    assert not loaded & {"torch", "numpy", "tokenizers", "specc.runtime.engine"}
    assert "specc" in loaded


def test_what_a_job_prints_is_no_answer(pool, capfd):
    assert pool.run(["print"]) == "printed"
    assert pool.run(["echo", 1]) == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (["crash"], "segmentation fault"),
        (["kill", "SIGKILL"], "killed"),
        (["kill", "SIGABRT"], "memory"),
    ],
    ids=["crash", "kill", "abort"],
)
def test_a_child_that_dies_costs_its_job_only(pool, job, reason):
    before = pool.run(["pid"])
    with pytest.raises(ChildDied, match=reason):
        pool.run(job)
    assert pool.run(["pid"]) != before
    assert is_gone(before)
    assert len(pool.pids) == 1


def test_an_idle_child_that_was_killed_is_replaced(pool):
    before = pool.run(["pid"])
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: not pool.pids)
    assert pool.run(["pid"]) != before


def test_memory_is_bounded(pool):
    assert pool.run(["take", 8 << 20]) == 8 << 20
    with pytest.raises(JobFailed, match="MemoryError"):
        pool.run(["take", 3_000_000_000])
    assert pool.run(["echo", 1]) == 1


def test_an_answer_is_bounded(pool):
    with pytest.raises(AnswerTooLarge, match="at most 10000"):
        pool.run(["echo", "x" * 20_000])
    assert pool.run(["echo", 1]) == 1


def test_time_of_the_processor_is_bounded_while_the_interpreter_is_held(pool):
    with pytest.raises(ChildTimeout):
        pool.run(["spin"], cpu_seconds=0.3)
    assert pool.run(["echo", 1]) == 1


def test_time_on_the_wall_is_bounded(pool, monkeypatch):
    monkeypatch.setattr(bounded_pool, "WALL_TO_CPU", 8.0)
    with pytest.raises(OverloadError, match=r"did not end within 0\.4 s"):
        pool.run(["sleep", 60.0], cpu_seconds=0.05)
    # and the limit of one job is not that of the next
    assert pool.run(["sleep", 0.5])


def test_errors_come_back_as_what_they_are(pool):
    with pytest.raises(RequestError) as caught:
        pool.run(["refuse"])
    assert (caught.value.found, caught.value.needed, caught.value.do) == (
        "found it",
        "needed it",
        "do it",
    )
    with pytest.raises(JobFailed, match="LookupError: not there"):
        pool.run(["fail"])
    assert len(pool.pids) == 1


def test_a_setup_that_fails_is_no_fault_of_the_request():
    pool = BoundedPool(TARGET, lambda: "fails", SMALL)
    with pytest.raises(FaultError, match="no such setup"):
        pool.run(["echo", 1])
    assert pool.pids == []


def test_what_takes_long_begins_again_where_small_jobs_do_not_wait_for_it(pool):
    """Four that take long: one runs, by itself and with the least priority; others go on."""
    cancellation = Cancellation()
    long = [in_thread(lambda: pool.run(["spin"], cancellation=cancellation)) for _ in range(4)]
    wait_for(lambda: len(pool._large.running) == 1 and len(pool._large.waiting) == 3)
    begin_s = time.monotonic()
    for number in range(20):
        assert pool.run(["echo", number]) == number
    assert time.monotonic() - begin_s < 5
    assert len(pool._large.running) == 1
    (large,) = [child for child in pool._children if child not in pool._small.idle]
    assert niceness_of(large.pid) == min(19, niceness_of(0) + 10)
    assert niceness_of(pool.run(["pid"])) == min(19, niceness_of(0) + 5)
    # niceness counts between processes of one session
    assert os.getsid(large.pid) == os.getsid(0)
    cancellation.cancel()
    for thread, ended in long:
        thread.join(10)
        assert [type(error) for error in ended] == [JobCancelled]


@pytest.mark.slow
def test_a_job_of_medium_length_ends_among_large_ones(pool):
    taken = pool.run(["work", 0.3])
    assert taken["niceness"] == min(19, niceness_of(0) + 10)
    assert taken["seconds"] >= 0.3
    assert pool.run(["work", 0.0])["niceness"] == min(19, niceness_of(0) + 5)


def test_what_forks_is_replaced_when_it_has_died(pool):
    before = pool.run(["pid"])
    (server,) = pool._servers
    os.kill(server._process.pid, signal.SIGKILL)
    wait_for(lambda: not server.is_alive)
    # the child that waits goes on; the next one needs another server
    assert pool.run(["pid"]) == before
    with pytest.raises(ChildDied):
        pool.run(["crash"])
    assert pool.run(["pid"]) != before
    assert pool._servers != [server]


def test_a_setup_that_starts_threads_is_refused():
    """A fork has one thread: locks that others hold would be held for ever."""
    pool = BoundedPool(TARGET, lambda: "threads", SMALL)
    with pytest.raises(FaultError, match="2 threads"):
        pool.run(["echo", 1])


def test_a_running_job_is_cancelled(pool):
    cancellation = Cancellation()
    thread, ended = in_thread(lambda: pool.run(["sleep", 60.0], cancellation=cancellation))
    wait_for(lambda: pool.pids)
    before = pool.pids
    time.sleep(0.2)
    cancellation.cancel()
    thread.join(10)
    assert [type(error) for error in ended] == [JobCancelled]
    assert is_gone(before[0])
    with pytest.raises(JobCancelled):
        pool.run(["echo", 1], cancellation=cancellation)
    assert pool.run(["echo", 1]) == 1


def test_an_interrupted_job_leaves_no_answer_for_the_next(pool):
    """Ctrl-C in the thread that waits: the child would still answer."""
    assert pool.run(["echo", 1]) == 1
    timer = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))

    def sleep() -> None:
        timer.start()
        pool.run(["sleep", 10.0])

    with pytest.raises(KeyboardInterrupt):
        sleep()
    assert pool.run(["echo", 2]) == 2


def test_places_are_bounded_and_one_is_for_small_jobs(pool):
    """Two large jobs: one runs, one waits; small ones go on beside, and the queue has an end."""
    cancellation = Cancellation()
    large = [
        in_thread(lambda: pool.run(["sleep", 60.0], is_large=True, cancellation=cancellation))
        for _ in range(4)
    ]
    wait_for(lambda: len(pool._large.waiting) == 3)
    with pytest.raises(OverloadError, match="3 of the same kind wait"):
        pool.run(["echo", 1], is_large=True)
    assert pool.run(["echo", 1]) == 1
    wait_for(lambda: len(pool.pids) == 2)
    cancellation.cancel()
    for thread, ended in large:
        thread.join(10)
        assert [type(error) for error in ended] == [JobCancelled]


def test_a_job_does_not_wait_for_ever():
    pool = BoundedPool(TARGET, lambda: None, SMALL, num_small=1, max_wait_s=0.2)
    thread, _ = in_thread(lambda: pool.run(["sleep", 60.0]))
    wait_for(lambda: pool.pids)
    with pytest.raises(OverloadError, match="waited"):
        pool.run(["echo", 1])
    pool.close()
    thread.join(10)


def test_closing_ends_what_runs_and_what_waits(pool):
    jobs = [in_thread(lambda: pool.run(["sleep", 60.0])) for _ in range(4)]
    wait_for(lambda: len(pool.pids) == 2 and len(pool._small.waiting) == 2)
    pids = pool.pids
    pool.close()
    for thread, ended in jobs:
        thread.join(10)
        assert [type(error) for error in ended] == [OverloadError]
    assert all(is_gone(pid) for pid in pids)


PARENT = """
import contextlib, os, sys, threading, time
sys.path.insert(0, sys.argv[1])
# a host program whose `sys.executable` is no Python
sys.executable = "/usr/bin/env"
from specc.runtime.processes.bounded_child import ChildLimits
from specc.runtime.processes.bounded_pool import BoundedPool

pool = BoundedPool("bounded_jobs:Jobs", lambda: None, ChildLimits())
print(pool.run(["pid"]), flush=True)

def sleep():
    # its child ends with this program, at times before this thread does
    with contextlib.suppress(Exception):
        pool.run(["sleep", 60.0])

threading.Thread(target=sleep, daemon=True).start()
time.sleep(0.2)
if sys.argv[2] == "stays":
    time.sleep(60)
"""


@pytest.mark.parametrize("end", ["killed", "returns"])
def test_children_end_with_their_parent_and_never_keep_it(end):
    """Of a script without a main guard, embedded where `sys.executable` names another program."""
    how = "stays" if end == "killed" else "returns"
    command = [sys.executable, "-P", "-c", PARENT, str(HERE), how]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as parent:
        pid = int(parent.stdout.readline())
        if end == "killed":
            # the terminal's Ctrl-C is none of the child's business
            os.kill(pid, signal.SIGINT)
            time.sleep(0.2)
            assert not is_gone(pid)
            parent.kill()
        assert parent.wait(10) == (-9 if end == "killed" else 0)
        assert parent.stderr.read() == ""
    wait_for(lambda: is_gone(pid), 5)


def test_a_fork_leaves_the_children_to_the_parent():
    """Two processes that talk to one child would read each other's answers."""
    pool = BoundedPool(TARGET, lambda: None, SMALL, num_small=1, max_wait_s=2.0)
    before = pool.run(["pid"])
    # a place that is taken in the parent is free in the fork
    thread, _ = in_thread(lambda: pool.run(["sleep", 60.0]))
    wait_for(lambda: pool._small.running)
    read_end, write_end = os.pipe()
    fork = os.fork()
    if not fork:
        code = 1
        try:
            os.write(write_end, str(pool.run(["pid"])).encode())
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(fork, 0)[1] == 0
    assert int(os.read(read_end, 100)) != before
    os.close(read_end)
    os.close(write_end)
    assert pool.pids == [before]
    pool.close()
    thread.join(10)


@pytest.mark.parametrize("what", ["files for the sockets", "a process"])
def test_no_room_for_a_child_is_overload(monkeypatch, what):
    """Many connections may hold all files for a moment: the client should come again."""
    pool = BoundedPool(TARGET, lambda: None, SMALL, num_small=1)

    def fail(*arguments, **options):
        raise OSError(errno.EMFILE if what != "a process" else errno.EAGAIN, "none left")

    with monkeypatch.context() as patch:
        if what == "a process":
            patch.setattr(fork_server.subprocess, "Popen", fail)
        else:
            patch.setattr(fork_server.socket, "socketpair", fail)
        with pytest.raises(OverloadError, match="no room for a child process: none left"):
            pool.run(["echo", 1])
    assert pool.run(["echo", 1]) == 1
    pool.close()
