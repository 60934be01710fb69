"""Operators of an engine's graphs that the CPU library has no kernel for: torch runs them."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specc.artifact.manifest import Manifest
from specc.errors import SpeccError
from specc.kernels.library_files import library_path
from specc.system.json_file import read_engine_json

# instructions of the runner itself
_OWN = ("aten.sym_size.int",)


def missing_kernels(engine: Path, manifest: Manifest) -> Counter[str] | None:
    """Name of an operator → calls of it in all programs and steps, of those without a kernel.

    Args:
        engine: its directory.
        manifest: of it, of the backend cpu.
    Returns:
        None where there is no library here to ask.
    Raises:
        EngineError: a file of a program cannot be read.
    """
    kernels = _kernels()
    if kernels is None:
        return None
    programs = (*manifest.models, *manifest.self_drafts)
    files = [
        *(program.program_file for program in programs),
        *manifest.step_files.values(),
        *manifest.winners_files.values(),
    ]
    found = Counter[str]()
    for name in dict.fromkeys(files):
        program = read_engine_json(engine / name, "a program", "compile or copy the engine again")
        stages = program.get("stages", [program])
        for stage in stages:
            found.update(_called(stage["graph"]))
    return Counter({name: count for name, count in found.items() if _symbol(name) not in kernels})


def _called(graph: Mapping[str, Any]) -> Iterable[str]:
    for node in graph["nodes"]:
        name = node.get("target", "")
        if name.startswith(("aten.", "specc.")) and name not in _OWN:
            yield name


def _symbol(name: str) -> str:
    """`aten::add.Tensor` of `aten.add.Tensor`, and `specc::linear` of `specc.linear.default`."""
    namespace, _, rest = name.partition(".")
    return f"{namespace}::{rest.removesuffix('.default')}"


def _kernels() -> frozenset[str] | None:
    try:
        library = ctypes.CDLL(str(library_path()))
    except (OSError, SpeccError):
        return None
    function = library.specc_operator_names
    function.restype = ctypes.POINTER(ctypes.c_char_p)
    count = ctypes.c_int64()
    names = function(ctypes.byref(count))
    return frozenset(names[i].decode() for i in range(count.value))
