"""Lower the programs of an engine to compiled code for this CPU."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specc.errors import CompilerError, OutputError, SpeccError
from specc.kernels import native
from specc.passes.lower.cpu.experts import LowerExperts, PackExperts
from specc.passes.lower.cpu.linear import LowerLinear
from specc.passes.lower.cpu.pack_weights import PackWeights
from specc.passes.lower.inductor.package import compile_package
from specc.passes.lower.inductor.warm import keep_inductor
from specc.passes.pipeline import PassRecord, Phases, Pipeline
from specc.passes.program import Program
from specc.passes.program_json import program_to_json
from specc.system.child_processes import ChildProcesses
from specc.system.cxx_compiler import find_compiler
from specc.system.file_cache import FileCache
from specc.system.files import output_error
from specc.system.machine import isa_flags

# before the graphs are written: how the engine stores its weights
LAYOUT_PHASES: Phases = (("layout", (PackWeights, PackExperts)),)
CPU_PHASES: Phases = (("lower", (LowerLinear, LowerExperts)),)
LIBRARY_FILE = f"native/{native.LIBRARY_NAME}"
# what `library_ahead` has begun for the compilation of this thread
_ahead: ContextVar[ChildProcesses | None] = ContextVar("library_ahead", default=None)


@dataclass(frozen=True)
class CpuPackage:
    """A program and the file that gets its compiled form."""

    program: Program
    package: Path


def missing_compiler() -> CompilerError | None:
    """Why no program can be compiled here; None where one can."""
    try:
        find_compiler()
    except CompilerError as error:
        return error
    return None


def lower_cpu(
    packages: Sequence[CpuPackage],
    library: Path,
    dump: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[PassRecord], tuple[str, ...]]:
    """Rewrite programs for the CPU, compile them side by side, and copy the operators' library.

    Args:
        packages: programs, which change in place.
        library: file that gets the library of the operators.
        dump: directory for the graphs after each phase.
        progress: called with (programs and libraries made, those in all).
    Returns:
        what each pass did, and the instruction sets that the code may use.
    Raises:
        CompilerError: no C++ compiler, one that fails, or a cache that cannot be written.
        OutputError: a file of the engine cannot be written.
    """
    records: list[PassRecord] = []
    for item in packages:
        records += Pipeline(CPU_PHASES, dump).run(item.program)
    children = ChildProcesses()
    threads = max(1, os.cpu_count() or 1)
    with keep_inductor(), concurrent.futures.ThreadPoolExecutor(threads) as pool:
        tasks = [
            pool.submit(_compile, program_to_json(item.program), item.package, children)
            for item in packages
        ]
        tasks.append(pool.submit(_copy_library, library, children))
        try:
            for done, task in enumerate(concurrent.futures.as_completed(tasks), start=1):
                task.result()
                progress(done, len(tasks))
        except BaseException:
            # also a signal: the pool waits for its threads, and they for their processes
            pool.shutdown(wait=False, cancel_futures=True)
            children.end()
            if (ahead := _ahead.get()) is not None:
                ahead.end()  # the library's thread waits for it
            raise
    return records, isa_flags()


@contextlib.contextmanager
def library_ahead() -> Iterator[None]:
    """Build the library of the operators beside the block, where the cache lacks it.

    Tracing takes one core for seconds, and g++ needs nothing of it. Whatever needs the library
    waits for what this has begun. When the block ends, or `lower_cpu` fails in it, what compiles
    ends, too. An error is left out: what needs the library meets it again.
    """
    children = ChildProcesses()

    def make() -> None:
        with contextlib.suppress(SpeccError, OSError):
            native.build_library(children)

    thread = threading.Thread(target=make, name="specc-library", daemon=True)
    token = _ahead.set(children)
    thread.start()
    try:
        yield
    finally:
        _ahead.reset(token)
        children.end()
        thread.join()


def copy_operators(library: Path) -> tuple[str, ...]:
    """Copy the library of the operators alone, for engines whose models another runtime runs.

    Args:
        library: file that gets it.
    Returns:
        the instruction sets that the code may use.
    Raises:
        CompilerError: no C++ compiler, one that fails, or a cache that cannot be written.
        OutputError: the file cannot be written.
    """
    _copy_library(library, ChildProcesses())
    return isa_flags()


def _compile(program: Mapping[str, Any], package: Path, children: ChildProcesses) -> None:
    try:
        package.write_bytes(compile_package(program, children))
    except OSError as error:
        raise _write_error(package, error) from error


def _copy_library(library: Path, children: ChildProcesses) -> None:
    try:
        library.write_bytes(native.build_library(children))
    except OSError as error:
        raise _write_error(library, error) from error


def _write_error(output: Path, error: OSError) -> CompilerError | OutputError:
    """Tell an engine that cannot be written from a cache that cannot; `output` is a file of the
    engine, which is copied from the cache once the cache holds it.
    """
    if error.filename is None:
        # a write to an open file names nothing; the copy creates its file first
        in_output = output.exists()
    else:
        in_output = Path(os.fsdecode(error.filename)).is_relative_to(output.parent)
    if in_output:
        return output_error(output, error)
    cache = FileCache()
    place = cache.root if error.filename is None else Path(os.fsdecode(error.filename))
    if place.is_relative_to(cache.root):
        return cache.error(place, error)
    return CompilerError(
        f"{place}: {error.strerror or error}",
        "an installation of specc and a C++ compiler that this user may run",
        "install them again, or compile with --backend eager",
    )
