"""The library of the C++ operators, for tests that call them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from specc.kernels import native
from specc.system.cxx_compiler import find_compiler
from tests.kept import keep
from tests.kernel_flags import SOURCE_DIR, run_compiler
from tests.kernels.remote_calls import use_remote


def load_native() -> None:
    """Load it: the installation has built it."""
    native.load()
    use_remote()


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
        files = [made / "wrapper.cpp", *(SOURCE_DIR / name for name in sources)]
        command = [find_compiler(), *flags, "-I", str(SOURCE_DIR), "-shared", *map(str, files)]
        run_compiler([*command, *last, "-o", str(made / "library.so")])

    keep(directory, make, text, *flags, *sources, *last, sources=("kernels/cpu",))
    return ctypes.CDLL(str(directory / "library.so"))
