"""Work that an engine does while no request runs."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Protocol

# seconds without a request after which such work begins: who asks in a closed loop does not wait
# for a slice of it each time
_QUIET_S = 0.2
_log = logging.getLogger("specc.service")


class IdleWork(Protocol):
    """A long work in slices, each as short as an iteration, in the engine's thread.

    Nothing of it may change what requests get. Between two slices requests may run, after `pause`.
    """

    @property
    def progress(self) -> tuple[int, int]:
        """Slices that are done, and of all."""

    def advance(self) -> bool:
        """Run a slice; False where nothing is left, and this need not be called again."""

    def pause(self) -> None:
        """Requests run now: give back what is held."""


class IdleTurns:
    """When idle work has its turns, in the engine's thread.

    Args:
        work: None is nothing to do.
    """

    def __init__(self, work: IdleWork | None) -> None:
        self._work = work
        self._is_quiet = True

    @property
    def share(self) -> float | None:
        """Of the work that is done; None where there is none, or nothing is left."""
        if self._work is None:
            return None
        done, total = self._work.progress
        return done / total

    @property
    def has_work(self) -> bool:
        return self._work is not None

    def wait(self, changed: threading.Condition, timeout_s: float | None = None) -> bool:
        """Wait for news; True: nothing came for a while, it is the work's turn.

        Args:
            changed: held, and notified of news.
            timeout_s: seconds after which there is something else to do, where there is no work.
        """
        if self._work is None:
            changed.wait(timeout_s)
            return False
        if not self._is_quiet:
            self._is_quiet = not changed.wait(_QUIET_S)
        return self._is_quiet

    def advance(self) -> None:
        """Run a slice, in a turn; work that fails is given up, and requests go on all the same."""
        if self._work is None or not self._is_quiet:
            return
        try:
            if self._work.advance():
                return
        except Exception:
            _log.exception("what the engine does while no request runs has failed")
            with contextlib.suppress(Exception):
                self._work.pause()
        self._work = None

    def pause(self) -> None:
        """Requests run now."""
        if self._work is not None and self._is_quiet:
            self._work.pause()
        self._is_quiet = False
