"""Threads: a call with more stack than they have, and a niceness of their own, as Linux has it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

# the size is one for the whole process
_lock = threading.Lock()


def with_large_stack(call: Callable[[], Result], stack_bytes: int, niceness: int = 0) -> Result:
    """Run a call in a thread of its own, which ends with it, and wait.

    Args:
        call: whatever it raises, this raises.
        stack_bytes: of the thread; only what is used takes memory.
        niceness: added to that of the process; more gives other threads more of the processor.
    """
    results: list[Result] = []
    errors: list[BaseException] = []
    may_run = threading.Event()
    is_large = False

    def run() -> None:
        may_run.wait()
        if not is_large:
            return
        try:
            be_nice(niceness)
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread: Any = None
    while not is_large:
        with _lock:
            before = threading.stack_size(stack_bytes)
            try:
                thread = threading.Thread(target=run, name="specc-large-stack", daemon=True)
                thread.start()
            finally:
                # another size by now: somebody else has set one while the thread began
                is_large = threading.stack_size(before) == stack_bytes
        may_run.set()
        if not is_large:
            thread.join()
            may_run.clear()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def be_nice(niceness: int) -> None:
    """Add to the niceness of the calling thread; nothing happens where the system has none.

    Args:
        niceness: added; with more, other threads get more of the processors.
    """
    if niceness:
        with contextlib.suppress(OSError, AttributeError):
            own = threading.get_native_id()
            now = os.getpriority(os.PRIO_PROCESS, own)
            os.setpriority(os.PRIO_PROCESS, own, now + niceness)
