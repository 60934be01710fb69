"""Processes that work for this one, and end with it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

_PR_SET_PDEATHSIG = 1


def run_child(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command and wait for it; its output is text.

    An exception meanwhile, such as Ctrl-C, kills it and all that it has started.

    Args:
        environment: variables besides those of this process.
    Raises:
        OSError: it cannot be run.
    """
    # a session of its own: compilers start processes, which have to end with it
    process = subprocess.Popen(
        list(command),
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, errors = process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return subprocess.CompletedProcess(list(command), process.returncode, output, errors)


def die_with_parent() -> None:
    """Let this process be killed when the thread that started it ends, from here on; on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
