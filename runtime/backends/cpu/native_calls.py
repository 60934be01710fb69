"""The C functions of programs and steps (kernels/cpu/specc_programs.h), by ctypes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specc.errors import EngineError
from specc.kernels import native
from specc.kernels.native_calls import CODES, DTYPES, MOST_DIMS

_INT64, _TEXT, _POINTER = ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p
_INTS, _INT = ctypes.POINTER(ctypes.c_int64), ctypes.c_int


class NativeTensor(ctypes.Structure):
    """`SpeccTensor`: where a tensor lies, and how."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("sizes", ctypes.c_int64 * MOST_DIMS),
        ("strides", ctypes.c_int64 * MOST_DIMS),
        ("bytes", ctypes.c_int64),
    )


_TENSOR = ctypes.POINTER(NativeTensor)
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "specc_code_new": (_POINTER, (_INT64,)),
    "specc_code_free": (None, (_POINTER,)),
    "specc_code_input": (_INT, (_POINTER, _INT64)),
    "specc_code_keep": (_INT, (_POINTER, _INT64)),
    "specc_code_stage": (_INT, (_POINTER,)),
    "specc_code_operator": (_INT, (_POINTER, _TEXT, _INT64, _INT64, _INT)),
    "specc_code_python": (_INT, (_POINTER, _INT64, _TEXT, _INT64, _INT64, _INT, _INT)),
    "specc_code_size": (_INT, (_POINTER, _INT64, _INT64, _INT64)),
    "specc_code_arithmetic": (_INT, (_POINTER, _TEXT, _INT64)),
    "specc_code_call": (_INT, (_POINTER, _POINTER, _INT64)),
    "specc_code_slot": (_INT, (_POINTER, _INT64)),
    "specc_code_none": (_INT, (_POINTER,)),
    "specc_code_int": (_INT, (_POINTER, _INT64)),
    "specc_code_bool": (_INT, (_POINTER, _INT)),
    "specc_code_real": (_INT, (_POINTER, ctypes.c_double)),
    "specc_code_text": (_INT, (_POINTER, _TEXT)),
    "specc_code_scalar": (_INT, (_POINTER, _TENSOR)),
    "specc_code_list": (_INT, (_POINTER, _INT64)),
    "specc_code_finish": (_INT, (_POINTER,)),
    "specc_code_last_use": (_INT64, (_POINTER, _INT64)),
    "specc_set_python_call": (None, (_POINTER,)),
    "specc_pool_new": (_POINTER, (_INT64,)),
    "specc_pool_free": (None, (_POINTER,)),
    "specc_pool_counts": (_INT, (_POINTER, _INTS)),
    "specc_set_poison": (None, (_INT,)),
    "specc_program_new": (_POINTER, (_POINTER, _INTS, _INT64, _INT64)),
    "specc_segments_new": (
        _POINTER, (ctypes.POINTER(_POINTER), _INTS, _INT64, _POINTER, _INT, _INT),
    ),
    "specc_program_free": (None, (_POINTER,)),
    "specc_program_bind": (_INT, (_POINTER, _INT64, _TENSOR)),
    "specc_program_watch": (_INT, (_POINTER, _POINTER, ctypes.c_size_t)),
    "specc_program_flat": (_INT, (_POINTER, _INT)),
    "specc_program_states": (_INT, (_POINTER,)),
    "specc_program_adapters": (_INT, (_POINTER,)),
    "specc_program_hidden": (_INT, (_POINTER, _INTS, _INT64, ctypes.c_int32)),
    "specc_program_limits": (_INT, (_POINTER, _INT64, _INT64, _INT64)),
    "specc_program_threads": (_INT64, (_POINTER,)),
    "specc_program_run": (_POINTER, (_POINTER, _POINTER, _TENSOR, _INT64, _TENSOR)),
    "specc_result_free": (None, (_POINTER,)),
    "specc_step_new": (_POINTER, (_POINTER, _POINTER)),
    "specc_step_free": (None, (_POINTER,)),
    "specc_step_set": (_INT, (_POINTER, _INT64, _TENSOR)),
    "specc_step_get": (_INT, (_POINTER, _INT64, _TENSOR)),
    "specc_step_run": (_INT, (_POINTER, _TENSOR, _INT64, _INT64, _INT64)),
    "specc_step_step": (
        _INT, (_POINTER, _POINTER, _INT64, _TENSOR, _POINTER, _INT64, _INT64, _INT64, _INT),
    ),
    "specc_step_steps": (
        _INT, (_POINTER, _POINTER, _INT64, _TENSOR, _POINTER, _INT64, _INT64, _POINTER, _INT64),
    ),
    "specc_step_end": (_INT, (_POINTER,)),
    "specc_step_found": (_POINTER, (_POINTER, _INTS)),
    "specc_step_seconds": (_POINTER, (_POINTER, _INTS)),
    "specc_step_program_seconds": (_POINTER, (_POINTER, _INTS)),
    "specc_error": (_TEXT, ()),
}  # fmt: skip


