"""What tests make once: directories and bytes, kept in specc's cache by all they are made of.

Workers share them, and so do later runs, until a source, a package, or what they are made of
changes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import io
import os
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specc.system.file_cache import FileCache
from specc.system.machine import isa_flags

ROOT = Path(__file__).resolve().parents[1]
# what compiles, which imports nothing else of this repository (make lint)
COMPILER = ("specc", "passes", "kernels")
# of all that is kept in the cache; what nobody asked for longest is removed
MAX_BYTES = 1 << 30
_FOLDER = "tests"


def keep(path: Path, make: Callable[[Path], object], *key: Any, sources: tuple[str, ...]) -> Path:
    """Make a directory, or write the one that was made of the same before.

    Args:
        path: where it shall be; what is there stays.
        key: what it is made of, besides sources, packages and processor; told apart by `repr`.
        sources: files and folders of this repository that make it.
    Returns:
        `path`.
    """

    def pack(scratch: Path) -> Path:
        make(scratch / "made")
        with tarfile.open(scratch / "made.tar", "w") as archive:
            archive.add(scratch / "made", ".")
        return scratch / "made.tar"

    data = _obtain("tar", pack, key, sources)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(path, filter="data")
    return path


def keep_bytes(make: Callable[[], bytes], *key: Any, sources: tuple[str, ...]) -> bytes:
    """Make bytes, or take those that were made of the same before.

    Args:
        key: what they are made of, besides sources, packages and processor; told apart by `repr`.
        sources: files and folders of this repository that make them.
    """

    def write(scratch: Path) -> Path:
        (scratch / "made").write_bytes(make())
        return scratch / "made"

    return _obtain("bytes", write, key, sources)


def _obtain(
    kind: str, make: Callable[[Path], Path], key: tuple[Any, ...], sources: tuple[str, ...]
) -> bytes:
    cache = FileCache()
    parts = (kind, key, *map(_source_hash, sources), environment())
    name = f"{_FOLDER}/{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.{kind}"
    is_new = False

    def made(scratch: Path) -> Path:
        nonlocal is_new
        is_new = True
        return make(scratch)

    data = cache.obtain(name, made)
    with contextlib.suppress(FileNotFoundError):
        os.utime(cache.path(name))
    # looking at a thousand files takes 5 ms, and a run asks for as many
    if is_new:
        remove_oldest(cache.root / _FOLDER, MAX_BYTES)
    return data


def content_hash(path: Path) -> str:
    """Hash of a file, or of all files of a directory with their names."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    digest = hashlib.sha256()
    for file in files:
        if "__pycache__" not in file.parts:
            digest.update(f"{file.relative_to(path)}\0".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def remove_oldest(directory: Path, max_bytes: int) -> None:
    """Remove what nobody asked for longest, until the others have room."""
    found = []
    for file in directory.iterdir():
        # another process may be removing it, too
        with contextlib.suppress(FileNotFoundError):
            if file.suffix != ".sha256":
                status = file.stat()
                found.append((status.st_mtime, status.st_size, file))
    total = sum(size for _, size, _ in found)
    for _, size, file in sorted(found):
        if total <= max_bytes:
            return
        total -= size
        file.unlink(missing_ok=True)
        file.with_name(f"{file.name}.sha256").unlink(missing_ok=True)


# sources do not change while tests run; a mutant is in them before its process first asks
@functools.cache
def _source_hash(part: str) -> str:
    return content_hash(ROOT / part)


@functools.cache
def installed() -> tuple[Any, ...]:
    """Packages and processor."""
    packages = sorted((d.name, d.version) for d in importlib.metadata.distributions())
    return sys.version, *isa_flags(), *packages


@functools.cache
def environment() -> tuple[Any, ...]:
    """Packages, processor and settings."""
    settings = sorted(
        (key, value)
        for key, value in os.environ.items()
        if key in ("CXX", "TRITON_INTERPRET", "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL")
        or (key.startswith("SPECC_") and key != "SPECC_CACHE_DIR")
    )
    return *installed(), *settings
