"""Files on disk: hashing, fsync, leftovers, free space, failed writes as errors."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from specc.errors import EngineError, OutputError

HASH_CHUNK_BYTES = 4 << 20
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux
# a compilation that fails with less than this left fails for the lack of it
_LEAST_FREE_BYTES = 4 << 20


def hash_file(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Return the sha256 of a file in hex, read in chunks; `progress` gets the bytes of each."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(HASH_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            digest.update(buffer[:num_bytes])
            if progress:
                progress(num_bytes)
    return digest.hexdigest()


def sample_file(path: Path, num_samples: int = 64, sample_bytes: int = 4096) -> str:
    """Return the sha256, in hex, of a file's size, its beginning, its end, and pages between.

    Two files of weights that are not the same differ in any of these all but surely; what is read
    does not grow with the file.

    Args:
        num_samples: parts of it, at even distances, the first and the last bytes among them.
        sample_bytes: of a part; shorter files are read whole.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(size.to_bytes(8, "little"))
        last = max(size - sample_bytes, 0)
        for i in range(num_samples):
            digest.update(os.pread(file.fileno(), sample_bytes, last * i // (num_samples - 1)))
    return digest.hexdigest()


def read_checked(path: Path, sha256: str | None) -> bytes:
    """Read a file of an engine once, and check what was read.

    Args:
        sha256: in hex; None checks nothing.
    Raises:
        EngineError: it cannot be read, or has another hash.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EngineError(
            f"{path} cannot be read: {error.strerror}",
            "a readable file",
            "compile or copy the engine again",
        ) from error
    if sha256 is not None and (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise EngineError(
            f"{path} has sha256 {found}",
            f"sha256 {sha256}, as the manifest says",
            "compile or copy the engine again",
        )
    return data


def exchange(one: Path, other: Path) -> bool:
    """Let two paths swap what they lead to, in one moment; False where the system cannot.

    Raises:
        OSError: one of them is absent, or they cannot be renamed.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    paths = (ctypes.c_char_p(os.fsencode(path)) for path in (one, other))
    here = ctypes.c_int(_AT_FDCWD)
    if renameat2(here, next(paths), here, next(paths), ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def fsync_path(path: Path) -> None:
    """Make a file's content, or a directory's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def format_bytes(num_bytes: int) -> str:
    """Format for people: `1.5 GiB`, `200 bytes`."""
    value = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def parse_bytes(text: str) -> int:
    """Bytes that people write: `700M`, `1.5GiB`, `4 GB`, `1048576`; K, M, G and T are 1024-fold.

    Raises:
        ValueError: it is no such number.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no number of bytes")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


def output_error(path: Path, error: OSError) -> OutputError:
    """Turn an OSError of a write into an OutputError."""
    found = f"writing {path} failed: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return OutputError(
            found,
            "enough free space (and quota) for the engine",
            "free some space, or choose an output on another file system",
        )
    return OutputError(
        found, "a directory that this user may write to", "choose another output directory"
    )


def is_full(directory: Path, output: str) -> bool:
    """Whether a compiler failed because a file system is full; what it says of that varies."""
    if os.strerror(errno.ENOSPC) in output or os.strerror(errno.EDQUOT) in output:
        return True
    return shutil.disk_usage(directory).free < _LEAST_FREE_BYTES


def check_free_space(path: Path, num_bytes: int) -> None:
    """Fail before a long write rather than at its end.

    Raises:
        OutputError: the file system of `path` has less than `num_bytes` left.
    """
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError as error:
        raise output_error(path, error) from error
    if free < num_bytes:
        raise OutputError(
            f"{format_bytes(free)} free for {path}",
            f"{format_bytes(num_bytes)}",
            "free some space, or choose an output on another file system",
        )


@contextlib.contextmanager
def parents_of(path: Path) -> Iterator[None]:
    """Directories above a path, made where they are missing; those of them that stay empty go.

    Raises:
        OSError: one cannot be made.
    """
    missing = [parent for parent in path.parents if not parent.exists()]
    made: list[Path] = []
    try:
        for parent in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another process was quicker
                parent.mkdir()
                made.append(parent)
        yield
    finally:
        for parent in reversed(made):
            with contextlib.suppress(OSError):
                parent.rmdir()


def remove_stale(output: Path) -> None:
    """Clear what killed writers of `output` left; bring back an engine they were replacing.

    Args:
        output: the directory that is about to be written.
    Raises:
        OutputError: a leftover cannot be removed.
    """
    if not output.parent.is_dir():
        return
    # ids of processes; the twelve digits of an owned directory may happen to be decimal, too
    pattern = re.compile(rf"\.{re.escape(output.name)}\.(partial|old)-(\d{{1,7}})")
    for path in output.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if not match or _is_other_process(int(match[2])):
            continue
        try:
            if match[1] == "old" and not output.exists():
                path.rename(output)
            else:
                shutil.rmtree(path)
        except OSError as error:
            raise output_error(path, error) from error


def _is_other_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()
