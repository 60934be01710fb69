"""Make Triton's interpreter compute in bfloat16, which it keeps as raw bits.

Unpatched, arithmetic and comparisons of bfloat16 work on the bit patterns, casts truncate, and
nothing fails. Here every operation on values goes through float32 and rounds once, to nearest
even. What only moves bits (load, store, reshape, select, broadcast) is left alone. Products in TF32
lose the bits that tensor cores do not read, where the interpreter's would be exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle


def to_float32(bits: np.ndarray) -> np.ndarray:
    """Values of bfloat16 bit patterns, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bits(values: np.ndarray) -> np.ndarray:
    """Bit patterns of the nearest bfloat16 values, ties to even; NaN stays NaN."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _is_bf16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _widen(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(to_float32(handle.data), tl.float32) if _is_bf16(handle) else handle


def _narrow(data: np.ndarray) -> TensorHandle:
    # a comparison gives booleans, which a later cast must not read as bfloat16
    if data.dtype == np.bool_:
        return TensorHandle(data, tl.int1)
    return TensorHandle(to_bits(data), tl.bfloat16)


def _through_float32(name: str) -> None:
    """Widen bfloat16 operands of a method of the builder, and round its result."""
    original = getattr(InterpreterBuilder, name)

    def method(self: InterpreterBuilder, *args: Any) -> TensorHandle:
        operands = [arg for arg in args if isinstance(arg, TensorHandle)]
        if not any(_is_bf16(operand) for operand in operands):
            return original(self, *args)
        wide = [_widen(arg) if isinstance(arg, TensorHandle) else arg for arg in args]
        return _narrow(original(self, *wide).data)

    setattr(InterpreterBuilder, name, method)


def _patch_casts() -> None:
    cast_impl, fp_to_fp = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp

    def cast(self: InterpreterBuilder, src: TensorHandle, dst_type: Any) -> TensorHandle:
        wide = _widen(src)
        if dst_type.scalar == tl.bfloat16:
            return TensorHandle(to_bits(wide.data.astype(np.float32)), tl.bfloat16)
        if wide is src:
            return cast_impl(self, src, dst_type)
        if dst_type.scalar == tl.int1:
            return TensorHandle(wide.data != 0, tl.int1)
        return TensorHandle(wide.data.astype(interpreter._get_np_dtype(dst_type)), dst_type.scalar)

    def convert(
        self: InterpreterBuilder, src: TensorHandle, dst_type: Any, rounding_mode: Any
    ) -> TensorHandle:
        if not _is_bf16(src) and dst_type.scalar != tl.bfloat16:
            return fp_to_fp(self, src, dst_type, rounding_mode)
        if rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ:
            raise NotImplementedError("bfloat16 casts of this interpreter round to nearest even")
        return cast(self, src, dst_type)

    InterpreterBuilder.cast_impl = cast
    InterpreterBuilder.create_fp_to_fp = convert


def _cut_to_tf32(handle: TensorHandle) -> TensorHandle:
    """What tensor cores read of float32 operands: not the last 13 bits."""
    if handle.dtype.scalar != tl.float32:
        return handle
    bits = np.ascontiguousarray(handle.data).view(np.uint32) & np.uint32(0xFFFFE000)
    return TensorHandle(bits.view(np.float32), tl.float32)


def _patch_dot() -> None:
    create_dot = InterpreterBuilder.create_dot

    def dot(
        self: InterpreterBuilder,
        a: TensorHandle,
        b: TensorHandle,
        d: TensorHandle,
        precision: Any,
        *rest: Any,
    ) -> TensorHandle:
        a, b = _widen(a), _widen(b)
        if precision == interpreter._ir.INPUT_PRECISION.TF32:
            a, b = _cut_to_tf32(a), _cut_to_tf32(b)
        product = create_dot(self, a, b, _widen(d), precision, *rest)
        return _narrow(product.data) if _is_bf16(d) else product

    InterpreterBuilder.create_dot = dot


def _patch_sum() -> None:
    original = ReduceOps.sum

    def total(self: ReduceOps, input: Any) -> Any:
        if input.dtype != tl.bfloat16:
            return original(self, input)
        wide = to_float32(input.handle.data).sum(axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(to_bits(wide).reshape(np.shape(wide)), tl.bfloat16)

    ReduceOps.sum = total


def _patch_atomics() -> None:
    for name, place in (("create_atomic_rmw", 2), ("create_atomic_cas", 2)):
        original = getattr(InterpreterBuilder, name)

        def method(
            self: InterpreterBuilder, *args: Any, original: Any = original, place: int = place
        ) -> TensorHandle:
            if _is_bf16(args[place]):
                raise NotImplementedError("the interpreter has no bfloat16 atomics")
            return original(self, *args)

        setattr(InterpreterBuilder, name, method)


def patch_bf16() -> None:
    """Patch the interpreter of this process; a second call changes nothing."""
    if hasattr(InterpreterBuilder, "get_bf16"):
        return
    # all binary operators, comparisons too, are written in terms of the first; what else computes
    # takes float32 only, or widens by itself
    for name in ("binary_op", "create_fma"):
        _through_float32(name)
    _patch_casts()
    _patch_dot()
    _patch_sum()
    _patch_atomics()
    InterpreterBuilder.get_bf16 = lambda self, value: TensorHandle(
        to_bits(np.array([value], dtype=np.float32)), tl.bfloat16
    )


# columns that an instruction of tensor cores adds up at a time (mma.m16n8k16)
_COLUMNS = 16


@contextlib.contextmanager
def products_in_steps() -> Iterator[None]:
    """Let every number of a product be added up in one order, whatever shape its operands have.

    As instructions of tensor cores do, so many columns after each other; numpy's libraries choose
    among several orders. What an instruction adds up is rounded once.
    """
    before = InterpreterBuilder.create_dot

    def dot(
        self: InterpreterBuilder,
        a: TensorHandle,
        b: TensorHandle,
        d: TensorHandle,
        precision: Any,
        *rest: Any,
    ) -> TensorHandle:
        a, b = _widen(a), _widen(b)
        assert d.dtype.scalar == tl.float32
        found = d.data
        for k in range(0, a.data.shape[-1], _COLUMNS):
            rows, columns = a.data[..., k : k + _COLUMNS], b.data[..., k : k + _COLUMNS, :]
            step = rows.astype(np.float64) @ columns.astype(np.float64)
            found = (found + step).astype(np.float32)
        return TensorHandle(found, tl.float32)

    InterpreterBuilder.create_dot = dot
    try:
        yield
    finally:
        InterpreterBuilder.create_dot = before
