"""A few child processes for the jobs of many threads: bounded, fair to small ones, cancellable."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from specc.errors import FaultError, OverloadError
from specc.runtime.processes.bounded_child import WALL_TO_CPU, BoundedChild, ChildLimits
from specc.runtime.processes.fork_server import ChildError, ChildStarved, ChildTimeout, ForkServer

# seconds of the processor from which on a job counts as large: it begins again, among those
SMALL_CPU_S = 0.1
# of children with large jobs, beside that of all: they get a tenth of a busy core
_LARGE_NICENESS = 5


class JobCancelled(Exception):
    """Nobody waits for the job any more."""


class Cancellation:
    """Ends work that nobody waits for any more; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Callable[[], object]] = []
        self.is_cancelled = False

    def cancel(self) -> None:
        # all of it under the lock: whoever has left `calling` is not called any more
        with self._lock:
            self.is_cancelled = True
            for call in self._calls:
                call()

    @contextlib.contextmanager
    def calling(self, call: Callable[[], object]) -> Iterator[None]:
        """While this is open, `cancel` calls; at once, where it was called before."""
        with self._lock:
            is_late = self.is_cancelled
            if not is_late:
                self._calls.append(call)
        if is_late:
            call()
        try:
            yield
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._calls.remove(call)


class _Turn:
    """One job that waits or runs."""


class _Lane:
    """Jobs of one kind, and the children that they have.

    Args:
        num_places: jobs that run at a time.
        niceness: of the children, beside that of all.
    """

    def __init__(self, num_places: int, niceness: int) -> None:
        self.num_places = num_places
        self.niceness = niceness
        self.waiting: list[_Turn] = []
        self.running: list[_Turn] = []
        self.idle: list[BoundedChild] = []

    def is_next(self, turn: _Turn) -> bool:
        """Whether it may run now: there is a place, and nobody else has waited for longer."""
        has_place = len(self.running) < self.num_places
        return has_place and (not self.waiting or self.waiting[0] is turn)


