"""Directories for a while: removed at their end, or by the next process if their owner was killed.

A lock file stands beside each directory, and its owner holds the lock. The system drops it when
the owner dies, however it dies, and knows owners across containers, where process ids repeat.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

_SUFFIX = ".lock"


@contextlib.contextmanager
def owned_directory(parent: Path, prefix: str, mode: int = 0o700) -> Iterator[Path]:
    """An empty directory, removed at the end, unless it has another name by then.

    What killed owners left under the same prefix is removed first.

    Args:
        prefix: of the name; other programs must not use it.
        mode: of the directory; as it is, nobody else may enter it.
    Raises:
        OSError: nothing can be written there.
    """
    remove_abandoned(parent, prefix)
    lock, descriptor = _new_lock(parent, prefix)
    directory = lock.with_suffix("")
    try:
        directory.mkdir(mode=mode)
        yield directory
    finally:
        # the lock goes last: without it, nobody would know that the rest is left over
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            lock.unlink(missing_ok=True)
        os.close(descriptor)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the directories of owners that were killed; what cannot be removed stays."""
    for lock in parent.glob(f"{glob.escape(prefix)}*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            _remove_if_abandoned(lock)
    # a process that outlived its parent may have made the directory again; locks come first and
    # go last, so that one without a lock has no owner
    name = re.compile(re.escape(prefix) + r"[0-9a-f]{12}")
    for directory in parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError):  # somebody else was quicker
            is_ours = name.fullmatch(directory.name) and directory.lstat().st_uid == os.geteuid()
            if is_ours and not directory.with_name(f"{directory.name}{_SUFFIX}").exists():
                shutil.rmtree(directory, ignore_errors=True)


def other_owned(parent: Path, prefix: str, own: Path) -> Path | None:
    """A directory under the same prefix whose owner lives; None where there is no other."""
    for lock in parent.glob(f"{glob.escape(prefix)}*{_SUFFIX}"):
        if lock.with_suffix("") != own and _is_held(lock):
            return lock.with_suffix("")
    return None


def is_at(descriptor: int, path: Path) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _is_held(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _remove_if_abandoned(lock: Path) -> None:
    """Raises OSError: it has an owner, or belongs to another user."""
    directory = lock.with_suffix("")
    # no link: in a directory that many may write to, anybody may have made this name
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_at(descriptor, lock):
            return  # somebody else was quicker
        if directory.exists():
            if directory.lstat().st_uid != os.geteuid():
                return
            shutil.rmtree(directory)
        lock.unlink()
    finally:
        os.close(descriptor)


def _new_lock(parent: Path, prefix: str) -> tuple[Path, int]:
    """A lock file of a new name, and the descriptor that holds the lock."""
    while True:
        lock = parent / f"{prefix}{secrets.token_hex(6)}{_SUFFIX}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(lock, flags, 0o600)
        except FileExistsError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except BaseException:
            lock.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        # between the two calls it may have been taken for abandoned
        if is_at(descriptor, lock):
            return lock, descriptor
        os.close(descriptor)
