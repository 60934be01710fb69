"""Signals that would end a process without unwinding it: here they are exceptions, as Ctrl-C is."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def unwind_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit inside of the block, unless somebody handles them.

    Only the main thread may set handlers: in others this does nothing.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
