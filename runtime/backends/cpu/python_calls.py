"""Operators without a kernel in the library: the runner lets Python call torch's.

torch's stable C functions know no `Scalar`, which `aten::add.Tensor` has, and its C++ ones change
with its version. So the way there is a callback: whatever a graph may call, of whichever version.
It costs some 20 µs and the interpreter's lock; what every model calls has a kernel.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from specc.kernels.native_calls import CODES, DTYPES
from specc.runtime.backends.cpu.native_calls import functions, view_of

# of kernels/cpu/frame.h
_WORDS = 21
_TENSOR, _INTEGER = 1, 2
_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
)
_calls: dict[int, PythonCall] = {}
_next_id = itertools.count()
# results of the last call of a thread, until they are copied; and why one failed
_state = threading.local()


class PythonCall:
    """One node that Python runs."""

    def __init__(self, node: fx.Node) -> None:
        self.target: Any = node.target
        self._args, self._kwargs = node.args, dict(node.kwargs)
        self.inputs = list(node.all_input_nodes)
        # how many values each of them has; None: one
        self._widths: list[int | None] = []
        self.id = next(_next_id)
        _install()
        _calls[self.id] = self

    def close(self) -> None:
        """Nothing calls it any more."""
        _calls.pop(self.id, None)

    def spread(self, slots: Mapping[fx.Node, int | list[int]]) -> None:
        """Note which inputs come as several values, one after the other."""
        found = (slots[node] for node in self.inputs)
        self._widths = [len(own) if isinstance(own, list) else None for own in found]

    def run(self, values: list[Any]) -> Any:
        """The node's result, of the values of `inputs`."""
        given: dict[fx.Node, Any] = {}
        for node, width in zip(self.inputs, self._widths, strict=True):
            given[node] = values[0] if width is None else values[:width]
            values = values[1 if width is None else width :]
        args, kwargs = fx.map_arg((self._args, self._kwargs), given.__getitem__)
        return self.target(*args, **kwargs)


def take_error() -> BaseException | None:
    """Why the last call of this thread failed, once."""
    error, _state.error = getattr(_state, "error", None), None
    return error


def _call(id_: int, count: int, num_results: int, message: int) -> int:
    try:
        words: Any = (ctypes.c_int64 * (_WORDS * max(count, num_results))).from_address(message)
        with torch.inference_mode():
            values = [_read(words[i * _WORDS : (i + 1) * _WORDS]) for i in range(count)]
            found = _calls[id_].run(values)
            results = list(found) if isinstance(found, list | tuple) else [found]
            _state.results = results
            for i in range(num_results):
                words[i * _WORDS : (i + 1) * _WORDS] = _written(results[i])
        return 0
    except BaseException as error:
        _state.error = error
        return 1


def _read(row: list[int]) -> Any:
    if row[0] == _TENSOR:
        dim = row[3]
        return view_of(row[1], DTYPES[row[2]], row[4 : 4 + dim], row[12 : 12 + dim], row[20])
    return row[1] if row[0] == _INTEGER else None


def _written(value: Any) -> list[int]:
    if not isinstance(value, Tensor):
        raise TypeError(f"an operator returned {type(value).__name__}, no tensor")
    shape, strides = list(value.shape), list(value.stride())
    rest = [0] * (8 - len(shape))
    num_bytes = value.untyped_storage().nbytes() - int(value.storage_offset()) * value.itemsize
    head = [_TENSOR, value.data_ptr(), CODES[value.dtype], len(shape)]
    return [*head, *shape, *rest, *strides, *rest, num_bytes]


_callback: Any = None


def _install() -> None:
    global _callback
    if _callback is None:
        _callback = _Callback(_call)
        functions().specc_set_python_call(ctypes.cast(_callback, ctypes.c_void_p))
