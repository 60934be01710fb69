"""Operators of tensors in Triton's interpreter, for the types that kernels are made of.

Triton decides at every operator what types its operands get, in a dozen calls: more than numpy
takes for the numbers. Where both operands have one type, or nearly so, nothing is to be decided,
and the operators here compute the same at once. Everything else (half precision, mixtures of kinds,
shifts by tensors, masks of other shapes) goes the interpreter's way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

_INTEGERS = {"int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}
_NUMBERS = {**_INTEGERS, "uint32": np.dtype(np.uint32), "fp32": np.dtype(np.float32)}
_SMALLEST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
_BITS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_SHIFTS = {"lshift": np.left_shift, "rshift": np.right_shift}
# of operands of these types, bit by bit
_OF_BITS = {"int1", "int32", "int64", "uint32"}

# numbers of both, and the type in which they meet
_Operands = tuple[np.ndarray, np.ndarray, tl.dtype]

_block_types: dict[tuple[str, tuple[int, ...]], tl.block_type] = {}
_constants: dict[tuple[str, type, float], np.ndarray] = {}


def patch_operators() -> None:
    """Patch the operators of this process's tensors, which nothing but the interpreter uses."""
    for name, compute in _ARITHMETIC.items():
        _replace(f"__{name}__", compute)
        _replace(f"__r{name}__", compute, is_reversed=True)
    for name, compute in _COMPARISONS.items():
        _replace(f"__{name}__", compute, is_comparison=True)
    for name, compute in _BITS.items():
        _replace(f"__{name}__", compute, operands=_operands_of_bits)
    for name, compute in _SHIFTS.items():
        _replace(f"__{name}__", compute, operands=_operands_of_shift)


def _replace(
    name: str,
    compute: Callable[..., np.ndarray],
    *,
    operands: Callable[[tl.tensor, Any], _Operands | None] | None = None,
    is_reversed: bool = False,
    is_comparison: bool = False,
) -> None:
    original = getattr(tl.tensor, name)
    operands = operands or _operands

    def operator(self: tl.tensor, other: Any, _semantic: Any = None) -> tl.tensor:
        if type(other) is tl.constexpr:
            other = other.value
        if name == "__add__" and self.dtype.is_ptr():
            found = _moved(self, other)
            if found is not None:
                return found
        given = operands(self, other)
        if given is None:
            return original(self, other, _semantic=interpreter.interpreter_semantic)
        one, two, dtype = given
        data = compute(two, one) if is_reversed else compute(one, two)
        # as the interpreter has it: what compares is a boolean in a handle of its operands' type
        return _tensor(_handle(data, dtype), tl.int1 if is_comparison else dtype, self, other)

    setattr(tl.tensor, name, operator)


def _operands(self: tl.tensor, other: Any) -> _Operands | None:
    """Those of one type, of integers of both sizes, and a number that the type has."""
    dtype = self.dtype
    if type(other) is not tl.tensor:
        constant = _constant(other, dtype)
        return None if constant is None else (self.handle.data, constant, dtype)
    if dtype.name not in _NUMBERS:
        return None
    if dtype.name != other.dtype.name:
        if dtype.name not in _INTEGERS or other.dtype.name not in _INTEGERS:
            return None
        dtype = tl.int64
    return self.handle.data, other.handle.data, dtype


def _operands_of_bits(self: tl.tensor, other: Any) -> _Operands | None:
    """Those of one shape: a mask of other numbers than booleans is one only where it is a block."""
    if type(other) is int and self.dtype.name in _OF_BITS:
        return _operands(self, other)
    if type(other) is not tl.tensor or self.shape is not other.shape:
        return None
    one, two = self.handle, other.handle
    is_alike = self.dtype.name == other.dtype.name and one.data.dtype == two.data.dtype
    if not is_alike or self.dtype.name not in _OF_BITS or one.dtype.name not in _OF_BITS:
        return None
    return one.data, two.data, self.dtype


def _operands_of_shift(self: tl.tensor, other: Any) -> _Operands | None:
    """Numbers and a constant count, which is less than they have bits."""
    if type(other) is not int or not 0 <= other < 32 or self.dtype.name not in _OF_BITS:
        return None
    return _operands(self, other)


def _constant(value: Any, dtype: tl.dtype) -> np.ndarray | None:
    """A number that a tensor of `dtype` takes as one of its own; None where that is not sure."""
    name, kind = dtype.name, type(value)
    found = _constants.get((name, kind, value)) if kind in (int, float) else None
    if found is not None:
        return found
    if kind is int:
        smallest = 0 if name == "uint32" else -(2**31)
        is_sure = name in _NUMBERS and smallest <= value < 2**31
    elif kind is float:
        size = abs(value)
        is_normal = value == 0.0 or math.isinf(value) or _SMALLEST <= size <= _LARGEST
        is_sure = name == "fp32" and is_normal
    else:
        is_sure = False
    if not is_sure:
        return None
    # zeros of Triton have no sign
    made = np.array([value or 0], dtype=_NUMBERS[name])
    _constants[name, kind, value] = made
    return made


def _moved(self: tl.tensor, other: Any) -> tl.tensor | None:
    """Addresses and a signed offset, in elements."""
    if type(other) is tl.tensor:
        if other.dtype.name not in _INTEGERS:
            return None
        offset = other.handle.data
    else:
        found = _constant(other, tl.int64)
        if found is None:
            return None
        offset = found
    pointer = self.handle
    width = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
    data = pointer.data + width * offset.astype(np.uint64)
    return _tensor(_handle(data, pointer.dtype), self.dtype, self, other)


def _handle(data: np.ndarray, dtype: tl.dtype) -> TensorHandle:
    """As the class makes it, without looking whether numpy's elements are too large."""
    handle = TensorHandle.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    return handle


def _tensor(handle: TensorHandle, dtype: tl.dtype, one: tl.tensor, other: Any) -> tl.tensor:
    """A tensor of the shape that its numbers have."""
    like = one
    if type(other) is tl.tensor and one.shape is not other.shape:
        if not one.type.is_block():
            like = other
        elif other.type.is_block():
            return tl.tensor(handle, _block_type(dtype, handle.data.shape))
    if like.type.is_block():
        made = tl.tensor.__new__(tl.tensor)
        if dtype is like.dtype:
            made.type = like.type
        else:
            made.type = _block_type(dtype, handle.data.shape)
        made.handle, made.dtype, made.shape, made.numel = handle, dtype, like.shape, like.numel
        return made
    return tl.tensor(handle, dtype)


def _block_type(dtype: tl.dtype, sizes: tuple[int, ...]) -> tl.block_type:
    if dtype.is_ptr():
        return tl.block_type(dtype, list(sizes))
    key = dtype.name, sizes
    if key not in _block_types:
        _block_types[key] = tl.block_type(dtype, list(sizes))
    return _block_types[key]
