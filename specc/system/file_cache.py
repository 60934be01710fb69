"""What specc keeps between compilations: every file with its hash, which every use compares.

    <root>/<name>            the file
    <root>/<name>.sha256     its hash, as `sha256sum -c` reads it
    <root>/scratch/…         directories of processes that are making files
    <root>/locks/…           held by the process that makes a file

Files of the cache are loaded and executed, so it has to be the user's own: nobody else may write
to it, and whatever a crash, a full disk or somebody's hand made of a file, it is made again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from specc.errors import CompilerError
from specc.system.files import fsync_path
from specc.system.owned_directory import is_at, owned_directory

_HASH_SUFFIX = ".sha256"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def default_cache_dir() -> Path:
    """`SPECC_CACHE_DIR`, or `specc/` in the user's cache directory."""
    if explicit := os.environ.get("SPECC_CACHE_DIR"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specc"


class FileCache:
    """Files that several processes make and use.

    Args:
        root: directory of the cache; None is `default_cache_dir()`.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or default_cache_dir()

    def check(self) -> None:
        """See, before long work, that files can be kept here.

        Raises:
            CompilerError: the cache cannot be written, or others may write to it.
        """
        with self.scratch():
            pass

    def path(self, name: str) -> Path:
        """Where a file is, once `obtain` has returned."""
        return self.root / name

    def obtain(self, name: str, make: Callable[[Path], Path]) -> bytes:
        """Content of a file, made where the cache has none or an altered one.

        Of processes that ask for the same file at once, one makes it and the others wait.

        Args:
            name: with `/`, relative to the cache.
            make: called with an empty directory, makes the file in it and returns its path.
        Raises:
            CompilerError: the cache cannot be written, or others may write to it.
        """
        if (data := self.read(name)) is not None:
            return data
        with self._turn(name):
            if (data := self.read(name)) is None:
                with self.scratch() as scratch:
                    made = make(scratch)
                    data = made.read_bytes()
                    self._publish(made, data, name)
        return data

    def read(self, name: str) -> bytes | None:
        """Content of a file; None where there is none, or none that its hash confirms.

        Raises:
            CompilerError: others may write to the cache.
        """
        path = self.path(name)
        if not path.parent.is_dir():
            return None
        self._own(path.parent)
        try:
            expected = path.with_name(path.name + _HASH_SUFFIX).read_text(encoding="ascii")
            data = path.read_bytes()
        except (OSError, ValueError):
            return None
        return data if expected == _hash_line(data, path) else None

    def write(self, name: str, data: bytes) -> None:
        """Keep content that was made elsewhere.

        Raises:
            CompilerError: the cache cannot be written, or others may write to it.
        """
        with self._turn(name), self.scratch() as scratch:
            made = scratch / "made"
            try:
                made.write_bytes(data)
            except OSError as error:
                raise self.error(made, error) from error
            self._publish(made, data, name)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty directory of the cache's file system, removed at the end or, after a crash, by
        the next process that needs such a directory.

        Raises:
            CompilerError: the cache cannot be written, or others may write to it.
        """
        parent = self.root / "scratch"
        with contextlib.ExitStack() as stack:
            try:
                self._make(parent)
                directory = stack.enter_context(owned_directory(parent, "made-"))
            except OSError as error:
                raise self.error(parent, error) from error
            yield directory

    def error(self, path: Path, error: OSError) -> CompilerError:
        """What a failed write means for a user."""
        found = f"writing the cache failed: {error.strerror or error}: {path}"
        if error.errno in _FULL:
            return CompilerError(
                found,
                "enough free space (and quota) for the cache",
                "free some space, or set SPECC_CACHE_DIR to a directory on another file system",
            )
        return CompilerError(
            found,
            "a cache directory that this user may write to",
            "set SPECC_CACHE_DIR to another directory",
        )

    def _publish(self, made: Path, data: bytes, name: str) -> None:
        """Give a file its name, durably; readers between the steps find no valid file."""
        path = self.path(name)
        hash_file, made_hash = (p.with_name(p.name + _HASH_SUFFIX) for p in (path, made))
        try:
            self._make(path.parent)
            made_hash.write_text(_hash_line(data, path), encoding="ascii")
            for file in (made, made_hash):
                fsync_path(file)
            os.replace(made, path)
            os.replace(made_hash, hash_file)
            fsync_path(path.parent)
        except OSError as error:
            raise self.error(path, error) from error

    @contextlib.contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        """Wait for every other process that makes this file."""
        lock = self.root / "locks" / hashlib.sha256(name.encode()).hexdigest()[:32]
        while True:
            try:
                self._make(lock.parent)
                descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise self.error(lock, error) from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                # its last owner has removed it, and others may hold another one by now
                if is_at(descriptor, lock):
                    try:
                        yield
                    finally:
                        lock.unlink(missing_ok=True)
                    return
            finally:
                os.close(descriptor)

    def _make(self, directory: Path) -> None:
        """Make a directory of the cache with all above it; OSError: it cannot be made."""
        if not self.root.is_dir():
            self.root.parent.mkdir(parents=True, exist_ok=True)
        for part in self._parts(directory):
            with contextlib.suppress(FileExistsError):
                part.mkdir(mode=0o700)
        self._own(directory)

    def _own(self, directory: Path) -> None:
        """Refuse directories in which others could have put what is executed here."""
        for part in self._parts(directory):
            status = part.stat()
            if status.st_uid != os.geteuid():
                raise CompilerError(
                    f"the cache directory {part} belongs to user {status.st_uid}",
                    f"a cache of this user ({os.geteuid()}), since its files are executed",
                    "set SPECC_CACHE_DIR to a directory of your own",
                )
            if status.st_mode & 0o022:
                raise CompilerError(
                    f"others may write to the cache directory {part}"
                    f" (mode {status.st_mode & 0o777:o})",
                    "a cache that nobody else can write to, since its files are executed",
                    f"remove {self.root}, or set SPECC_CACHE_DIR to a directory of your own",
                )

    def _parts(self, directory: Path) -> list[Path]:
        """The cache's root and what lies between it and a directory, from above."""
        above = [self.root / part for part in directory.relative_to(self.root).parents]
        return list(dict.fromkeys([*reversed(above), directory]))


def _hash_line(data: bytes, path: Path) -> str:
    return f"{hashlib.sha256(data).hexdigest()}  {path.name}\n"
