"""What was measured on this machine, as a JSON file of specc's cache.

An engine's directory may be read-only, and may be used on several machines: so what is measured of
an engine lies in the cache, under a name that says what it holds for. A cache that cannot be read
or written is told, and no error: whoever asks measures again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specc.errors import SpeccError
from specc.system.file_cache import FileCache

# of a cache that is not there for this user (RuntimeError: no home)
_FAILURES = (SpeccError, OSError, RuntimeError)


class KeptFile:
    """A file of specc's cache, as JSON.

    Args:
        subject: what it is about, for warnings: "products".
        tell: takes a text where the cache cannot be read or written.
        cache: None is that of the user.
    """

    def __init__(
        self,
        name: str,
        subject: str,
        tell: Callable[[str], object],
        cache: FileCache | None = None,
    ) -> None:
        self._name = name
        self._subject = subject
        self._tell = tell
        self._cache = cache

    @property
    def path(self) -> Path:
        """Where it lies, once it was written.

        Raises:
            RuntimeError: this user has no home, and names no cache.
        """
        return self._open().path(self._name)

    def read(self) -> Any:
        """What was written last; None where nothing was, or it cannot be read."""
        try:
            data = self._open().read(self._name)
        except _FAILURES as error:
            self._tell(f"what was measured of {self._subject} earlier is not read: {error}")
            return None
        # its hash was right: what is in it, a version of specc has written
        return None if data is None else json.loads(data)

    def write(self, content: Any) -> None:
        """Replace all of it."""
        try:
            self._open().write(self._name, (json.dumps(content, indent=1) + "\n").encode())
        except _FAILURES as error:
            self._tell(f"what was measured of {self._subject} is not kept: {error}")

    def _open(self) -> FileCache:
        """The cache; where it lies may be unknown."""
        if self._cache is None:
            self._cache = FileCache()
        return self._cache
