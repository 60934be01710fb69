"""Processes that fork the children of chat templates and grammars, lent to pool after pool.

One takes a tenth of a second of a core, and most tests that chat need one: those that are set up
alike are one process, which ends with the tests.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from specc.runtime.processes import bounded_pool
from specc.runtime.processes.fork_server import ForkServer


class Lent:
    """A server as a pool has it, which leaves it to the next one when it ends."""

    def __init__(self, server: ForkServer) -> None:
        self.fork, self.end = server.fork, server.end
        self._server = server

    @property
    def is_alive(self) -> bool:
        return self._server.is_alive

    def kill(self) -> None:
        """Others may have it."""

    close = kill


@contextlib.contextmanager
def lent_servers() -> Iterator[None]:
    """Let pools of what is specc's own share servers; those of tests have their own."""
    known: dict[tuple[Any, ...], ForkServer] = {}

    def lend(target: str, setup: bytes, start_seconds: float, *limits: int | None) -> Any:
        if not target.startswith("specc."):
            return ForkServer(target, setup, start_seconds, *limits)
        key = os.getpid(), target, setup, limits
        if key not in known or not known[key].is_alive:
            known[key] = ForkServer(target, setup, start_seconds, *limits)
        return Lent(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_pool, "ForkServer", lend)
        yield
    for (pid, *_), server in known.items():
        if pid == os.getpid():
            server.close()
