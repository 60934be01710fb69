"""The library of the C++ operators, for tests that call them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from specc.kernels import native
from specc.kernels.library_files import changed_source, usable_sets
from specc.system.cxx_compiler import find_compiler
from tests.kept import keep
from tests.kernel_flags import ROOT, SOURCE_DIR, run_compiler
from tests.kernels.remote_calls import use_remote


def load_native() -> None:
    """Load it: the installation has built it."""
    native.load()
    use_remote()


def built_objects(sources: Sequence[str]) -> list[Path] | None:
    """Objects of the library that this machine uses; None where any is absent, or not of now.

    Nor where a compiler is asked for, as `make sanitize` does with flags of its own.
    """
    if "CXX" in os.environ:
        return None
    folder = next(iter(usable_sets()), "")
    objects = [
        ROOT / f"build/library/CMakeFiles/specc_cpu_{folder}.dir/kernels/cpu/{name}.o"
        for name in sources
    ]
    is_of_now = all(path.is_file() and changed_source(path) is None for path in objects)
    return objects if is_of_now else None


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
        sources: names of files in kernels/cpu that are compiled along. Of those for this machine,
            what the library was made of is linked: compiling it again takes half a minute.
        last: what the command ends with, such as libraries.
    """

    def make(made: Path) -> None:
        made.mkdir()
        (made / "wrapper.cpp").write_text(text, encoding="utf-8")
        built = built_objects(sources) if "-march=native" in flags else None
        files = [made / "wrapper.cpp", *(built or (SOURCE_DIR / name for name in sources))]
        command = [find_compiler(), *flags, "-I", str(SOURCE_DIR), "-shared", *map(str, files)]
        run_compiler([*command, *last, "-o", str(made / "library.so")])

    keep(directory, make, text, *flags, *sources, *last, sources=("kernels/cpu",))
    return ctypes.CDLL(str(directory / "library.so"))
