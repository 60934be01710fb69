"""Processes that work for this one, and end with it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

_PR_SET_PDEATHSIG = 1
_PARENT = "SPECC_PARENT_PROCESS"


class ChildProcesses:
    """Runs commands from several threads; `end` kills all that run, and lets no other begin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Callable[[], object]] = set()  # what kills each
        self._has_ended = False

    def run(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command and wait for it; its output is text.

        Args:
            command: program and arguments.
            environment: variables besides those of this process.
        Raises:
            OSError: it cannot be run.
        """
        if self._has_ended:
            return subprocess.CompletedProcess(list(command), -signal.SIGKILL, "", "ended")
        # a session of its own: compilers start processes, which have to end with it
        process = subprocess.Popen(
            list(command),
            env={**os.environ, **(environment or {}), _PARENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            with self.killing(functools.partial(_kill, process)):
                output, errors = process.communicate()
        except BaseException:
            _kill(process)
            process.wait()
            raise
        return subprocess.CompletedProcess(list(command), process.returncode, output, errors)

    @contextlib.contextmanager
    def killing(self, kill: Callable[[], object]) -> Iterator[None]:
        """Let `end` kill what the block waits for, at once where it has been called already."""
        with self._lock:
            self._running.add(kill)
            if self._has_ended:
                kill()
        try:
            yield
        finally:
            with self._lock:
                self._running.discard(kill)

    def end(self) -> None:
        """Kill what runs; whoever waits for it returns."""
        with self._lock:
            self._has_ended = True
            for kill in self._running:
                kill()


def die_with_parent() -> None:
    """Let this process be killed when the thread that started it ends, from here on; on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_parent() -> None:
    """Let this process be killed when the thread that started it ends, however it ends.

    For processes that `ChildProcesses` runs. One whose parent is gone already ends at once.
    """
    die_with_parent()
    if os.environ.get(_PARENT) not in (None, str(os.getppid())):
        raise SystemExit(1)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
