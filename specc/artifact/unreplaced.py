"""Parts of two engines do not meet in a process that loads one while another takes its place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from specc.artifact.manifest import MANIFEST_FILE
from specc.errors import EngineError


@contextlib.contextmanager
def unreplaced(path: Path) -> Iterator[None]:
    """What is read of an engine inside of the block belongs to one engine.

    Raises:
        EngineError: another one took its place meanwhile; this comes before errors that are due
            to it, such as absent files.
    """
    before = _identity(path)
    try:
        yield
    except Exception as error:
        if before is None or _identity(path) == before:
            raise
        raise _replaced(path) from error
    if _identity(path) != before:
        raise _replaced(path)


def _identity(path: Path) -> tuple[int, ...] | None:
    """Tells an engine from one that takes its place; None where there is none."""
    try:
        directory, manifest = path.stat(), (path / MANIFEST_FILE).stat()
    except OSError:
        return None
    return directory.st_dev, directory.st_ino, manifest.st_ino, manifest.st_mtime_ns


def _replaced(path: Path) -> EngineError:
    return EngineError(
        f"{path} was replaced or removed while it was being loaded",
        "an engine that stays in its place until it is loaded",
        "try again when whatever writes it has finished",
    )
