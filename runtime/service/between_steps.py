"""What is done in an engine's thread between two steps: orders of its operator, and sleep."""

from __future__ import annotations

import enum
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from specc.errors import OverloadError
from specc.runtime.draft_weights import DraftVersion
from specc.runtime.sleep import LEVEL, check_level

if TYPE_CHECKING:
    from specc.runtime.core import EngineCore

Found = TypeVar("Found")
_log = logging.getLogger("specc.service")


class Orders:
    """Work that callers wait for, done while no step is in flight.

    Args:
        changed: guards them, and is notified of each.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._is_closed = False

    def __bool__(self) -> bool:
        """Whether some wait; `changed` is held."""
        return bool(self._waiting)

    def give(self, work: Callable[[], Found]) -> Found:
        """Have something done, and wait for it; raises what it raises.

        Raises:
            OverloadError: the engine's thread has ended, or is about to.
        """
        done: Future[Found] = Future()
        with self._changed:
            if self._is_closed:
                raise _stopping()
            self._waiting.append((work, done))
            self._changed.notify_all()
        return done.result()

    def run(self, core: EngineCore) -> bool:
        """Do all that waits, in the engine's thread; False where nothing does."""
        with self._changed:
            taken, self._waiting = self._waiting, deque()
        for work, done in taken:
            try:
                core.engine.settle()
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)
        return bool(taken)

    def close(self) -> None:
        """No more are taken, and those that wait fail."""
        with self._changed:
            self._is_closed = True
            taken, self._waiting = self._waiting, deque()
        for _, done in taken:
            done.set_exception(_stopping())


class Nap(enum.Enum):
    """Whether an engine sleeps, and who wakes it.

    AWAKE: it does not. ASKED: somebody has said so, and has to say when it ends; requests are
    refused. IDLE: no request came for long, and the next one wakes it.
    """

    AWAKE = "awake"
    ASKED = "asked"
    IDLE = "idle"


class Operator:
    """What only the operator of a service may ask: other weights of drafts, and sleep.

    Args:
        core: of the engine.
        changed: guards it, and is notified of changes.
        orders: done in the engine's thread.
        has_ended: whether no request is open, or none will end; `changed` is held.
        after_s: seconds without a request after which it falls asleep; None is never.
    """

    def __init__(
        self,
        core: EngineCore,
        changed: threading.Condition,
        orders: Orders,
        has_ended: Callable[[], bool],
        after_s: float | None = None,
    ) -> None:
        self._core, self._changed, self._orders = core, changed, orders
        self._has_ended, self._after_s = has_ended, after_s
        self.nap = Nap.AWAKE
        self._busy_s = time.monotonic()

    def reload_draft(
        self, path: str | Path, draft: str | None = None, folder: Path | None = None
    ) -> DraftVersion:
        """Give a draft other weights, between two steps; see `LLM.reload_draft`.

        Args:
            folder: that the file has to lie in; None is any.
        """
        drafts = self._core.engine.draft_weights
        # long work is done here, in the caller's thread
        new = drafts.read(path, draft, folder)
        return self._orders.give(lambda: drafts.put(new))

    def sleep(self, level: int = LEVEL) -> None:
        """Let open requests end, then weights and caches leave memory, until `wake_up`.

        Requests that come meanwhile are refused. It is awake, and takes them, where it cannot.
        Errors as of `LLM.sleep`.
        """
        check_level(level)
        with self._changed:
            self.nap = Nap.ASKED
            # somebody may wake it meanwhile
            self._changed.wait_for(lambda: self._has_ended() or self.nap is not Nap.ASKED)
        try:
            self._orders.give(functools.partial(self._sleep_if_asked, level))
        except BaseException:
            with self._changed:
                self.nap = Nap.AWAKE
            raise

    def _sleep_if_asked(self, level: int) -> None:
        if self.nap is Nap.ASKED:
            self._core.engine.sleep.begin(level)

    def wake_up(self) -> None:
        """Have weights in memory, and take requests; errors as of `LLM.wake_up`. It sleeps then."""
        self._orders.give(self._core.engine.sleep.end)
        with self._changed:
            self.nap = Nap.AWAKE
            self.note_work()
            self._changed.notify_all()

    def refuse(self) -> None:
        """Raises OverloadError: requests are not taken; `changed` is held."""
        if self.nap is Nap.ASKED:
            raise OverloadError(
                "the engine sleeps, as somebody has asked it to",
                "an engine that is awake",
                "try again later",
            )

    def note_work(self) -> None:
        """Requests run now."""
        self._busy_s = time.monotonic()

    def wake(self) -> None:
        """Requests are about to run, in the engine's thread."""
        self.note_work()
        if self.is_asleep:
            # they were taken before somebody asked it to sleep, who waits for them
            self._core.engine.sleep.end()
        with self._changed:
            if self.nap is Nap.IDLE:
                self.nap = Nap.AWAKE

    @property
    def is_asleep(self) -> bool:
        return self._core.engine.sleep.is_asleep

    @property
    def timeout_s(self) -> float | None:
        """Seconds until it is time to sleep, while no request comes; None is never."""
        if self._after_s is None or self.nap is not Nap.AWAKE:
            return None
        return max(0.0, self._busy_s + self._after_s - time.monotonic())

    def fall_asleep(self) -> None:
        """Sleep where no request came for long, in the engine's thread."""
        with self._changed:
            if self.timeout_s != 0.0:
                return
            self.nap = Nap.IDLE
        try:
            self._core.engine.settle()
            self._core.engine.sleep.begin()
        except Exception:
            _log.exception("the engine cannot fall asleep, and stays awake from now on")
            self._after_s = None
            with self._changed:
                self.nap = Nap.AWAKE


def _stopping() -> OverloadError:
    return OverloadError(
        "the engine is about to stop", "one that goes on", "send the request to another server"
    )