class BoundedPool:
    """Children that run one function of specc; started with the first job that needs them.

    A job begins among small ones. Where it turns out to take long it is ended, and begins again
    among the large, of which fewer run, and only with what small ones leave of the processor.
    Children end with this process, however it ends, and never keep it.

    Args:
        target: see `ForkServer`.
        setup: makes the plain data that children are set up with, when the first one is started.
        num_small: small jobs that run at a time.
        num_large: likewise of large ones.
        max_waiting: jobs of one kind that wait for a child, at most.
        max_wait_s: seconds that a job waits for a child, at most.
    """

    def __init__(
        self,
        target: str,
        setup: Callable[[], Any],
        limits: ChildLimits,
        *,
        num_small: int = 2,
        num_large: int = 1,
        max_waiting: int = 64,
        max_wait_s: float = 10.0,
    ) -> None:
        self._target = target
        self._setup = setup
        self._setup_json: bytes | None = None
        self._limits = limits
        self._num_places = num_small, num_large
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        # more, where the first job of each child has something to prepare
        self.small_cpu_s = SMALL_CPU_S
        self._is_closed = False
        self._forget()

    def run(
        self,
        data: Any,
        *,
        is_large: bool = False,
        cpu_seconds: float | None = None,
        cancellation: Cancellation | None = None,
        then: Callable[[Any], Any] | None = None,
    ) -> Any:
        """The answer to one job; waits for it, in any thread.

        Args:
            data: plain data, that the function takes.
            is_large: it takes long, as far as its size tells.
            cpu_seconds: of the processor, instead of those of the limits.
            then: called here with the answer, while the job keeps its place among the few that
                run; what it returns is returned. Not cancelled.
        Raises:
            SpeccError: as the function raised it.
            ChildError: there is no answer.
            OverloadError: too many jobs wait, this one has waited for too long or got too little
                of the processor, or the pool was closed.
            FaultError: no child starts.
            JobCancelled: by `cancellation`.
        """
        if self._pid != os.getpid():  # a fork: the children are the parent's
            self._forget()
        cancellation = cancellation or Cancellation()
        limit_s = self._limits.cpu_seconds if cpu_seconds is None else cpu_seconds
        seconds = limit_s * WALL_TO_CPU
        if not is_large and limit_s > self.small_cpu_s:
            try:
                return self._run(self._small, data, self.small_cpu_s, seconds, cancellation, then)
            except ChildTimeout:
                is_large = True
        lane = self._large if is_large else self._small
        return self._run(lane, data, limit_s, seconds, cancellation, then)

    def close(self) -> None:
        """End all children, and with them the jobs that wait or run."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for child in [*self._children]:
            child.end()
        for server in self._servers:
            server.close()
        self._end_all()

    @property
    def pids(self) -> list[int]:
        """Of the children that work, or wait for work."""
        with self._changed:
            idle = self._small.idle
            return [c.pid for c in self._children if c not in idle or c.is_alive]

    @property
    def num_open(self) -> tuple[int, int]:
        """Jobs that run, and jobs that wait for a child."""
        lanes = self._small, self._large
        return sum(len(x.running) for x in lanes), sum(len(x.waiting) for x in lanes)

    def _run(
        self,
        lane: _Lane,
        data: Any,
        cpu_seconds: float,
        seconds: float,
        cancellation: Cancellation,
        then: Callable[[Any], Any] | None,
    ) -> Any:
        with self._turn(lane, cancellation):
            answer = self._answer(lane, data, cpu_seconds, seconds, cancellation)
            return answer if then is None else then(answer)

    def _answer(
        self,
        lane: _Lane,
        data: Any,
        cpu_seconds: float,
        seconds: float,
        cancellation: Cancellation,
    ) -> Any:
        try:
            child = self._take(lane)
        except FaultError as error:
            if self._is_closed:  # by what has ended the process that forks
                raise _closed() from error
            raise
        try:
            with cancellation.calling(child.kill):
                return child.call(data, cpu_seconds, seconds)
        except ChildError as error:
            if cancellation.is_cancelled:
                raise JobCancelled from error
            if self._is_closed:
                raise _closed() from error
            if isinstance(error, ChildStarved):
                raise _overloaded(f"{error}: others have the processor") from error
            raise
        finally:
            self._give_back(lane, child)

    def _forget(self) -> None:
        self._pid = os.getpid()
        # one thread at a time sets up what forks
        self._starting = threading.Lock()
        # guards what follows
        self._changed = threading.Condition()
        self._servers: list[ForkServer] = []
        self._children: list[BoundedChild] = []
        num_small, num_large = self._num_places
        self._small, self._large = _Lane(num_small, 0), _Lane(num_large, _LARGE_NICENESS)
        # before the interpreter ends, so that no warning of a child that lives is printed
        self._end_all = weakref.finalize(self, _close_all, self._pid, self._servers, self._children)

    @contextlib.contextmanager
    def _turn(self, lane: _Lane, cancellation: Cancellation) -> Iterator[None]:
        turn = _Turn()
        with cancellation.calling(self._wake):
            self._wait_for(lane, turn, cancellation)
        try:
            yield
        finally:
            with self._changed:
                lane.running.remove(turn)
                self._changed.notify_all()

    def _wait_for(self, lane: _Lane, turn: _Turn, cancellation: Cancellation) -> None:
        def is_over() -> bool:
            return self._is_closed or cancellation.is_cancelled

        with self._changed:
            if len(lane.waiting) >= self._max_waiting and not lane.is_next(turn):
                raise _overloaded(f"{len(lane.waiting)} of the same kind wait already")
            lane.waiting.append(turn)
            try:
                is_in_time = self._changed.wait_for(
                    lambda: is_over() or lane.is_next(turn), self._max_wait_s
                )
            finally:
                lane.waiting.remove(turn)
                self._changed.notify_all()
            if cancellation.is_cancelled:
                raise JobCancelled
            if self._is_closed:
                raise _closed()
            if not is_in_time:
                raise _overloaded(f"it has waited for {self._max_wait_s:g} s")
            lane.running.append(turn)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _take(self, lane: _Lane) -> BoundedChild:
        while True:
            with self._changed:
                child = lane.idle.pop() if lane.idle else None
            if child is None:
                break
            if child.is_alive:
                return child
            self._drop(child)
        child = BoundedChild(self._server(), self._limits, lane.niceness)
        with self._changed:
            self._children.append(child)
            is_late = self._is_closed
        if is_late:
            child.kill()
        return child

    def _server(self) -> ForkServer:
        """What forks; started by the first that needs it."""
        with self._starting:
            while self._servers:
                if self._servers[-1].is_alive:
                    return self._servers[-1]
                self._servers.pop().close()
            if self._setup_json is None:
                # once: a vocabulary takes a while, in which nothing else runs
                self._setup_json = json.dumps(self._setup()).encode()
            limits = self._limits
            server = ForkServer(
                self._target,
                self._setup_json,
                limits.start_seconds,
                limits.memory_bytes,
                limits.stack_bytes,
            )
            self._servers.append(server)
        if self._is_closed:
            server.close()
            raise _closed()
        return server

    def _give_back(self, lane: _Lane, child: BoundedChild) -> None:
        # the memory of a large job goes with its child; a fork is quick
        if lane is self._small and child.is_alive and not self._is_closed:
            with self._changed:
                lane.idle.append(child)
        else:
            self._drop(child)

    def _drop(self, child: BoundedChild) -> None:
        child.close()
        with self._changed:
            if child in self._children:
                self._children.remove(child)


def _close_all(pid: int, servers: list[ForkServer], children: list[BoundedChild]) -> None:
    if pid == os.getpid():
        for child in [*children]:
            child.kill()
        for server in servers:
            server.kill()


def _overloaded(found: str) -> OverloadError:
    return OverloadError(f"a job that has no place: {found}", "fewer at a time", "try again later")


def _closed() -> OverloadError:
    return OverloadError(
        "a job of a process that is about to stop", "one that goes on", "send it to another one"
    )
