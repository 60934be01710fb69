"""Ctrl-C waits for the end of an order, once."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from specc.runtime.ranks.leader import uninterrupted


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    # handlers run between two instructions of Python
    for _ in range(1000):
        pass


def test_an_interrupt_waits() -> None:
    done: list[int] = []
    handler = signal.getsignal(signal.SIGINT)

    def work() -> None:
        with uninterrupted():
            interrupt()
            done.append(1)
        done.append(2)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_interrupt_does_not_wait() -> None:
    done: list[int] = []
    handler = signal.getsignal(signal.SIGINT)

    def work() -> None:
        with uninterrupted():
            interrupt()
            done.append(1)
            interrupt()
            done.append(2)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is handler


def test_without_an_interrupt_nothing_changes() -> None:
    handler = signal.getsignal(signal.SIGINT)
    with uninterrupted():
        pass
    with pytest.raises(ValueError, match="own"), uninterrupted():
        raise ValueError("own")
    assert signal.getsignal(signal.SIGINT) is handler


def test_other_threads_leave_signals_alone() -> None:
    handler, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [handler]
