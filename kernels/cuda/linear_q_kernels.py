"""Kernels of `specc::linear_q`: rows times the integers of a weight, and that weight as floats.

Blocks lie as `specc.artifact.quantized_layout` has them: of each header, 32 scales, 32 zero points
where there are any, and units of 32 elements, one for each output. So a program reads a step of its
outputs in one run of bytes. Levels are multiplied as they are: u - z, and the values of e4m3 and
e2m1, are exact in every type of rows, so products are, too, and a scale multiplies the sum over its
group, in float32. Of e2m1 values times scales are exact, too, but for mxfp4 in float16; factors of
nvfp4 multiply sums of all columns. Others are in fragments (`fragment_values`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.fragment_values import (
    bits_of,
    fragment_factors,
    fragment_scale,
    fragment_values,
    group_of_e2m1,
)

# outputs of a block of the weight, and bytes of its factors
BLOCK: tl.constexpr = tl.constexpr(32)
FACTORS: tl.constexpr = tl.constexpr(128)


@triton.constexpr_function
def unit_of(kind: str) -> int:
    """Columns whose levels are an element."""
    return 2 if kind == "fp8" else 32 // bits_of(kind)


@triton.constexpr_function
def header_bytes(kind: str, has_zeros: bool) -> int:
    """Of a header's scales, of e2m1 those of 128 columns, and its zero points."""
    group = group_of_e2m1(kind)
    return BLOCK.value * (128 // group if group else 4 + 2 * has_zeros)


@triton.jit(do_not_specialize=["num_rows", "size", "bias_size"])
def linear_q_kernel(
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
    KIND: tl.constexpr,
    IN_FRAGMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """BN outputs of up to BM rows; a step is PARTS products of BK columns, which share a scale.

    WIDTH is the columns of a header, 0 where one is for all. bias [bias_size] counts where it is
    not empty.
    """
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    i_b = (tl.program_id(0) * BN // BLOCK).to(tl.int64)
    o_m = tl.arange(0, BM)
    m_m = (o_m < num_rows)[:, None]
    b_out = quantized_product(
        x, o_m, m_m, levels, scales, zeros, i_b, o_n % BLOCK, K,
        KIND, IN_FRAGMENTS, WIDTH, BM, BN, BK, PARTS,
    )  # fmt: skip
    b_out += tl.load(bias + o_n, mask=o_n < bias_size, other=0.0).to(tl.float32)[None, :]
    m_out = m_m & (o_n < size)[None, :]
    p_out = out + o_m[:, None] * size + o_n[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_out)


@triton.jit
def quantized_product(
    x, o_m, m_m, levels, scales, zeros, i_b, o_lane, K,
    KIND: tl.constexpr, IN_FRAGMENTS: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Rows o_m [BM], where m_m [BM, 1], times outputs o_lane [BN] of a block: [BM, BN] in float32.

    i_b is the block, or that of each output [BN]. Steps of e2m1 may be longer than a group, but for
    mxfp4 by rows in float16.
    """
    # values times scales are one operand
    IS_SCALED: tl.constexpr = group_of_e2m1(KIND) > 0 and group_of_e2m1(KIND) < BK
    width = K if WIDTH == 0 else WIDTH
    o_k = tl.arange(0, BK)
    p_x = x + o_m[:, None] * K + o_k[None, :]
    b_out = tl.zeros([BM, BN], tl.float32)
    for step in range(0, K, BK * PARTS):
        for part in tl.static_range(PARTS):
            k = step + part * BK
            b_x = tl.load(p_x + k, mask=m_m & (o_k[None, :] < K - k), other=0.0)  # [BM, BK]
            if IS_SCALED:
                b_w = _scaled(levels, scales, i_b, o_lane, k, K, width, KIND, IN_FRAGMENTS, BK, BN)
            else:
                b_w = _values(levels, zeros, i_b, o_lane, k, K, width, KIND, IN_FRAGMENTS, BK, BN)
            b_w = b_w.to(x.dtype.element_ty)  # [BK, BN]
            if WIDTH == 0 or IS_SCALED:
                b_out = tl.dot(b_x, b_w, b_out, input_precision="ieee")
            else:
                b_scale = _scale(
                    levels, scales, zeros, i_b, o_lane, k, K, width, KIND, IN_FRAGMENTS
                )
                b_out += tl.dot(b_x, b_w, input_precision="ieee") * b_scale[None, :]
    if WIDTH == 0:
        b_scale = _scale(levels, scales, zeros, i_b, o_lane, 0, K, width, KIND, IN_FRAGMENTS)
        b_out *= b_scale[None, :]
    if KIND == "nvfp4":
        b_out *= _factors(levels, scales, i_b, o_lane, K, width, KIND, IN_FRAGMENTS)[None, :]
    return b_out


@triton.jit(do_not_specialize=["first", "size", "width", "pairs"])
def linear_q_decode_kernel(
    levels,
    scales,
    zeros,
    out,
    first,
    size,
    width,
    pairs,
    K,
    KIND: tl.constexpr,
    IN_FRAGMENTS: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Rows of blocks first, first + 1, … as floats, in `out` [size, K]; width as in `_values`.

    Both halves of a block are 16 · `pairs` rows apart in `out`.
    """
    i_p = tl.program_id(0)
    i_b = (first + i_p).to(tl.int64)
    o_lane = tl.arange(0, BLOCK)
    o_n = (i_p // pairs * 2 + o_lane // 16) * pairs * 16 + i_p % pairs * 16 + o_lane % 16
    for part in tl.static_range(PARTS):
        k = (tl.program_id(1) * PARTS + part) * BK
        if k < K:
            b_w = _values(levels, zeros, i_b, o_lane, k, K, width, KIND, IN_FRAGMENTS, BK, BLOCK)
            b_scale = _scale(levels, scales, zeros, i_b, o_lane, k, K, width, KIND, IN_FRAGMENTS)
            if KIND == "nvfp4":
                b_scale *= _factors(levels, scales, i_b, o_lane, K, width, KIND, IN_FRAGMENTS)
            b_w = (b_w * b_scale[None, :]).to(out.dtype.element_ty)
            o_k = k + tl.arange(0, BK)
            m_out = (o_k < K)[:, None] & (o_n < size)[None, :]
            p_out = out + o_n.to(tl.int64)[None, :] * K + o_k[:, None]
            tl.store(p_out, b_w, mask=m_out)


@triton.jit
def _block(i_b, K, width, KIND: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """Where a block begins, in bytes; `width` columns have a header."""
    UNIT: tl.constexpr = unit_of(KIND)
    UNIT_BYTES: tl.constexpr = BLOCK * (2 if UNIT == 2 else 4)
    HEADER: tl.constexpr = header_bytes(KIND, HAS_ZEROS)
    block_bytes = (K + width - 1) // width * HEADER + (K + UNIT - 1) // UNIT * UNIT_BYTES
    if KIND == "nvfp4":
        block_bytes += FACTORS
    return i_b * block_bytes


@triton.jit
def _header(i_b, k, K, width, KIND: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """Where the header of column k of a block is, in bytes."""
    UNIT: tl.constexpr = unit_of(KIND)
    UNIT_BYTES: tl.constexpr = BLOCK * (2 if UNIT == 2 else 4)
    HEADER: tl.constexpr = header_bytes(KIND, HAS_ZEROS)
    i_h = k // width
    place = _block(i_b, K, width, KIND, HAS_ZEROS)
    if KIND == "nvfp4":
        place += FACTORS
    return place + i_h * HEADER + i_h * width // UNIT * UNIT_BYTES


@triton.jit
def _values(
    levels, zeros, i_b, o_lane, k, K, width,
    KIND: tl.constexpr, IN_FRAGMENTS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Columns k … k + BK - 1 of outputs o_lane of a block: u - z, or v, [BK, BN] float32.

    `levels` are elements of units, int32 or, of fp8, int16; `zeros` int16, or None where all are
    the middle. `width` is the columns of a header, a multiple of BK, or K where one is for all.
    Of a step's parts the last may begin after K, where there is no header any more.
    """
    BITS: tl.constexpr = bits_of(KIND)
    UNIT: tl.constexpr = unit_of(KIND)
    if IN_FRAGMENTS:
        b_value = fragment_values(levels, zeros, i_b, o_lane, k, K, width, KIND, BK, BN)
    else:
        ELEMENT: tl.constexpr = 2 if UNIT == 2 else 4
        HEADER: tl.constexpr = header_bytes(KIND, zeros is not None)
        o_u = tl.arange(0, BK // UNIT)
        place = _header(i_b, k, K, width, KIND, zeros is not None)
        p_unit = levels + (place + HEADER) // ELEMENT + k % width // UNIT * BLOCK
        p_unit += o_u[:, None] * BLOCK + o_lane[None, :]
        m_unit = (o_u * UNIT < K - k)[:, None]
        b_unit = tl.load(p_unit, mask=m_unit, other=0).to(tl.int32)  # [units, BN]
        o_c = tl.arange(0, UNIT)
        b_shift = o_c % 4 * 8 + o_c // 4 * 4 if BITS == 4 else o_c * 8
        b_level = (b_unit[:, None, :] >> b_shift[None, :, None]) & ((1 << BITS) - 1)
        b_level = tl.reshape(b_level, [BK, BN])
        # exponent and mantissa of floats at the places of half precision: a power of two away
        if KIND == "fp8":
            b_bits = (b_level & 127) << 7 | (b_level & 128) << 8
            b_value = b_bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        elif group_of_e2m1(KIND) != 0:
            b_bits = (b_level & 7) << 9 | (b_level & 8) << 12
            b_value = b_bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
        elif zeros is None:
            b_value = (b_level - (1 << (BITS - 1))).to(tl.float32)
        else:
            # after 32 scales
            b_zero = tl.load(zeros + place // 2 + 2 * BLOCK + o_lane, mask=k < K, other=0)
            b_value = (b_level - b_zero.to(tl.int32)[None, :]).to(tl.float32)
    return b_value


@triton.jit
def _scaled(
    levels, scales, i_b, o_lane, k, K, width,
    KIND: tl.constexpr, IN_FRAGMENTS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Columns k … k + BK - 1 of e2m1, of one header: v · s, [BK, BN] float32, exact in bfloat16.

    Three bits of a code are exponent and mantissa of a value times 2^-126.
    """
    GROUP: tl.constexpr = group_of_e2m1(KIND)
    UNIT: tl.constexpr = unit_of(KIND)
    if IN_FRAGMENTS:
        b_value = fragment_values(levels, None, i_b, o_lane, k, K, width, KIND, BK, BN)
        o_group = k + tl.arange(0, BK // GROUP)[:, None] * GROUP
        b_scale = fragment_scale(levels, scales, None, i_b, o_lane, o_group, K, width, KIND)
        b_value = tl.reshape(b_value, [BK // GROUP, GROUP, BN]) * b_scale[:, None, :]
    else:
        HEADER: tl.constexpr = header_bytes(KIND, False)
        o_u = tl.arange(0, BK // UNIT)[:, None]
        place = _header(i_b, k, K, width, KIND, False)
        m_unit = o_u * UNIT < K - k
        p_unit = levels + (place + HEADER) // 4 + (k % width // UNIT + o_u) * BLOCK
        b_unit = tl.load(p_unit + o_lane[None, :], mask=m_unit, other=0)  # [units, BN]
        p_scale = scales + place + (k % width + o_u * UNIT) // GROUP * BLOCK + o_lane[None, :]
        b_scale = _of_byte(tl.load(p_scale, mask=m_unit, other=0), KIND)
        o_c = tl.arange(0, UNIT)
        b_code = b_unit[:, None, :] >> (o_c % 4 * 8 + o_c // 4 * 4)[None, :, None]
        b_bits = (b_code & 7) << 22 | (b_code & 8) << 28
        b_value = b_bits.to(tl.float32, bitcast=True) * (2.0**126) * b_scale[:, None, :]
    return tl.reshape(b_value, [BK, BN])


@triton.jit
def _scale(
    levels, scales, zeros, i_b, o_lane, k, K, width,
    KIND: tl.constexpr, IN_FRAGMENTS: tl.constexpr,
):  # fmt: skip
    """Scales of column k: [outputs] float32; see `_values`. Of e2m1 in blocks they are bytes."""
    GROUP: tl.constexpr = group_of_e2m1(KIND)
    if IN_FRAGMENTS:
        b_scale = fragment_scale(levels, scales, zeros, i_b, o_lane, k, K, width, KIND)
    elif GROUP != 0:
        # a header has those of all groups of 128 columns
        place = _header(i_b, k, K, width, KIND, False)
        p_byte = scales + place + k % width // GROUP * BLOCK + o_lane
        b_scale = _of_byte(tl.load(p_byte, mask=k < K, other=0), KIND)
    else:
        place = _header(i_b, k, K, width, KIND, zeros is not None)
        b_scale = tl.load(scales + place // 4 + o_lane, mask=k < K, other=0.0)
    return b_scale


@triton.jit
def _of_byte(b_byte, KIND: tl.constexpr):
    """Scales in float32 of their bytes: e4m3 without sign, or e8m0."""
    if KIND == "nvfp4":
        # exponent and mantissa of a value times 2^-120
        b_scale = (b_byte.to(tl.int32) << 20).to(tl.float32, bitcast=True) * (2.0**120)
    else:
        b_scale = (b_byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return b_scale


@triton.jit
def _factors(levels, scales, i_b, o_lane, K, width, KIND: tl.constexpr, IN_FRAGMENTS: tl.constexpr):
    """Of nvfp4, [outputs] float32."""
    if IN_FRAGMENTS:
        b_factor = fragment_factors(scales, i_b, o_lane, K, KIND)
    else:
        b_bits = tl.load(levels + _block(i_b, K, width, KIND, False) // 4 + o_lane)
        b_factor = b_bits.to(tl.float32, bitcast=True)
    return b_factor
