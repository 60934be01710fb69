"""A few child processes for the jobs of many threads: bounded, fair to small ones, cancellable."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from specc.errors import OverloadError
from specc.runtime.bounded_child import BoundedChild, ChildError, ChildLimits, JobFailed


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

    def __init__(self, is_large: bool) -> None:
        self.is_large = is_large


class BoundedPool:
    """Children that run one function of specc; started with the first job that needs them.

    They end with this process, however it ends, and never keep it.

    Args:
        target: see `BoundedChild`.
        setup: makes the plain data that children are set up with, when the first one is started.
        limits: of each job.
        num_children: at most; large jobs leave one of them to small ones.
        max_waiting: jobs that wait for a child, at most.
        max_wait_s: seconds that a job waits for a child, at most.
    """

    def __init__(
        self,
        target: str,
        setup: Callable[[], Any],
        limits: ChildLimits,
        *,
        num_children: int = 2,
        max_waiting: int = 64,
        max_wait_s: float = 10.0,
    ) -> None:
        self._target = target
        self._setup = setup
        self._setup_json: bytes | None = None
        self._limits = limits
        self._num_children = num_children
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
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
            cpu_seconds: see `BoundedChild.call`.
            cancellation: ends the wait, and the job.
            then: called here with the answer, while the job keeps its place among the few that
                run; what it returns is returned. Not cancelled.
        Raises:
            SpeccError: as the function raised it.
            ChildError: there is no answer.
            OverloadError: too many jobs wait, this one has waited for too long, or the pool was
                closed.
            FaultError: no child starts.
            JobCancelled: by `cancellation`.
        """
        if self._pid != os.getpid():  # a fork: the children are the parent's
            self._forget()
        cancellation = cancellation or Cancellation()
        with self._turn(is_large, cancellation):
            answer = self._answer(data, cpu_seconds, cancellation)
            return answer if then is None else then(answer)

    def close(self) -> None:
        """End all children, and with them the jobs that wait or run."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._end_children()

    @property
    def pids(self) -> list[int]:
        """Of the children that live."""
        with self._changed:
            return [child.pid for child in self._children if child.is_alive]

    def _answer(self, data: Any, cpu_seconds: float | None, cancellation: Cancellation) -> Any:
        child = self._take()
        try:
            with cancellation.calling(child.kill):
                return child.call(data, cpu_seconds)
        except ChildError as error:
            if cancellation.is_cancelled:
                raise JobCancelled from error
            if self._is_closed:
                raise _closed() from error
            if not isinstance(error, JobFailed):
                # whoever cost the child its life waits for the next one, and nobody else
                child = self._next_after(child)
            raise
        finally:
            self._give_back(child)

    def _forget(self) -> None:
        self._pid = os.getpid()
        # guards what follows
        self._changed = threading.Condition()
        self._children: list[BoundedChild] = []
        self._idle: list[BoundedChild] = []
        self._waiting: list[_Turn] = []
        self._running: list[_Turn] = []
        # before the interpreter ends, so that no warning of a child that lives is printed
        self._end_children = weakref.finalize(self, _close_all, self._pid, self._children)

    @contextlib.contextmanager
    def _turn(self, is_large: bool, cancellation: Cancellation) -> Iterator[None]:
        turn = _Turn(is_large)
        with cancellation.calling(self._wake):
            self._wait_for(turn, cancellation)
        try:
            yield
        finally:
            with self._changed:
                self._running.remove(turn)
                self._changed.notify_all()

    def _wait_for(self, turn: _Turn, cancellation: Cancellation) -> None:
        def is_over() -> bool:
            return self._is_closed or cancellation.is_cancelled

        with self._changed:
            if len(self._waiting) >= self._max_waiting and not self._is_next(turn):
                raise _overloaded(f"{len(self._waiting)} of the same kind wait already")
            self._waiting.append(turn)
            try:
                is_in_time = self._changed.wait_for(
                    lambda: is_over() or self._is_next(turn), self._max_wait_s
                )
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()
            if cancellation.is_cancelled:
                raise JobCancelled
            if self._is_closed:
                raise _closed()
            if not is_in_time:
                raise _overloaded(f"it has waited for {self._max_wait_s:g} s")
            self._running.append(turn)

    def _is_next(self, turn: _Turn) -> bool:
        """First of those that may run now."""
        if len(self._running) >= self._num_children:
            return False
        num_large = sum(other.is_large for other in self._running)
        has_room = num_large < max(1, self._num_children - 1)
        able = [other for other in self._waiting if has_room or not other.is_large]
        return able[0] is turn if able else has_room or not turn.is_large

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _take(self) -> BoundedChild:
        with self._changed:
            while self._idle:
                child = self._idle.pop()
                if child.is_alive:
                    return child
                self._drop(child)
        return self._start()

    def _start(self) -> BoundedChild:
        if self._setup_json is None:
            # once: a vocabulary takes a while, in which nothing else runs
            self._setup_json = json.dumps(self._setup()).encode()
        child = BoundedChild(self._target, self._setup_json, self._limits)
        with self._changed:
            self._children.append(child)
            is_late = self._is_closed
        if is_late:
            child.kill()
        return child

    def _next_after(self, dead: BoundedChild) -> BoundedChild:
        with contextlib.suppress(Exception):
            child = self._start()
            with self._changed:
                self._drop(dead)
            return child
        return dead

    def _give_back(self, child: BoundedChild) -> None:
        with self._changed:
            if child.is_alive and not self._is_closed:
                self._idle.append(child)
            else:
                self._drop(child)

    def _drop(self, child: BoundedChild) -> None:
        child.close()
        if child in self._children:
            self._children.remove(child)


def _close_all(pid: int, children: list[BoundedChild]) -> None:
    if pid == os.getpid():
        for child in children:
            child.kill()


def _overloaded(found: str) -> OverloadError:
    return OverloadError(f"a job that has no place: {found}", "fewer at a time", "try again later")


def _closed() -> OverloadError:
    return OverloadError(
        "a job of a process that is about to stop", "one that goes on", "send it to another one"
    )
