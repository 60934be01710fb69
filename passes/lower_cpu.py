"""Lower the programs of an engine to compiled code for this CPU."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specc.errors import CompilerError
from specc.files import output_error
from specc.kernels import native
from specc.machine import isa_flags
from specc.passes.emit import program_to_json
from specc.passes.lower_aot_inductor import compile_package
from specc.passes.lower_linear import LowerLinear
from specc.passes.pipeline import PassRecord, Phases, Pipeline
from specc.passes.program import Program

CPU_PHASES: Phases = (("lower", (LowerLinear,)),)
LIBRARY_FILE = f"native/{native.LIBRARY_NAME}"


@dataclass(frozen=True)
class CpuPackage:
    """A program and the file that gets its compiled form."""

    program: Program
    package: Path


def missing_compiler() -> CompilerError | None:
    """Why no program can be compiled here; None where one can."""
    try:
        native.find_compiler()
    except CompilerError as error:
        return error
    return None


def lower_cpu(
    packages: Sequence[CpuPackage], library: Path, dump: Path | None = None
) -> tuple[list[PassRecord], tuple[str, ...]]:
    """Rewrite programs for the CPU, compile them side by side, and copy the operators' library.

    Args:
        packages: programs, which change in place.
        library: file that gets the library of the operators.
        dump: directory for the graphs after each phase.
    Returns:
        what each pass did, and the instruction sets that the code may use.
    Raises:
        CompilerError: no C++ compiler, or one that fails.
        OutputError: a file cannot be written.
    """
    records: list[PassRecord] = []
    for item in packages:
        records += Pipeline(CPU_PHASES, dump).run(item.program)
    with concurrent.futures.ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        tasks = [
            pool.submit(compile_package, program_to_json(item.program), item.package)
            for item in packages
        ]
        tasks.append(pool.submit(_copy_library, library))
        try:
            for task in concurrent.futures.as_completed(tasks):
                task.result()
        except OSError as error:
            raise output_error(library.parent, error) from error
    return records, isa_flags()


def _copy_library(library: Path) -> None:
    shutil.copyfile(native.build(), library)
