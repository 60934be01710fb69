"""One writer for each output: a lock on the directory that an engine is built in.

The system gives it back when the process ends, however it ends, so that a killed writer blocks
nobody. Where a file system has no locks, writers do not see each other, and the last one finds at
its end that the output exists.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from specc.errors import OutputError


class WriterLock:
    """The lock of one writer.

    Args:
        output: the engine directory to make.
        staging: where it is built, beside the output; named `.NAME.partial-PID`.
    """

    def __init__(self, output: Path, staging: Path) -> None:
        self._output = output
        self._staging = staging
        self._descriptor: int | None = None

    def take(self) -> None:
        """Lock `staging`, which exists, and look for others.

        Raises:
            OutputError: another process writes the output; nothing is locked then.
        """
        self._descriptor = _lock(self._staging)
        # without locks, who lives cannot be told
        if self._descriptor is None or (other := self._other()) is None:
            return
        self.release()
        raise OutputError(
            f"{self._output} is being written by another process (in {other})",
            "one writer for each output",
            "wait for it, or choose another output directory",
        )

    def release(self) -> None:
        """Give the lock back, if it was taken."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _other(self) -> Path | None:
        pattern = re.compile(rf"\.{re.escape(self._output.name)}\.partial-\d+")
        for path in self._output.parent.iterdir():
            if path == self._staging or not pattern.fullmatch(path.name):
                continue
            if (descriptor := _lock(path)) is not None:
                os.close(descriptor)
            elif path.is_dir():
                return path
        return None


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock; None where another one does, or locks are unknown."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
