"""The library of the C++ operators, for tests that call them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import pytest

from specc.errors import CompilerError
from specc.kernels import native, native_build
from specc.system.cxx_compiler import find_compiler
from tests.kept import keep


def load_native() -> None:
    """Build and load it; a test is skipped where the machine has no compiler for it.

    A compiler that refuses the sources is a failure: a kernel that is broken must not skip its own
    tests.
    """
    try:
        find_compiler()
    except CompilerError as error:
        pytest.skip(str(error))
    native.load()


def load_wrapper(
    directory: Path,
    text: str,
    flags: Sequence[str],
    sources: tuple[str, ...] = (),
    last: tuple[str, ...] = (),
) -> ctypes.CDLL:
    """Kernels of kernels/cpu as a library of their own, compiled once; see tests/kept.py.

    Args:
        directory: where it shall be.
        text: C++ that calls them, with functions of C for the test.
        flags: of the compiler.
        sources: names of files in kernels/cpu that are compiled along.
        last: what the command ends with, such as libraries.
    """

    def make(made: Path) -> None:
        made.mkdir()
        (made / "wrapper.cpp").write_text(text, encoding="utf-8")
        root = native_build.SOURCE_DIR
        files = [made / "wrapper.cpp", *(root / name for name in sources)]
        command = [find_compiler(), *flags, "-I", str(root), "-shared", *map(str, files), *last]
        native_build.run_compiler([*command, "-o", str(made / "library.so")])

    keep(directory, make, text, *flags, *sources, *last, sources=("kernels/cpu",))
    return ctypes.CDLL(str(directory / "library.so"))
