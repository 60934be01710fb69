"""Compiled packages as torch loads them: checked, and unpacked where only this process can write.

Torch would unpack a package by itself for as long as it is loaded, so that a process that is
killed leaves megabytes in the temporary directory. What is mapped needs no file any more: here
nothing is left by the time that a package runs.
"""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch

from specc.errors import EngineError
from specc.system.files import format_bytes, read_checked, sealed_copy
from specc.system.owned_directory import temporary_directory

# the first version that loads a package which is a directory
_DIRECTORIES_SINCE = (2, 13)


@contextlib.contextmanager
def unpacked_package(package: Path, sha256: str | None = None) -> Iterator[str]:
    """A path from which torch can load a package for the CPU inside of the block.

    Args:
        package: the `.pt2`.
        sha256: of its bytes, where that is known.
    Raises:
        EngineError: it cannot be read, was altered, is no package, or cannot be unpacked.
    """
    data = read_checked(package, sha256)
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except zipfile.BadZipFile as error:
        raise _no_package(package, error) from error
    num_bytes = sum(entry.file_size for entry in archive.infolist())
    with contextlib.ExitStack() as stack:
        try:
            if _torch_version() >= _DIRECTORIES_SINCE:
                directory = stack.enter_context(temporary_directory())
                archive.extractall(directory)
                path = str(directory)
            else:
                path, descriptor = sealed_copy(data, package.name)
                stack.callback(os.close, descriptor)
        except zipfile.BadZipFile as error:
            raise _no_package(package, error) from error
        except OSError as error:
            raise EngineError(
                f"unpacking {package} into the temporary directory failed: {error}",
                f"{format_bytes(num_bytes)} in a directory that this user may write to",
                "free some space, or set TMPDIR to a directory on another file system",
            ) from error
        yield path


def _no_package(package: Path, error: Exception) -> EngineError:
    return EngineError(
        f"{package} cannot be loaded: {error}",
        f"a program that AOTInductor compiled with torch {torch.__version__}",
        "compile the engine again",
    )


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
