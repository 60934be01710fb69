"""Calls with more stack than threads have."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest

from specc.runtime.processes.threads import with_large_stack

SIZE = 96 << 20


def stack_bytes() -> int:
    """Of this thread, as the C library knows it."""
    libc = ctypes.CDLL(None)
    libc.pthread_self.restype = ctypes.c_void_p
    attributes, size = ctypes.create_string_buffer(256), ctypes.c_size_t()
    assert not libc.pthread_getattr_np(ctypes.c_void_p(libc.pthread_self()), attributes)
    assert not libc.pthread_attr_getstacksize(attributes, ctypes.byref(size))
    return size.value


def test_the_size_is_that_of_one_thread() -> None:
    before = threading.stack_size()
    assert with_large_stack(stack_bytes, SIZE) >= SIZE
    assert threading.stack_size() == before
    sizes: list[int] = []
    thread = threading.Thread(target=lambda: sizes.append(stack_bytes()))
    thread.start()
    thread.join()
    assert sizes[0] < SIZE


def test_somebody_else_sets_a_size_at_the_same_time(monkeypatch) -> None:
    """The thread that got too little does nothing, and another one is made."""
    start, starts = threading.Thread.start, []

    def interfere(thread: threading.Thread) -> None:
        if not starts:
            threading.stack_size(1 << 20)
        starts.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interfere)
    assert with_large_stack(stack_bytes, SIZE) >= SIZE
    assert len(starts) == 2
    threading.stack_size(0)


def test_errors_and_niceness() -> None:
    def fail() -> None:
        raise LookupError("as raised")

    with pytest.raises(LookupError, match="as raised"):
        with_large_stack(fail, SIZE)
    here = os.getpriority(os.PRIO_PROCESS, 0)

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert with_large_stack(priority, SIZE, niceness=3) == here + 3
    assert os.getpriority(os.PRIO_PROCESS, 0) == here
