"""Callers of many threads and one engine: each waits for its own requests, one moves them all."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from specc.errors import RequestError
from specc.runtime.core import EngineCore
from specc.runtime.shared_loop import SharedLoop

if TYPE_CHECKING:
    from specc.runtime.engine import Engine
    from specc.runtime.scheduling.request import Request

Found = TypeVar("Found")


class CoreLoop:
    """Iterations of an engine's core, led by whichever caller's turn it is."""

    def __init__(self, core: EngineCore) -> None:
        self._loop = SharedLoop(core.engine.turn, functools.partial(_advance, core))

    def serve(
        self,
        core: EngineCore,
        requests: list[Request],
        *,
        by_iteration: bool = False,
        by_event: bool = False,
    ) -> Iterator[None]:
        """Queue requests and go on until they have ended; yield now and then, and at the end.

        Whatever ends this early (an error, a closed stream) drops the requests.

        Args:
            by_iteration: yield after each iteration.
            by_event: yield when there are tokens of a stream.
        """
        core.engine.check_weights()
        loop, watch = self._loop, _Watch(core, requests)

        def add() -> None:
            core.engine.sleep.check()
            for request in requests:
                core.scheduler.add(request)

        def drop() -> None:
            for request in requests:
                core.scheduler.abort(request)
            _timed(core, core.in_flight.settle)

        try:
            loop.do(add)
            while not watch.has_ended:
                loop.run(watch.wakes_by(by_iteration, by_event))
                if watch.error is not None:
                    raise watch.error
                yield
        finally:
            loop.do(drop)

    def between_steps(self, engine: Engine, work: Callable[[], Found]) -> Found:
        """Do something while no step of an engine is in flight, whoever runs it.

        Raises:
            RequestError: from within an iteration, which is no such time.
        """
        if engine.turn.is_mine:
            raise RequestError(
                "a call from within a step", "one between two steps", "call it from another place"
            )
        found: list[Found] = []

        def work_there() -> None:
            engine.settle()
            found.append(work())

        self._loop.do(work_there)
        return found[0]

    def close(self, core: EngineCore) -> None:
        """Drop all requests; whoever still waits gets an error, and the core is not held."""

        def drop() -> None:
            for request in [*core.scheduler.running, *core.scheduler.waiting]:
                core.scheduler.abort(request)
            core.is_closed = True
            _timed(core, core.in_flight.settle)

        self._loop.do(drop)
        self._loop = SharedLoop(core.engine.turn, refuse_closed)


class _Watch:
    """What a caller waits for; looked at between iterations, in whatever thread."""

    def __init__(self, core: EngineCore, requests: list[Request]) -> None:
        self.requests = requests
        self.has_ended = False
        self.error: RequestError | None = None
        self._core = core

    def wakes_by(self, by_iteration: bool, by_event: bool) -> Callable[[], bool]:
        """Whether the caller has to be woken: at the end, or earlier."""
        seen = self._core.num_iterations

        def wakes() -> bool:
            self._look()
            if self.has_ended or (by_iteration and self._core.num_iterations != seen):
                return True
            return by_event and any(request.events for request in self.requests)

        return wakes

    def _look(self) -> None:
        try:
            if self._core.is_closed:
                refuse_closed()
            self._core.scheduler.check(self.requests)
        except RequestError as error:
            self.error = error
        if self.error is None:
            # looked at after each iteration: no generator for the first one that goes on
            for request in self.requests:
                if request.finish_reason is None:
                    return
        self.has_ended = True


def _advance(core: EngineCore) -> None:
    has_run = _timed(core, core.advance)
    # somebody else may have committed the last of what was queued
    if not has_run and core.scheduler.has_work:
        raise RequestError(
            "no request can run: another LLM holds the caches of this engine",
            "free slots and cache blocks",
            "finish or close the streams of the other LLM first",
        )


def _timed(core: EngineCore, work: Callable[[], Any]) -> Any:
    """Count the seconds, those of work that fails too."""
    begin = time.perf_counter()
    try:
        return work()
    finally:
        core.scheduler.stats.elapsed_s += time.perf_counter() - begin


def refuse_closed() -> None:
    raise RequestError("an LLM that was closed", "one that is open", "load the engine again")
