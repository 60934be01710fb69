"""What was measured of dependent launches stays on the machine, as that of products does."""

from __future__ import annotations

import json
import warnings
from typing import Any

from specc.runtime.backends.cuda.choose_products import ProductWarning
from specc.runtime.backends.cuda.kept_products import FAILURES, Conditions
from specc.system.file_cache import FileCache


class KeptLaunches:
    """Results of `choose_launches` in specc's cache, for one GPU and one engine.

    Args:
        conditions: under which they hold.
        engine: digest of its programs; products and steps of another may gain from other launches.
        cache: None is that of the user.
    """

    def __init__(self, conditions: Conditions, engine: str, cache: FileCache | None = None) -> None:
        self._name = conditions.file_name.replace("products/", "launches/", 1)
        self._engine = engine
        self._cache = cache

    def get(self, plan: str) -> dict[str, Any] | None:
        """What was found of a plan; None where that is not known."""
        found = self._read().get(self._engine, {}).get(plan)
        return None if found is None else dict(found)

    def add(self, plan: str, item: dict[str, Any]) -> None:
        """Keep what was found; a cache that cannot be written is a warning."""
        kept = self._read()
        kept.setdefault(self._engine, {})[plan] = item
        try:
            self._open().write(self._name, (json.dumps(kept, indent=1) + "\n").encode())
        except FAILURES as error:
            self._warn("is not kept", error)

    def _open(self) -> FileCache:
        if self._cache is None:
            self._cache = FileCache()
        return self._cache

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            data = self._open().read(self._name)
        except FAILURES as error:
            self._warn("is not read", error)
            return {}
        return {} if data is None else dict(json.loads(data))

    def _warn(self, what: str, error: Exception) -> None:
        warnings.warn(
            f"what was measured of dependent launches {what}: {error}",
            ProductWarning,
            stacklevel=3,
        )
