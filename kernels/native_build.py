"""The library of the CPU's operators, built from its sources with the machine's compiler.

What is built is kept by content; the sources include no header but those of the compiler's own.
"""

from __future__ import annotations

import concurrent.futures
import errno
import functools
import hashlib
import os
import platform
import re
from pathlib import Path

from specc.errors import CompilerError
from specc.system.child_processes import ChildProcesses
from specc.system.cxx_compiler import compiler_version, find_compiler
from specc.system.file_cache import FileCache, default_cache_dir
from specc.system.files import is_full
from specc.system.machine import isa_flags

LIBRARY_NAME = "libspecc_cpu.so"
SOURCE_DIR = Path(__file__).parent / "cpu"
# no -ffast-math: it lets the compiler drop the tests that keep a poisoned row out of a sum
FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-freciprocal-math",
    "-ffp-contract=fast",
    "-fopenmp",
    "-fPIC",
    "-fvisibility=hidden",
)
# where the last bit decides, as it does in sampling and in sums that have the bits of their oracle:
# rounded as it is written
EXACT_FLAGS = (
    "-fno-associative-math",
    "-fno-reciprocal-math",
    "-fsigned-zeros",
    "-ffp-contract=off",
)
_EXACT_SOURCES = (
    "accept.cpp", "column_winners.cpp", "draft_children.cpp", "filters.cpp", "kv_rows.cpp",
    "linear_fp8.cpp", "linear_q.cpp",
    "node_winners.cpp", "noise.cpp", "penalties.cpp", "ranks_math.cpp",
)  # fmt: skip
# they compute nothing themselves: what they call decides how fast a call is
_GLUE = ("unit_interface.cpp", "unit_operators.cpp", "unit_ranks.cpp")
_GLUE_FLAGS = ("-O1",)
# a source that another one includes has no object of its own
_INCLUDED = re.compile(r'(?m)^#include "(\w+\.cpp)"$')


def build(cache_dir: Path | None = None, children: ChildProcesses | None = None) -> Path:
    """Path of the library for this machine, compiled where the cache has none.

    Args:
        cache_dir: where libraries are kept; None is `specc/` in the user's cache directory.
        children: what ends the compiler with this process; None is some of its own.
    Raises:
        CompilerError: no C++ compiler, one too old, or one that fails; or no cache.
    """
    compiler = find_compiler()
    name = f"native/{content_key(compiler)}/{LIBRARY_NAME}"

    def make(scratch: Path) -> Path:
        return _compile(compiler, scratch, children or ChildProcesses())

    cache = FileCache(cache_dir)
    cache.obtain(name, make)
    return cache.path(name)


def sources() -> list[Path]:
    """What the compiler is called on."""
    found = list(SOURCE_DIR.glob("*.cpp"))
    included = {name for path in found for name in _included(path)}
    return sorted(path for path in found if path.name not in included)


def flags_of(source: Path) -> tuple[str, ...]:
    """Of the compiler, for one of `sources`."""
    if source.name in _GLUE:
        return (*FLAGS, *_GLUE_FLAGS)
    names = set(_included(source) or [source.name])
    is_exact = names <= set(_EXACT_SOURCES)
    assert is_exact or not names & set(_EXACT_SOURCES), f"{source.name}: flags of two kinds"
    return (*FLAGS, *EXACT_FLAGS) if is_exact else FLAGS


def content_key(compiler: str) -> str:
    """Hash of all that the library is made of."""
    digest = hashlib.sha256()
    parts = [platform.machine(), *isa_flags()]
    parts += [" ".join((source.name, *flags_of(source))) for source in sources()]
    parts += [str(compiler_version(compiler))]
    if Path(compiler).is_relative_to(default_cache_dir() / "compilers"):
        parts += [Path(compiler).read_text(encoding="utf-8")]  # its arguments
    for path in sorted(SOURCE_DIR.iterdir()):
        if path.suffix in (".cpp", ".h"):
            parts += [path.name, path.read_text(encoding="utf-8")]
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def run_compiler(
    command: list[str], scratch: Path | None = None, children: ChildProcesses | None = None
) -> None:
    """Run a compiler; what it leaves when it is killed goes with the scratch directory."""
    environment = {"TMPDIR": str(scratch)} if scratch is not None else None
    result = (children or ChildProcesses()).run(command, environment)
    if result.returncode:
        if scratch is not None and is_full(scratch, result.stderr):
            raise FileCache().error(scratch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        lines = [line for line in result.stderr.splitlines() if "error" in line]
        raise CompilerError(
            f"{command[0]} failed: {(lines or result.stderr.splitlines() or ['no output'])[0]}",
            "a C++ compiler that builds specc's CPU operators",
            "set CXX to another compiler, or compile with --backend eager",
        )


def _included(source: Path) -> list[str]:
    """The sources that a translation unit is made of, where it is made of several."""
    return _INCLUDED.findall(source.read_text(encoding="utf-8"))


def _compile(compiler: str, scratch: Path, children: ChildProcesses) -> Path:
    run = functools.partial(run_compiler, scratch=scratch, children=children)

    def compile_one(source: Path) -> Path:
        made = scratch / f"{source.stem}.o"
        run(
            [compiler, *flags_of(source), "-I", str(SOURCE_DIR), "-c", str(source), "-o", str(made)]
        )
        return made

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        # the one that takes longest first
        order = sorted(sources(), key=lambda path: -path.stat().st_size)
        objects = list(pool.map(compile_one, order))
    # of an inline function in several objects the linker takes the first: none of -O1
    objects.sort(key=lambda path: f"{path.stem}.cpp" in _GLUE)
    library = scratch / LIBRARY_NAME
    # no OpenMP: whoever opens the library has one, and two in a process spin against each other
    run([compiler, "-shared", *map(str, objects), "-o", str(library)])
    return library
