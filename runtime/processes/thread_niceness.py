"""Threads that let others of the process go first, as Linux has it: niceness is a thread's own."""

from __future__ import annotations

import contextlib
import os
import threading


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
