"""Operators of the CPU library, called with torch's tensors: the structures of kernels/cpu/specc.h.

A call packs its arguments into one buffer of its thread, and results lie in memory of torch's.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

import torch
from torch import Tensor

MOST_DIMS = 8
MOST_RESULTS = 4
# SpeccTensor: data, dtype, dim, sizes, strides, bytes
TENSOR = struct.Struct(f"<Qii{MOST_DIMS}q{MOST_DIMS}qq")
# SpeccValue: kind, integer, real, items
VALUE = struct.Struct("<qqdQ")
NONE, OF_TENSOR, INT, REAL, BOOL, TEXT, INTS, REALS, TENSORS = range(9)
# the numbers of torch's ScalarType
DTYPES = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64,
    5: torch.float16, 6: torch.float32, 7: torch.float64, 9: torch.complex64, 11: torch.bool,
    15: torch.bfloat16, 24: torch.float8_e4m3fn, 44: torch.float8_e8m0fnu,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
# no such type: the library says so
_UNKNOWN_CODE = -1
_PADDING = tuple((0,) * (MOST_DIMS - dim) for dim in range(MOST_DIMS + 1))
_NOTHING = (0,) * (2 * MOST_DIMS + 1)
_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)

_call: Any = None
_error: Any = None


class _Buffers(threading.local):
    """What a thread packs its calls into."""

    def __init__(self) -> None:
        self.grow(4096)
        self.results = ctypes.create_string_buffer(MOST_RESULTS * TENSOR.size)
        self.num_results = ctypes.c_int64()
        self.allocated: list[Tensor] = []

    def grow(self, size: int) -> None:
        self.memory: Any = ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self.memory)
        self.size = size


_buffers = _Buffers()


@_ALLOCATE
def _allocate(_: int | None, size: int) -> int | None:
    try:
        memory = torch.empty(-(-size // 64) * 64, dtype=torch.uint8)
    except (RuntimeError, MemoryError):
        return None
    _buffers.allocated.append(memory)
    return memory.data_ptr()


def bind(library: ctypes.CDLL) -> None:
    """Make `call` use an opened library."""
    global _call, _error
    _call, _error = library.specc_call, library.specc_error
    _call.argtypes = (
        ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p,
        _ALLOCATE, ctypes.c_void_p,
    )  # fmt: skip
    _error.argtypes, _error.restype = (), ctypes.c_char_p


def check(code: int) -> None:
    """Raise what `specc_error` says, where a function of the library has failed."""
    if code:
        raise RuntimeError(_error().decode(errors="replace"))


def call(name: str, *arguments: Any) -> Any:
    """Call an operator by its name.

    Args:
        name: such as `specc::linear`.
        arguments: all of its schema, in that order: tensors on the CPU, numbers, texts, lists of
            one of them, or None.
    Returns:
        nothing, a tensor, or a tuple of them; new ones, or views of arguments.
    Raises:
        RuntimeError: the operator refuses them; the text says why.
    """
    buffers = _buffers
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    size = len(arguments) * VALUE.size + len(tensors) * TENSOR.size
    for each in arguments:
        if isinstance(each, (list, tuple)):
            tensors += [x for x in each if isinstance(x, Tensor)]
            size += len(each) * TENSOR.size
        elif isinstance(each, str):
            size += 4 * len(each)
    if size > buffers.size:
        buffers.grow(2 * size)
    try:
        _pack(buffers, arguments)
    except struct.error as error:
        raise RuntimeError(f"specc: a number that is no int64: {error}") from error
    buffers.allocated = []
    code = _call(
        name.encode(),
        buffers.address,
        len(arguments),
        buffers.results,
        ctypes.byref(buffers.num_results),
        _allocate,
        None,
    )
    allocated, buffers.allocated = buffers.allocated, []
    check(code)
    count = buffers.num_results.value
    results = tuple(_result(buffers.results, i, allocated, tensors) for i in range(count))
    return results[0] if count == 1 else results or None


def _pack(buffers: _Buffers, arguments: tuple[Any, ...]) -> None:
    memory, place = buffers.memory, 0
    end = len(arguments) * VALUE.size  # of what is packed
    for value in arguments:
        kind, integer, real, items = NONE, 0, 0.0, 0
        if isinstance(value, Tensor):
            kind, items = OF_TENSOR, buffers.address + end
            end = _pack_tensor(memory, end, value)
        elif isinstance(value, bool):
            kind, integer = BOOL, int(value)
        elif isinstance(value, int):
            kind, integer = INT, value
        elif isinstance(value, float):
            kind, real = REAL, value
        elif isinstance(value, str):
            data = value.encode()
            kind, integer, items = TEXT, len(data), buffers.address + end
            struct.pack_into(f"{len(data)}s", memory, end, data)
            end += len(data) + -len(data) % 8
        elif isinstance(value, (list, tuple)):
            integer, items = len(value), buffers.address + end
            if any(isinstance(x, Tensor) for x in value):
                kind = TENSORS
                for each in value:
                    if each is None:  # as the library knows it, where it may be absent
                        TENSOR.pack_into(memory, end, 0, 0, -1, *_NOTHING)
                        end += TENSOR.size
                    elif isinstance(each, Tensor):
                        end = _pack_tensor(memory, end, each)
                    else:
                        raise TypeError(f"a list of tensors has no {type(each).__name__}")
            else:
                kind = REALS if any(isinstance(x, float) for x in value) else INTS
                code = "d" if kind == REALS else "q"
                struct.pack_into(f"<{len(value)}{code}", memory, end, *value)
                end += 8 * len(value)
        elif value is not None:
            raise TypeError(f"an operator takes no {type(value).__name__}")
        VALUE.pack_into(memory, place, kind, integer, real, items)
        place += VALUE.size


def _pack_tensor(memory: Any, place: int, x: Tensor) -> int:
    """Describe a tensor at a place of the buffer; returns where the next thing may be."""
    if not x.is_cpu or x.layout != torch.strided:
        raise RuntimeError(f"specc: a tensor on {x.device} of layout {x.layout}")
    if (dim := x.dim()) > MOST_DIMS:
        raise RuntimeError(f"specc: a tensor of {dim} dimensions")
    if x.is_contiguous():
        size = x.nbytes
    else:
        size = x.untyped_storage().nbytes() - int(x.storage_offset()) * x.element_size()
    padding = _PADDING[dim]
    code = CODES.get(x.dtype, _UNKNOWN_CODE)
    TENSOR.pack_into(
        memory, place, x.data_ptr(), code, dim, *x.shape, *padding, *x.stride(), *padding, size
    )
    return place + TENSOR.size


def _result(memory: Any, index: int, allocated: list[Tensor], arguments: list[Tensor]) -> Tensor:
    data, code, dim, *rest = TENSOR.unpack_from(memory, index * TENSOR.size)
    dtype = DTYPES[code]
    sizes, strides = rest[:dim], rest[MOST_DIMS : MOST_DIMS + dim]
    for owner in (*allocated, *arguments):
        storage = owner.untyped_storage()
        offset = data - storage.data_ptr()
        if 0 <= offset < storage.nbytes():
            place = offset // dtype.itemsize
            return torch.empty(0, dtype=dtype).set_(storage, place, sizes, strides)
    if 0 in sizes:
        return torch.empty_strided(sizes, strides, dtype=dtype)
    raise RuntimeError("specc: a result lies in memory of nobody")