@functools.cache
def functions() -> ctypes.CDLL:
    """The library, with the types of its functions."""
    library = native.c_functions()
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@functools.cache
def operators() -> frozenset[str]:
    """Operators that have a kernel: `specc::linear`, `aten::add.Tensor`."""
    return frozenset(native.operator_names())


def error_text() -> str:
    """Why the last call of this thread failed."""
    return functions().specc_error().decode(errors="replace")


def checked(status: int) -> None:
    """Raises EngineError: a call that builds something failed."""
    if status:
        raise refused()


def made(pointer: int | None) -> int:
    """What a call made; raises EngineError where it is nothing."""
    if not pointer:
        raise refused()
    return pointer


def refused() -> EngineError:
    return EngineError(
        f"a program that cannot run: {error_text().removeprefix('specc: ')}",
        "a graph that this version of specc has written",
        "compile the engine again",
    )


def describe(tensor: Tensor, into: NativeTensor | None = None) -> NativeTensor:
    """Where a tensor lies; it has to be kept while that is used."""
    found = NativeTensor() if into is None else into
    shape, itemsize = tensor.shape, tensor.itemsize
    found.data = tensor.data_ptr()
    found.dtype = CODES.get(tensor.dtype, -1)
    found.dim = dim = len(shape)
    if dim > MOST_DIMS:
        raise ValueError(f"a tensor of {dim} dimensions, at most {MOST_DIMS}")
    found.sizes[:dim] = shape
    found.strides[:dim] = tensor.stride()
    found.bytes = tensor.untyped_storage().nbytes() - tensor.storage_offset() * itemsize
    return found


def describe_all(tensors: Sequence[Tensor]) -> Any:
    """An array of what `describe` says of each."""
    found = (NativeTensor * len(tensors))()
    for place, tensor in zip(found, tensors, strict=True):
        describe(tensor, place)
    return found


def view_of(
    data: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int], num_bytes: int
) -> Tensor:
    """A tensor in memory of the library, which has to stay meanwhile."""
    if not data or 0 in sizes or num_bytes <= 0:
        return torch.empty(tuple(sizes), dtype=dtype)
    memory = (ctypes.c_char * (num_bytes // dtype.itemsize * dtype.itemsize)).from_address(data)
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
    return flat.as_strided(tuple(sizes), tuple(strides))


def tensor_at(found: NativeTensor) -> Tensor:
    """`view_of` what the library describes."""
    dim = found.dim
    dtype = DTYPES[found.dtype]
    return view_of(found.data or 0, dtype, found.sizes[:dim], found.strides[:dim], found.bytes)


class Pool:
    """Memory that the programs of an engine share; see kernels/cpu/arena.h.

    Args:
        reserved: bytes that a program in progress begins with.
    """

    def __init__(self, reserved: int = 0) -> None:
        self.pointer = made(functions().specc_pool_new(reserved))
        self._free: Callable[[int], None] = functions().specc_pool_free

    def __del__(self) -> None:
        if hasattr(self, "_free"):
            self._free(self.pointer)

    def counts(self) -> tuple[int, int, int, int]:
        """Of what nobody uses: arenas, bytes, most bytes at a time, growths."""
        found = (ctypes.c_int64 * 4)()
        checked(functions().specc_pool_counts(self.pointer, found))
        return found[0], found[1], found[2], found[3]
