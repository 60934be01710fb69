"""Capturing, where the operator that is captured fails: on stand-ins for torch's CUDA functions."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from specc.runtime.backends.cuda.graphs import CudaGraphs, CudaSide


class OperatorError(Exception):
    """What the operator raises: no class that cleaning up would raise by itself."""


class Cuda:
    """What was called, and functions that fail on request.

    Args:
        failing: name of a function → what it raises.
    """

    def __init__(self, failing: dict[str, Exception]) -> None:
        self.failing = failing
        self.calls: list[str] = []
        self.pools: list[Any] = []
        self.num_handles = 0
        # pool → graphs that live in it; torch forgets none, and captures into none that lost all
        self.users: dict[Any, int] = {}
        self.num_lost = 0

    def done(self, name: str) -> None:
        self.calls.append(name)
        # the first handle is that of the object's construction
        if name in self.failing and (name != "graph_pool_handle" or self.num_handles):
            raise self.failing[name]

    def graph_pool_handle(self) -> tuple[int, int]:
        self.done("graph_pool_handle")
        self.num_handles += 1
        return 0, self.num_handles

    def end_allocate(self, device: int, pool: tuple[int, int]) -> None:
        assert (device, pool) == (0, (0, 1))
        self.done("endAllocateToPool")

    def graph(self) -> Any:
        cuda = self

        class Graph:
            pool: Any = None

            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                cuda.pools.append(pool)
                cuda.done("capture_begin")
                if cuda.users.get(pool) == 0:
                    raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
                self.pool = pool
                cuda.users[pool] = cuda.users.get(pool, 0) + 1

            def capture_end(self) -> None:
                cuda.done("capture_end")

            def __del__(self) -> None:
                if self.pool is not None:
                    cuda.users[self.pool] -= 1
                    cuda.num_lost += 1

        return Graph()


class Stream:
    def __init__(self, *args: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[CudaGraphs, Cuda]]:
    @contextlib.contextmanager
    def stream(current: Any) -> Iterator[None]:
        yield

    def make(**failing: Exception) -> tuple[CudaGraphs, Cuda]:
        cuda = Cuda(failing)
        for name, value in {
            "graph_pool_handle": cuda.graph_pool_handle,
            "Stream": Stream,
            "stream": stream,
            "CUDAGraph": cuda.graph,
            "current_stream": lambda device: None,
            "synchronize": lambda device: None,
            "empty_cache": lambda: None,
            "get_sync_debug_mode": lambda: 0,
            "set_sync_debug_mode": lambda mode: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", cuda.end_allocate)
        return CudaGraphs(), cuda

    return make


def fails_in_capture() -> Callable[[], None]:
    """An operator that runs once, as it does before a capture, and fails in it."""
    runs = iter([None, OperatorError("specc::attend cannot be captured")])

    def run() -> None:
        error = next(runs)
        if error is not None:
            raise error

    return run


CLEANING = ("capture_end", "endAllocateToPool", "graph_pool_handle")
ERRORS = (TypeError("incompatible function arguments"), RuntimeError("the capture is invalid"))


def test_a_side_stream_is_forked_and_joined(monkeypatch):
    """It waits for what was queued before a fork; what follows a join waits for it, no more."""
    done: list[str] = []

    class Named:
        def __init__(self, device: Any = None) -> None:
            self.name = "side"

        def wait_stream(self, other: Any) -> None:
            done.append(f"{self.name} waits for {other.name}")

    current = [Named()]
    current[0].name = "main"

    @contextlib.contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Named)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    side = CudaSide(torch.device("cuda", 0))
    with side.forked():
        done.append(f"draft on {current[-1].name}")
    done.append(f"verify on {current[-1].name}")
    side.join()
    assert done == [
        "side waits for main", "draft on side", "verify on main", "main waits for side",
    ]  # fmt: skip


def test_a_failed_capture_is_ended_and_its_pool_left(make):
    graphs, cuda = make()
    with pytest.raises(OperatorError, match="specc::attend"):
        graphs.capture(fails_in_capture())
    assert cuda.calls[-4:] == ["capture_begin", *CLEANING]
    graphs.capture(lambda: None)
    assert cuda.pools == [(0, 1), (0, 2)]


@pytest.mark.parametrize("error", ERRORS, ids=["type-error", "runtime-error"])
@pytest.mark.parametrize("names", [(name,) for name in CLEANING] + [CLEANING], ids="+".join)
def test_what_fails_while_cleaning_up_does_not_hide_the_operators_error(make, names, error):
    """A torch of another version may take other arguments: that is a TypeError."""
    graphs, cuda = make(**dict.fromkeys(names, error))
    with pytest.raises(OperatorError, match="specc::attend") as raised:
        graphs.capture(fails_in_capture())
    # all of it was tried
    assert cuda.calls[-3:] == list(CLEANING)
    # ending a capture that is invalid is an error by itself, and tells nobody anything
    notes = getattr(raised.value, "__notes__", [])
    expected = len(names) if isinstance(error, TypeError) else 0
    assert len(notes) == expected
    assert all("TypeError" in note for note in notes)
    # the next capture is in no pool that may be in any state
    cuda.failing.clear()
    graphs.capture(lambda: None)
    assert cuda.pools[-1] != (0, 1)


def test_what_fails_while_a_capture_begins_leaves_its_pool_too(make):
    """Torch routes allocations to the pool before it asks the driver."""
    graphs, cuda = make(capture_begin=OperatorError("no capture now"))
    with pytest.raises(OperatorError, match="no capture now"):
        graphs.capture(lambda: None)
    assert cuda.calls[-4:] == ["capture_begin", *CLEANING]
    cuda.failing.clear()
    graphs.capture(lambda: None)
    assert cuda.pools == [(0, 1), (0, 2)]


def test_graphs_that_nobody_keeps_live_on(make):
    """Those that were captured to be timed: others replay in their pool, and by its workspaces."""
    graphs, cuda = make()
    for _ in range(3):
        graphs.capture(lambda: None)
    assert cuda.num_lost == 0
    del graphs
    gc.collect()
    assert cuda.num_lost == 3


@pytest.mark.parametrize("is_on", [True, False])
def test_garbage_is_collected_before_a_capture_unless_that_is_off(make, monkeypatch, is_on):
    """Then none is found within the capture either."""
    graphs, _ = make()
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty"))
    monkeypatch.setattr(gc, "collect", lambda: done.append("collect"))
    monkeypatch.setattr(gc, "isenabled", lambda: is_on)
    graphs.capture(lambda: None)
    assert done == (["collect", "empty"] if is_on else [])


def test_an_interrupt_is_passed_on(make):
    graphs, _ = make(endAllocateToPool=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        graphs.capture(fails_in_capture())


def test_a_capture_that_succeeds_keeps_its_pool(make):
    graphs, cuda = make()
    graphs.capture(lambda: None)
    graphs.capture(lambda: None)
    assert cuda.pools == [(0, 1)] * 2
    assert "endAllocateToPool" not in cuda.calls
