"""Ctrl-C between two orders, not within one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, SIGINT waits: an order that only some ranks have got would part them.

    A second one does not wait.
    """
    before = signal.getsignal(signal.SIGINT)
    # handlers run in the main thread alone; one that was not set from Python cannot be put back
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if caught:
            before(number, frame)
        caught.append((number, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught:
        before(*caught[0])
