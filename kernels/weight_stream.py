"""Pieces of a weight file, read around a pass while others are used (kernels/cpu/weight_stream.h).

The library of the C++ operators has to be loaded.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.kernels import native

_I32, _I64, _F64, _TEXT = ctypes.c_int, ctypes.c_int64, ctypes.c_double, ctypes.c_char_p
_POINTER = ctypes.c_void_p
_NUMBERS = ctypes.POINTER(_I64)
# name → type of the result, and those of the arguments
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "error": (_TEXT,),
    "open": (_I32, _TEXT, _NUMBERS, _NUMBERS, _I64, _I32, ctypes.POINTER(_POINTER)),
    "acquire": (_I32, _POINTER, _I64),
    "release": (_I32, _POINTER, _I64),
    "piece": (
        _I32, _POINTER, _I64, ctypes.POINTER(_POINTER), _NUMBERS, ctypes.POINTER(_POINTER),
    ),
    "free": (None, _POINTER),
    "is_direct": (_I32, _POINTER),
    "set_patience": (None, _POINTER, _F64),
    "bytes_read": (_I64, _POINTER),
    "seconds": (None, _POINTER, ctypes.POINTER(_F64)),
    "close": (None, _POINTER),
}  # fmt: skip


class WeightStream:
    """A thread reads piece i + 1 while piece i is used; pieces are used in order, pass after pass.

    Args:
        offsets: bytes of the file at which pieces begin, in the order in which a pass uses them.
        sizes: bytes of each.
        direct: past the page cache, where the file system can.
    Raises:
        RuntimeError: the file cannot be opened, or there is no memory for two pieces.
    """

    def __init__(
        self, file: Path, offsets: Sequence[int], sizes: Sequence[int], direct: bool = True
    ) -> None:
        numbers = _I64 * len(offsets)
        made = _POINTER()
        values = (numbers(*offsets), numbers(*sizes), len(offsets), int(direct))
        _checked("open", os.fsencode(file), *values, ctypes.byref(made))
        self._handle = made.value
        weakref.finalize(self, _function("close"), made.value)

    @property
    def handle(self) -> int:
        """By which native programs know it; they keep it."""
        assert self._handle is not None
        return self._handle

    def acquire(self, index: int) -> None:
        """Wait until a piece is there.

        Raises:
            RuntimeError: it cannot be read, or nothing is read for too long.
        """
        _checked("acquire", self._handle, index)

    def release(self, index: int) -> None:
        """Its memory may be overwritten."""
        _checked("release", self._handle, index)

    def piece(self, index: int) -> Tensor:
        """[size] uint8, always the same memory; what it holds is known after `acquire`."""
        data, size, owner = _POINTER(), _I64(), _POINTER()
        places = (ctypes.byref(data), ctypes.byref(size), ctypes.byref(owner))
        _checked("piece", self._handle, index, *places)
        assert data.value is not None
        memory = (ctypes.c_uint8 * size.value).from_address(data.value)
        # the tensor keeps `memory`, and that the buffer
        weakref.finalize(memory, _function("free"), owner.value)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def is_direct(self) -> bool:
        """Whether reads go past the page cache."""
        return bool(_function("is_direct")(self._handle))

    def set_patience(self, seconds: float) -> None:
        """How long `acquire` waits while no byte is read."""
        _function("set_patience")(self._handle, seconds)

    def bytes_read(self) -> int:
        """Bytes that were asked of the file, whole pages."""
        return _function("bytes_read")(self._handle)

    def seconds(self) -> tuple[float, float]:
        """Of reading, and of waiting in `acquire`."""
        both = (_F64 * 2)()
        _function("seconds")(self._handle, both)
        return both[0], both[1]


def _function(name: str) -> Any:
    function = getattr(native.c_functions(), f"specc_stream_{name}")
    function.restype, *function.argtypes = _FUNCTIONS[name]
    return function


def _checked(name: str, *values: Any) -> None:
    # ctypes lets other threads of Python run meanwhile
    if _function(name)(*values):
        raise RuntimeError(_function("error")().decode(errors="replace"))
