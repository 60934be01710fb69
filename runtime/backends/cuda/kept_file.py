"""A file of specc's cache that keeps what was measured on a GPU.

A cache that cannot be read or written is a warning: an engine loads all the same, and measures.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

from specc.errors import SpeccError
from specc.runtime.backends.cuda.product_candidates import ProductWarning
from specc.system.file_cache import FileCache

# of a cache that is not there for this user (RuntimeError: no home)
_FAILURES = (SpeccError, OSError, RuntimeError)


class KeptFile:
    """Content as JSON.

    Args:
        name: in the cache.
        subject: what it is about, for warnings: "products".
        cache: None is that of the user.
    """

    def __init__(self, name: str, subject: str, cache: FileCache | None = None) -> None:
        self._name = name
        self._subject = subject
        self._cache = cache

    def read(self) -> Any:
        """What was written last; None where nothing was, or it cannot be read."""
        try:
            data = self._open().read(self._name)
        except _FAILURES as error:
            self._warn("earlier is not read", error)
            return None
        # its hash was right: what is in it, this version of specc has written
        return None if data is None else json.loads(data)

    def write(self, content: Any) -> None:
        """Replace all of it."""
        try:
            self._open().write(self._name, (json.dumps(content, indent=1) + "\n").encode())
        except _FAILURES as error:
            self._warn("is not kept", error)

    def _open(self) -> FileCache:
        """The cache; where it lies may be unknown."""
        if self._cache is None:
            self._cache = FileCache()
        return self._cache

    def _warn(self, what: str, error: Exception) -> None:
        text = f"what was measured of {self._subject} {what}: {error}"
        warnings.warn(text, ProductWarning, stacklevel=5)
