"""The CPU's operators from Python: the library of kernels/cpu, opened once a process.

`load` makes its operators known to torch as `specc_cpu::`, with the schemas of kernels/ops.py. The
interface is that of kernels/cpu/specc.h; `native_calls` has its structures.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.errors import EngineError
from specc.kernels import native_calls
from specc.kernels.library_files import library_path

SOURCE_DIR = Path(__file__).parent / "cpu"
# of specc.h
INTERFACE_VERSION = 1
_PREFIX = "specc::"
_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_operators: torch.library.Library | None = None


def load(library: Path | None = None) -> None:
    """Open the library and make its operators known as `specc_cpu::`; once a process.

    Args:
        library: the file; None is the one for this machine.
    Raises:
        ConfigError: SPECC_ISA names a set of instructions that this processor lacks.
        EngineError: there is none, it cannot be loaded, or it is of another version of specc.
    """
    global _library
    with _lock:
        if _library is not None:
            return
        opened = open_library(library_path() if library is None else library)
        native_calls.bind(opened)
        _register(operator_names(opened))
        _library = opened


def open_library(path: Path) -> ctypes.CDLL:
    """Open the file of a library, and see that it is of this version."""
    try:
        # its symbols are those that the library's kernels call
        if openmp := _bundled_openmp() or ctypes.util.find_library("gomp"):
            ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)
        opened = ctypes.CDLL(str(path))
        version = opened.specc_interface_version()
    except (OSError, AttributeError) as error:
        raise EngineError(
            f"{path} cannot be loaded: {error}",
            "specc's library for this machine",
            "install specc again",
        ) from error
    if version != INTERFACE_VERSION:
        raise EngineError(
            f"{path} is of another version of specc (interface {version})",
            f"the operators of this version (interface {INTERFACE_VERSION})",
            "install specc again",
        )
    return opened


def is_loaded() -> bool:
    return _library is not None


def c_functions() -> ctypes.CDLL:
    """The loaded library, for what calls its C functions."""
    assert _library is not None, "load() first"
    return _library


def operator_names(library: ctypes.CDLL | None = None) -> list[str]:
    """Names of all operators that a library has, such as `specc::linear`, sorted."""
    function = (library or c_functions()).specc_operator_names
    function.restype = ctypes.POINTER(ctypes.c_char_p)
    count = ctypes.c_int64()
    names = function(ctypes.byref(count))
    return [names[i].decode() for i in range(count.value)]


def call(name: str, *arguments: Any) -> Any:
    """Call an operator by its name; see `native_calls.call`."""
    assert _library is not None, "load() first"
    return native_calls.call(name, *arguments)


def kernel_threads() -> int:
    """Threads that a kernel would use if this thread called one now."""
    return c_functions().specc_kernel_threads()


def set_kernel_threads(count: int) -> None:
    """Set it for kernels that this thread calls; 0 is what OpenMP says, as torch has set it."""
    native_calls.check(c_functions().specc_set_kernel_threads(count))


def sum_floats(data: Tensor) -> float:
    """Sum of a contiguous float32 tensor with all threads of torch: reads as fast as can be."""
    assert data.dtype == torch.float32
    assert data.is_contiguous()
    function = c_functions().specc_sum_floats
    function.restype = ctypes.c_float
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
    return function(data.data_ptr(), data.numel(), torch.get_num_threads())


def int4_scales(values: Tensor, has_zeros: bool) -> tuple[Tensor, Tensor]:
    """Scales and zero points [M] of groups [M, up to 128 columns] float32, as `search_scales` of
    specc/artifact/rounding.py finds them, bit for bit, with all threads of torch.
    """
    assert values.dtype == torch.float32
    values = values.contiguous()
    groups, width = values.shape
    scales, zeros = torch.empty(groups), torch.empty(groups)
    function = c_functions().specc_int4_scales
    function.argtypes = (
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int,
        ctypes.c_void_p, ctypes.c_void_p,
    )  # fmt: skip
    native_calls.check(
        function(
            values.data_ptr(),
            groups,
            width,
            has_zeros,
            torch.get_num_threads(),
            scales.data_ptr(),
            zeros.data_ptr(),
        )
    )
    return scales, zeros


def watch_memory(data: Tensor) -> None:
    """Let a process that a cut weight file kills say why.

    Args:
        data: contiguous and in a mapped file; what frees its memory calls `forget_memory`.
    """
    c_functions().specc_watch_memory(ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.nbytes))


def forget_memory(data: Tensor) -> None:
    """End what `watch_memory` began."""
    c_functions().specc_forget_memory(ctypes.c_void_p(data.data_ptr()))


def openmp_flags() -> list[str]:
    """What links a kernel, compiled on its own, to the OpenMP of this process."""
    return [str(_bundled_openmp() or "-fopenmp")]


def _bundled_openmp() -> Path | None:
    # torch's own copy: two OpenMP runtimes in a process spin against each other
    root = Path(torch.__file__).parent / "lib"
    found = sorted(root.glob("libgomp*.so*")) + sorted(root.glob("libomp*.so*"))
    return found[0] if found else None


def _register(names: list[str]) -> None:
    """Operators of kernels/ops.py that the library has, as torch.ops.specc_cpu.

    A namespace of their own: the oracles stay torch.ops.specc, also after a library was loaded.
    """
    from specc.kernels.ops import OPERATORS

    global _operators
    if _operators is None:
        _operators = torch.library.Library("specc_cpu", "DEF")
    for full_name in names:
        name = full_name.removeprefix(_PREFIX)
        if full_name == name or name not in OPERATORS:
            continue
        known = OPERATORS[name]
        schema = getattr(torch.ops.specc, name).default._schema
        _operators.define(known.schema)
        _operators.impl(name, _implementation(full_name, schema), "CPU")
        torch.library.register_fake(f"specc_cpu::{name}", known.fake, lib=_operators)


def _implementation(name: str, schema: torch.FunctionSchema) -> Callable:
    rest = [(each.name, each.default_value) for each in schema.arguments]

    def implementation(*arguments: Any, **named: Any) -> Any:
        # the dispatcher leaves out what has its default
        given = [named.get(key, default) for key, default in rest[len(arguments) :]]
        return native_calls.call(name, *arguments, *given)

    return implementation
