"""What was measured of dependent launches stays on the machine, as that of products does."""

from __future__ import annotations

from typing import Any

from specc.runtime.backends.cuda.kept_file import KeptFile
from specc.runtime.backends.cuda.kept_products import Conditions
from specc.system.file_cache import FileCache


class KeptLaunches:
    """Results of `choose_launches` in specc's cache, for one GPU and one engine.

    Args:
        conditions: under which they hold.
        engine: digest of its programs; products and steps of another may gain from other launches.
        cache: None is that of the user.
    """

    def __init__(self, conditions: Conditions, engine: str, cache: FileCache | None = None) -> None:
        name = conditions.file_name.replace("products/", "launches/", 1)
        self._file = KeptFile(name, "dependent launches", cache)
        self._engine = engine

    def get(self, plan: str) -> dict[str, Any] | None:
        """What was found of a plan; None where that is not known."""
        found = self._read().get(self._engine, {}).get(plan)
        return None if found is None else dict(found)

    def add(self, plan: str, item: dict[str, Any]) -> None:
        """Keep what was found; a cache that cannot be written is a warning."""
        kept = self._read()
        kept.setdefault(self._engine, {})[plan] = item
        self._file.write(kept)

    def _read(self) -> dict[str, dict[str, Any]]:
        return dict(self._file.read() or {})
