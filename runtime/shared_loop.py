"""One loop for callers of many threads: whoever waits for output may have to move everyone on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType


class FairLock:
    """A lock that is handed on in the order in which it was asked for.

    A thread that takes it again and again, as a loop does, would starve the others of a plain one.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._gates: deque[threading.Lock] = deque()
        self._owner: int | None = None

    @property
    def is_mine(self) -> bool:
        """This very thread holds it."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> FairLock:
        with self._guard:
            if self._owner is None:
                self._owner = threading.get_ident()
                return self
            gate = threading.Lock()
            gate.acquire()
            self._gates.append(gate)
        try:
            gate.acquire()
        except BaseException:
            # Ctrl-C while it waits
            self._give_up(gate)
            raise
        self._owner = threading.get_ident()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._guard:
            self._hand_on()

    def _hand_on(self) -> None:
        # a gate that opens has an owner at once, or a third thread would come between
        self._owner = -1 if self._gates else None
        if self._gates:
            self._gates.popleft().release()

    def _give_up(self, gate: threading.Lock) -> None:
        with self._guard:
            if gate in self._gates:
                self._gates.remove(gate)
            else:
                self._hand_on()


class SharedLoop:
    """Iterations on behalf of all callers, each of which moves everyone's requests on.

    One caller leads: it iterates until it has what it waits for, while the others sleep until they
    have what they wait for. Then another one leads. So the batch is that of all threads, and no
    thread takes turns with others in the middle of its work, which would cost each of them a pool
    of threads of torch.

    Args:
        lock: held for each iteration, and for whatever else may not happen during one.
    """

    def __init__(self, lock: FairLock, advance: Callable[[], object]) -> None:
        self._lock = lock
        self._advance = advance
        self._is_led = False
        # something was done since the last iteration
        self._has_done = False
        self._waiters: deque[_Waiter] = deque()
        self._deferred: deque[Callable[[], object]] = deque()

    def do(self, work: Callable[[], object]) -> None:
        """Do something between two iterations.

        Within an iteration of this very thread (the collector of garbage may close a stream there)
        it is done after the iteration.
        """
        if self._lock.is_mine:
            self._deferred.append(work)
            return
        with self._lock:
            self._has_done = True
            work()

    def run(self, is_served: Callable[[], bool]) -> None:
        """Iterate, or let others iterate, until something is so.

        Args:
            is_served: called between iterations, in any thread.
        Raises:
            Exception: an iteration of this thread has failed. Others go on, with the next one.
        """
        assert not self._lock.is_mine, "called from within an iteration"
        with self._lock:
            if is_served():
                return
            waiter = _Waiter(is_served) if self._is_led else None
            if waiter is None:
                self._is_led = True
            else:
                self._waiters.append(waiter)
        if waiter is None or self._wait(waiter):
            self._lead(is_served)

    def _wait(self, waiter: _Waiter) -> bool:
        """Sleep; True where this thread leads from now on."""
        try:
            waiter.gate.acquire()
        except BaseException:
            # Ctrl-C while it sleeps
            with self._lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                elif waiter.leads:
                    self._hand_over()
            raise
        return waiter.leads

    def _lead(self, is_served: Callable[[], bool]) -> None:
        try:
            while True:
                with self._lock:
                    # others may have closed all of it between two iterations, say
                    if self._has_done and is_served():
                        return
                    self._has_done = False
                    try:
                        self._advance()
                    finally:
                        while self._deferred:
                            self._deferred.popleft()()
                    self._wake_served()
                    if is_served():
                        return
        finally:
            with self._lock:
                self._hand_over()

    def _hand_over(self) -> None:
        # an iteration that failed may have served somebody nevertheless
        self._wake_served()
        self._is_led = bool(self._waiters)
        if self._waiters:
            heir = self._waiters.popleft()
            heir.leads = True
            heir.gate.release()

    def _wake_served(self) -> None:
        if not self._waiters:
            return
        for waiter in [waiter for waiter in self._waiters if waiter.is_served()]:
            self._waiters.remove(waiter)
            waiter.gate.release()


class _Waiter:
    """A thread that sleeps until it has what it waits for, or has to lead."""

    def __init__(self, is_served: Callable[[], bool]) -> None:
        self.is_served = is_served
        self.leads = False
        self.gate = threading.Lock()
        self.gate.acquire()
