"""A group over NCCL is left by several threads: none of them may outlive the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.kernels.reference import ranks
from specc.runtime.ranks.nccl_group import NcclRankGroup

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")


class Processes:
    """Torch's backend object of one rank, whose `abort` takes until `may_end` is set."""

    def __init__(self) -> None:
        self.num_aborts = 0
        self.begins = threading.Event()
        self.may_end = threading.Event()

    def allreduce(self, *_: Any) -> None:
        pass

    broadcast = _allgather_base = allreduce

    def abort(self) -> None:
        self.num_aborts += 1
        self.begins.set()
        assert self.may_end.wait(10)


@pytest.fixture
def processes() -> Processes:
    return Processes()


@pytest.fixture
def group(processes: Processes) -> Any:
    group = NcclRankGroup(0, 1, "", processes, CPU)
    yield group
    processes.may_end.set()
    group.close()


def started(run: Any) -> threading.Thread:
    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_the_second_to_close_waits_as_well(group: NcclRankGroup, processes: Processes) -> None:
    first = started(group.close)
    assert processes.begins.wait(10)
    second = started(group.close)
    for thread in (second, first):
        thread.join(0.2)
        assert thread.is_alive()
    processes.may_end.set()
    for thread in (second, first):
        thread.join(10)
        assert not thread.is_alive()
    assert processes.num_aborts == 1


def test_close_waits_for_what_was_aborted_before(
    group: NcclRankGroup, processes: Processes
) -> None:
    group.abort("a rank is lost")
    assert processes.begins.wait(10)
    closing = started(group.close)
    closing.join(0.2)
    assert closing.is_alive()
    processes.may_end.set()
    closing.join(10)
    assert not closing.is_alive()
    group.abort("too late")
    assert processes.num_aborts == 2


def test_operators_have_no_group_afterwards(group: NcclRankGroup, processes: Processes) -> None:
    processes.may_end.set()
    assert ranks.has_group()
    group.close()
    assert not ranks.has_group()


EXITS = """
import threading, time
from tests.runtime.ranks import test_nccl_group

class Slow(test_nccl_group.Processes):
    def abort(self):
        self.begins.set()
        time.sleep(1)

    def __del__(self):
        print("destroyed in", threading.current_thread().name, flush=True)

processes = Slow()
begins = processes.begins
group = test_nccl_group.NcclRankGroup(0, 1, "", processes, test_nccl_group.CPU)
del processes
threading.Thread(target=group.close, daemon=True).start()
assert begins.wait(10)
"""


def test_a_process_that_exits_meanwhile_waits() -> None:
    """As when the watch leaves the group while the main thread ends."""
    found = subprocess.run(
        [sys.executable, "-P", "-c", EXITS],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout == "destroyed in specc-nccl-abort\n"
