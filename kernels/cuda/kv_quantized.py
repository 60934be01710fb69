"""Rows of K and V as codes in Triton: a byte for each column, and the row's scale after them.

The type of a cache's elements says how it holds rows when a kernel is compiled: int8 and uint8 are
codes of int8 and of e4m3, and kernels over any other cache have nothing of this. The bytes of a
row are those of the oracle, `kernels/reference/kv_rows.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.artifact.kv_rows import SCALE_BYTES, holds_quantized
from specc.kernels.cuda.strided_rows import check, said
from specc.kernels.reference.kv_rows import LEAST, MOST_CODE

_LEAST = tl.constexpr(LEAST)
_MOST_INT8 = tl.constexpr(float(MOST_CODE[torch.int8]))
_MOST_FP8 = tl.constexpr(float(MOST_CODE[torch.uint8]))
# a float32 of this size has steps of 4, so to add and subtract it rounds to multiples of 4
_STEPS_OF_4 = tl.constexpr(1.5 * 2.0**25)
_2_120 = tl.constexpr(2.0**120)


def check_words(operator: str, caches: Mapping[str, Tensor]) -> None:
    """Raises ValueError: quantized rows that do not begin and end at words of four bytes."""
    for name, cache in caches.items():
        steps = *cache.stride()[:-1], cache.storage_offset(), cache.shape[-1]
        is_right = not holds_quantized(cache.dtype) or all(x % SCALE_BYTES == 0 for x in steps)
        needed = f"heads of a multiple of {SCALE_BYTES} columns"
        check(is_right, operator, said(name, cache), needed)


@triton.jit
def in_words(stride, p):
    """A stride of a cache; of quantized rows, the compiler is told that rows begin at words."""
    if p.dtype.element_ty.primitive_bitwidth == 8:
        return stride // 4 * 4
    else:
        return stride


@triton.jit
def scales_at(p_row, D: tl.constexpr):
    """Pointers to the scales of rows at pointers of any shape."""
    return (p_row + D).to(tl.pointer_type(tl.float32))


@triton.jit
def load_scales(p_row, m_row, D: tl.constexpr, IS_MASKED: tl.constexpr):
    """Scales of rows at pointers of any shape; where masked, 0 of those that are not there."""
    if IS_MASKED:
        return tl.load(scales_at(p_row, D), mask=m_row, other=0.0)
    else:
        return tl.load(scales_at(p_row, D))


@triton.jit
def values_of(b, dtype: tl.constexpr):
    """What codes say, as numbers of a floating-point type, which has all of them; others stay."""
    if b.dtype == tl.int8:
        return b.to(dtype)
    elif b.dtype == tl.uint8:
        # seven bits below a sign, where a float32 has the end of its exponent and the beginning of
        # its mantissa, are a value times 2^-120, also of numbers without a leading one
        b_bits = b.to(tl.int32)
        b_bits = ((b_bits & 0x80) << 24) | ((b_bits & 0x7F) << 20)
        return (b_bits.to(tl.float32, bitcast=True) * _2_120).to(dtype)
    else:
        return b


@triton.jit
def weigh(b_p, b_v, b_scale, dtype: tl.constexpr):
    """Weights [BM, BN] and values [BN, D] of keys as operands of their product.

    Args:
        b_p: float32.
        b_v: values, or codes.
        b_scale: [BN] of quantized rows.
        dtype: of the product.
    """
    if b_scale is None:
        return b_p.to(b_v.dtype), b_v
    elif dtype == tl.float16:
        # a weight times a scale may be less than float16 has, a value that is scaled is one that a
        # cache in that type would have
        return b_p.to(dtype), (values_of(b_v, tl.float32) * b_scale[:, None]).to(dtype)
    else:
        return (b_p * b_scale[None, :]).to(dtype), values_of(b_v, dtype)


@triton.jit
def largest_of(b):
    """[…, 1] the largest absolute value of rows; infinity of those with a NaN."""
    b_abs = tl.abs(b.to(tl.float32))
    return tl.max(tl.where(b_abs == b_abs, b_abs, float("inf")), len(b.shape) - 1, keep_dims=True)


@triton.jit
def _round(b):
    """The nearest integers of float32 below 2^22, ties to even.

    Times 4 first: that is exact, so whatever is fused with the sum, it is rounded once.
    """
    return ((b * 4.0 + _STEPS_OF_4) - _STEPS_OF_4) * 0.25


@triton.jit
def codes_of(b, b_largest, dtype: tl.constexpr):
    """Codes of rows, or of some columns of them, by the rows' largest values."""
    is_int8: tl.constexpr = dtype == tl.int8
    MOST: tl.constexpr = _MOST_INT8 if is_int8 else _MOST_FP8
    m_scaled = (b_largest >= _LEAST) & (b_largest < float("inf"))
    # rounded as the oracle does: an ordinary division is not
    b_factor = tl.div_rn(
        tl.full(b_largest.shape, MOST, tl.float32), tl.where(m_scaled, b_largest, 1.0)
    )
    b_scaled = tl.where(m_scaled, b.to(tl.float32) * b_factor, 0.0)
    if is_int8:
        return _round(b_scaled).to(tl.int8)
    else:
        b_bits = b_scaled.to(tl.int32, bitcast=True)
        b_sign = (b_bits >> 24) & 0x80
        b_bits &= 0x7FFFFFFF
        # nearest in three bits of mantissa, ties to even; exponents of e4m3 begin 120 later
        b_code = ((b_bits + 0x7FFFF + ((b_bits >> 20) & 1)) >> 20) - (120 << 3)
        # below 2^-6 its steps are all 2^-9
        b_low = _round(tl.abs(b_scaled) * 512.0).to(tl.int32)
        b_code = tl.where(b_bits < 0x3C800000, b_low, b_code)
        return (b_code | b_sign).to(tl.uint8)


@triton.jit
def store_scales(p_row, b_largest, m_row, D: tl.constexpr):
    """Write the scale of rows behind their D codes."""
    is_int8: tl.constexpr = p_row.dtype.element_ty == tl.int8
    MOST: tl.constexpr = _MOST_INT8 if is_int8 else _MOST_FP8
    b_scale = tl.div_rn(b_largest, tl.full(b_largest.shape, MOST, tl.float32))
    b_scale = tl.where(b_largest < _LEAST, 0.0, b_scale)
    tl.store(scales_at(p_row, D), b_scale, mask=m_row)


@triton.jit
def store_row(p_row, o_d, b, m_row, D: tl.constexpr):
    """Write whole rows at pointers […, 1]: as the cache has them, or as codes with their scale."""
    m = m_row & (o_d < D)
    if p_row.dtype.element_ty.primitive_bitwidth == 8:
        b_largest = largest_of(b)
        tl.store(p_row + o_d, codes_of(b, b_largest, p_row.dtype.element_ty), mask=m)
        store_scales(p_row, b_largest, m_row, D)
    else:
        tl.store(p_row + o_d, b.to(p_row.dtype.element_ty), mask=m)
