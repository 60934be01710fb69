"""Kernels of `specc::linear_q` whose warps divide the columns of a weight between them.

`linear_q_kernel` has all warps of a program at one step of 128 columns, whose integers go through
shared memory twice, and waits for all of them in each: on an H200 such a step takes about a
microsecond, however many bits a weight has. Here a step is longer, and every warp has columns of
its own of it; what warps have found is added up once, after the last step, in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.linear_q_kernels import BLOCK


@triton.jit(do_not_specialize=["num_rows", "size", "bias_size"])
def linear_q_row_kernel(
    x,
    levels,
    scales,
    zeros,
    bias,
    out,
    num_rows,
    size,
    bias_size,
    K,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    UNIT: tl.constexpr,
    HEADER: tl.constexpr,
    WIDTH: tl.constexpr,
    BN: tl.constexpr,
    UNITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BN outputs of one row: num_rows is 1. A step is UNITS units of each output.

    Without tensor cores a level is multiplied by the thread that has loaded it, and is never laid
    out anew. Arguments are those of `linear_q_kernel`.
    """
    ELEMENT: tl.constexpr = 2 if UNIT == 2 else 4
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    o_lane = o_n % BLOCK
    begin = _begin((tl.program_id(0) * BN // BLOCK).to(tl.int64), K, UNIT, HEADER, WIDTH)
    o_u = tl.arange(0, UNITS)
    b_out = tl.zeros([UNITS, BN], tl.float32)
    for first in tl.range(0, K, UNITS * UNIT, num_stages=STAGES):
        o_k = first + o_u * UNIT
        m_u = (o_k < K)[:, None]
        p_unit = levels + begin // ELEMENT + _units(o_k, UNIT, HEADER, WIDTH)[:, None]
        b_unit = tl.load(p_unit + o_lane[None, :], mask=m_u, other=0).to(tl.int32)
        head = begin + _head(o_k, UNIT, HEADER, WIDTH)[:, None]
        if zeros is not None:
            # after 32 scales
            p_zero = zeros + head // 2 + 2 * BLOCK + o_lane[None, :]
            b_zero = tl.load(p_zero, mask=m_u, other=0).to(tl.float32)
        b_sum = tl.zeros([UNITS, BN], tl.float32)
        for c in tl.static_range(UNIT):
            b_x = tl.load(x + o_k + c, mask=o_k + c < K, other=0.0).to(tl.float32)
            b_value = _column(b_unit, c, num_rows, BITS, IS_FLOAT, zeros is None)
            if zeros is not None:
                b_value -= b_zero
            b_sum += b_value * b_x[:, None]
        if WIDTH != 0:
            b_sum *= _scales(scales, head, o_k[:, None], o_lane[None, :], K, BITS, IS_FLOAT, WIDTH)
        b_out += b_sum
    b_row = tl.sum(b_out, 0)
    if WIDTH == 0:
        b_row *= tl.load(scales + begin // 4 + o_lane)
    b_row += tl.load(bias + o_n, mask=o_n < bias_size, other=0.0).to(tl.float32)
    tl.store(out + o_n, b_row.to(out.dtype.element_ty), mask=o_n < size)


@triton.jit(do_not_specialize=["num_rows", "size", "bias_size"])
def linear_q_slices_kernel(
    x,
    levels,
    scales,
    zeros,
    bias,
    out,
    num_rows,
    size,
    bias_size,
    K,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    UNIT: tl.constexpr,
    HEADER: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BN outputs of up to BM rows; a step is SLICES products of BK columns, one for each warp.

    Columns of a product share a scale. Arguments are those of `linear_q_kernel`.
    """
    ELEMENT: tl.constexpr = 2 if UNIT == 2 else 4
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    o_lane = o_n % BLOCK
    begin = _begin((tl.program_id(0) * BN // BLOCK).to(tl.int64), K, UNIT, HEADER, WIDTH)
    o_s = tl.arange(0, SLICES)
    o_u = tl.arange(0, BK // UNIT)
    o_m = tl.arange(0, BM)
    m_m = (o_m < num_rows)[None, :, None]
    # 1, as no compiler knows: a product has a row at least
    one = tl.minimum(num_rows, 1)
    b_out = tl.zeros([SLICES, BM, BN], tl.float32)
    for first in tl.range(0, K, SLICES * BK, num_stages=STAGES):
        o_k = first + o_s * BK
        o_unit = _units(o_k, UNIT, HEADER, WIDTH)[:, None] + o_u[None, :] * BLOCK
        p_unit = levels + begin // ELEMENT + o_unit[:, None, :] + o_lane[None, :, None]
        m_unit = (o_k[:, None] + o_u[None, :] * UNIT < K)[:, None, :]
        b_unit = tl.load(p_unit, mask=m_unit, other=0).to(tl.int32)  # [SLICES, BN, units]
        head = begin + _head(o_k, UNIT, HEADER, WIDTH)[:, None]
        b_zero = None
        if zeros is not None:
            p_zero = zeros + head // 2 + 2 * BLOCK + o_lane[None, :]
            b_zero = tl.load(p_zero, mask=(o_k < K)[:, None], other=0).to(tl.float32)[:, :, None]
        # columns next to each other in the registers of a thread: it stores 16 bytes at a time
        if UNIT == 2:
            b_w = _pair(b_unit, b_zero, 0, 1, one, BITS, IS_FLOAT, x.dtype.element_ty)
        elif UNIT == 4:
            b_even = _pair(b_unit, b_zero, 0, 2, one, BITS, IS_FLOAT, x.dtype.element_ty)
            b_odd = _pair(b_unit, b_zero, 1, 3, one, BITS, IS_FLOAT, x.dtype.element_ty)
            b_w = tl.join(b_even, b_odd)
        else:
            b_0 = _pair(b_unit, b_zero, 0, 4, one, BITS, IS_FLOAT, x.dtype.element_ty)
            b_1 = _pair(b_unit, b_zero, 1, 5, one, BITS, IS_FLOAT, x.dtype.element_ty)
            b_2 = _pair(b_unit, b_zero, 2, 6, one, BITS, IS_FLOAT, x.dtype.element_ty)
            b_3 = _pair(b_unit, b_zero, 3, 7, one, BITS, IS_FLOAT, x.dtype.element_ty)
            b_w = tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3))
        b_w = tl.trans(tl.reshape(b_w, [SLICES, BN, BK]), 0, 2, 1)
        o_x = o_k[:, None, None] + tl.arange(0, BK)[None, None, :]
        p_x = x + o_m[None, :, None] * K + o_x
        b_x = tl.load(p_x, mask=m_m & (o_x < K), other=0.0)  # [SLICES, BM, BK]
        if WIDTH == 0:
            b_out = tl.dot(b_x, b_w, b_out)
        else:
            b_scale = _scales(scales, head, o_k[:, None], o_lane[None, :], K, BITS, IS_FLOAT, WIDTH)
            b_out += tl.dot(b_x, b_w) * b_scale[:, None, :]
    b_rows = tl.sum(b_out, 0)
    if WIDTH == 0:
        b_rows *= tl.load(scales + begin // 4 + o_lane)[None, :]
    b_rows += tl.load(bias + o_n, mask=o_n < bias_size, other=0.0).to(tl.float32)[None, :]
    m_out = (o_m < num_rows)[:, None] & (o_n < size)[None, :]
    p_out = out + o_m[:, None] * size + o_n[None, :]
    tl.store(p_out, b_rows.to(out.dtype.element_ty), mask=m_out)


@triton.jit
def _begin(i_b, K, UNIT: tl.constexpr, HEADER: tl.constexpr, WIDTH: tl.constexpr):
    """Where block i_b is, in bytes."""
    UNIT_BYTES: tl.constexpr = BLOCK * (2 if UNIT == 2 else 4)
    num_headers = 1 if WIDTH == 0 else (K + WIDTH - 1) // WIDTH
    return i_b * (num_headers * HEADER + (K + UNIT - 1) // UNIT * UNIT_BYTES)


@triton.jit
def _head(o_k, UNIT: tl.constexpr, HEADER: tl.constexpr, WIDTH: tl.constexpr):
    """Where the headers of columns o_k are in their block, in bytes."""
    UNIT_BYTES: tl.constexpr = BLOCK * (2 if UNIT == 2 else 4)
    if WIDTH == 0:
        return o_k * 0
    else:
        return o_k // WIDTH * (HEADER + WIDTH // UNIT * UNIT_BYTES)


@triton.jit
def _units(o_k, UNIT: tl.constexpr, HEADER: tl.constexpr, WIDTH: tl.constexpr):
    """Where the units of columns o_k are in their block, in elements: headers lie between them."""
    ELEMENT: tl.constexpr = 2 if UNIT == 2 else 4
    i_h = o_k * 0 if WIDTH == 0 else o_k // WIDTH
    return (i_h + 1) * (HEADER // ELEMENT) + o_k // UNIT * BLOCK


@triton.jit
def _scales(
    scales, head, o_k, o_lane, K,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Scales of columns o_k [·, 1] and outputs o_lane [1, ·], whose headers are at `head`."""
    if IS_FLOAT and BITS == 4:
        # a header has those of 4 groups of 32 columns
        p_scale = scales + head + o_k % WIDTH // 32 * BLOCK + o_lane
        b_byte = tl.load(p_scale, mask=o_k < K, other=0)
        b_scale = (b_byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        b_scale = tl.load(scales + head // 4 + o_lane, mask=o_k < K, other=0.0)
    return b_scale


@triton.jit
def _pair(
    b_unit, b_zero, a: tl.constexpr, b: tl.constexpr, one,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Columns a and b of units, in a last dimension."""
    b_a = _column(b_unit, a, one, BITS, IS_FLOAT, b_zero is None)
    b_b = _column(b_unit, b, one, BITS, IS_FLOAT, b_zero is None)
    if b_zero is not None:
        b_a -= b_zero
        b_b -= b_zero
    return tl.join(b_a.to(DTYPE), b_b.to(DTYPE))


@triton.jit
def _column(
    b_unit, c: tl.constexpr, one, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, CENTERED: tl.constexpr
):
    """Column c of units: what its levels stand for, less the middle if CENTERED, in float32.

    Bits are masked and stay where they are in a unit, below an exponent that gives them their
    worth. `one` is 1: it keeps ptxas from seeing that the exponent is a constant, and an
    instruction has place for one only, here the mask.
    """
    AT: tl.constexpr = c % 4 * 8 + c // 4 * 4 if BITS == 4 else c * 8
    if IS_FLOAT:
        # sign, and exponent and mantissa at the places of float32: a power of two away
        MANTISSA: tl.constexpr = 20 if BITS == 8 else 22
        b_size = _moved(b_unit, MANTISSA - AT) & (((1 << (BITS - 1)) - 1) << MANTISSA)
        b_bits = b_size | (_moved(b_unit, 32 - BITS - AT) & -0x80000000)
        b_value = b_bits.to(tl.float32, bitcast=True) * (2.0**120 if BITS == 8 else 2.0**126)
    else:
        # of the 23 bits of a mantissa
        LOW: tl.constexpr = AT if AT + BITS < 24 else AT - 16
        MIDDLE: tl.constexpr = 1 << (BITS - 1) if CENTERED else 0
        b_bits = _moved(b_unit, LOW - AT) & (((1 << BITS) - 1) << LOW)
        b_bits |= one * ((150 - LOW) << 23)
        b_value = b_bits.to(tl.float32, bitcast=True) - ((1 << (23 - LOW)) + MIDDLE)
    return b_value


@triton.jit
def _moved(b_unit, LEFT: tl.constexpr):
    """Bits moved to the left, or to the right where LEFT is negative."""
    return b_unit << LEFT if LEFT >= 0 else b_unit >> -LEFT
