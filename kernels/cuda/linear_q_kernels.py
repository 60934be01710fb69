"""Kernels of `specc::linear_q`: rows times the integers of a weight, and that weight as floats.

Blocks lie as `specc.artifact.quantized_layout` has them: of each header, 32 scales, 32 zero points
where there are any, and units of 32 elements, one for each output. So a program reads a step of its
outputs in one run of bytes. Levels are multiplied as they are: u - z, and the values of e4m3 and
e2m1, are exact in every type of rows, so products are, too, and a scale multiplies the sum over its
group, in float32. Of e2m1 values times scales are exact, too, but for mxfp4 in float16; factors of
nvfp4 multiply whole sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

# outputs of a block of the weight, bytes of its factors in nvfp4, which alone has such headers
BLOCK: tl.constexpr = tl.constexpr(32)
FACTORS: tl.constexpr = tl.constexpr(128)
NVFP4_HEADER: tl.constexpr = tl.constexpr(256)


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
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    UNIT: tl.constexpr,
    HEADER: tl.constexpr,
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
        BITS, IS_FLOAT, UNIT, HEADER, WIDTH, BM, BN, BK, PARTS,
    )  # fmt: skip
    b_out += tl.load(bias + o_n, mask=o_n < bias_size, other=0.0).to(tl.float32)[None, :]
    m_out = m_m & (o_n < size)[None, :]
    p_out = out + o_m[:, None] * size + o_n[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_out)


@triton.jit
def quantized_product(
    x, o_m, m_m, levels, scales, zeros, i_b, o_lane, K,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, UNIT: tl.constexpr, HEADER: tl.constexpr,
    WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Rows o_m [BM], where m_m [BM, 1], times outputs o_lane [BN] of a block: [BM, BN] in float32.

    i_b is the block, or that of each output [BN]. Steps of e2m1 may be longer than a group, but for
    mxfp4 by rows in float16.
    """
    IS_SCALED: tl.constexpr = IS_FLOAT and BITS == 4 and BK > BLOCK * 128 // HEADER
    width = K if WIDTH == 0 else WIDTH
    o_k = tl.arange(0, BK)
    p_x = x + o_m[:, None] * K + o_k[None, :]
    b_out = tl.zeros([BM, BN], tl.float32)
    for step in range(0, K, BK * PARTS):
        for part in tl.static_range(PARTS):
            k = step + part * BK
            b_x = tl.load(p_x + k, mask=m_m & (o_k[None, :] < K - k), other=0.0)  # [BM, BK]
            if IS_SCALED:
                b_w = _scaled_e2m1(levels, scales, i_b, o_lane, k, K, width, UNIT, HEADER, BK, BN)
            else:
                b_w = _values(
                    levels, zeros, i_b, o_lane, k, K, width, BITS, IS_FLOAT, UNIT, HEADER, BK, BN
                )
            b_w = b_w.to(x.dtype.element_ty)  # [BK, BN]
            if WIDTH == 0 or IS_SCALED:
                b_out = tl.dot(b_x, b_w, b_out, input_precision="ieee")
            else:
                b_scale = _scale(scales, i_b, o_lane, k, K, width, BITS, IS_FLOAT, UNIT, HEADER)
                b_out += tl.dot(b_x, b_w, input_precision="ieee") * b_scale[None, :]
    if WIDTH == 0:
        b_out *= _scale(scales, i_b, o_lane, 0, K, width, BITS, IS_FLOAT, UNIT, HEADER)[None, :]
    if HEADER == NVFP4_HEADER:
        b_out *= _factors(levels, i_b, o_lane, K, width, UNIT, HEADER)[None, :]
    return b_out


@triton.jit(do_not_specialize=["first", "size", "width"])
def linear_q_decode_kernel(
    levels,
    scales,
    zeros,
    out,
    first,
    size,
    width,
    K,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    UNIT: tl.constexpr,
    HEADER: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Rows of blocks first, first + 1, … as floats, in `out` [size, K]; width as in `_values`."""
    i_b = (first + tl.program_id(0)).to(tl.int64)
    o_lane = tl.arange(0, BLOCK)
    o_n = tl.program_id(0) * BLOCK + o_lane
    for part in tl.static_range(PARTS):
        k = (tl.program_id(1) * PARTS + part) * BK
        if k < K:
            b_w = _values(
                levels, zeros, i_b, o_lane, k, K, width, BITS, IS_FLOAT, UNIT, HEADER, BK, BLOCK
            )
            b_scale = _scale(scales, i_b, o_lane, k, K, width, BITS, IS_FLOAT, UNIT, HEADER)
            if HEADER == NVFP4_HEADER:
                b_scale *= _factors(levels, i_b, o_lane, K, width, UNIT, HEADER)
            b_w = (b_w * b_scale[None, :]).to(out.dtype.element_ty)
            o_k = k + tl.arange(0, BK)
            m_out = (o_k < K)[:, None] & (o_n < size)[None, :]
            p_out = out + o_n.to(tl.int64)[None, :] * K + o_k[:, None]
            tl.store(p_out, b_w, mask=m_out)


@triton.jit
def _block(i_b, K, width, UNIT: tl.constexpr, HEADER: tl.constexpr):
    """Where a block begins, in bytes."""
    UNIT_BYTES: tl.constexpr = BLOCK * (2 if UNIT == 2 else 4)
    block_bytes = (K + width - 1) // width * HEADER + (K + UNIT - 1) // UNIT * UNIT_BYTES
    if HEADER == NVFP4_HEADER:
        block_bytes += FACTORS
    return i_b * block_bytes


@triton.jit
def _header(i_b, k, K, width, UNIT: tl.constexpr, HEADER: tl.constexpr):
    """Where the header of column k of a block is, in bytes; `width` columns have one."""
    UNIT_BYTES: tl.constexpr = BLOCK * (2 if UNIT == 2 else 4)
    i_h = k // width
    place = _block(i_b, K, width, UNIT, HEADER)
    if HEADER == NVFP4_HEADER:
        place += FACTORS
    return place + i_h * HEADER + i_h * width // UNIT * UNIT_BYTES


@triton.jit
def _factors(levels, i_b, o_lane, K, width, UNIT: tl.constexpr, HEADER: tl.constexpr):
    """Of nvfp4, [outputs] float32."""
    b_bits = tl.load(levels + _block(i_b, K, width, UNIT, HEADER) // 4 + o_lane)
    return b_bits.to(tl.float32, bitcast=True)


@triton.jit
def _of_byte(b_byte, HEADER: tl.constexpr):
    """Scales in float32 of their bytes: of nvfp4 e4m3 without sign, else e8m0."""
    if HEADER == NVFP4_HEADER:
        # exponent and mantissa of a value times 2^-120
        b_scale = (b_byte.to(tl.int32) << 20).to(tl.float32, bitcast=True) * (2.0**120)
    else:
        b_scale = (b_byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return b_scale


@triton.jit
def _values(
    levels, zeros, i_b, o_lane, k, K, width,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, UNIT: tl.constexpr, HEADER: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Columns k … k + BK - 1 of outputs o_lane of a block: u - z, or v, [BK, BN] float32.

    `levels` are elements of units, int32 or, of fp8, int16; `zeros` int16, or None where all are
    the middle. `width` is the columns of a header, a multiple of BK, or K where one is for all.
    Of a step's parts the last may begin after K, where there is no header any more.
    """
    ELEMENT: tl.constexpr = 2 if UNIT == 2 else 4
    o_u = tl.arange(0, BK // UNIT)
    place = _header(i_b, k, K, width, UNIT, HEADER)
    p_unit = levels + (place + HEADER) // ELEMENT + k % width // UNIT * BLOCK
    p_unit += o_u[:, None] * BLOCK + o_lane[None, :]
    m_unit = (o_u * UNIT < K - k)[:, None]
    b_unit = tl.load(p_unit, mask=m_unit, other=0).to(tl.int32)  # [units, BN]
    o_c = tl.arange(0, UNIT)
    b_shift = o_c % 4 * 8 + o_c // 4 * 4 if BITS == 4 else o_c * 8
    b_level = (b_unit[:, None, :] >> b_shift[None, :, None]) & ((1 << BITS) - 1)
    b_level = tl.reshape(b_level, [BK, BN])
    if IS_FLOAT:
        # exponent and mantissa at the places of half precision: a power of two away
        if BITS == 8:
            b_bits = (b_level & 127) << 7 | (b_level & 128) << 8
            b_value = b_bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        else:
            b_bits = (b_level & 7) << 9 | (b_level & 8) << 12
            b_value = b_bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    else:
        if zeros is None:
            b_value = (b_level - (1 << (BITS - 1))).to(tl.float32)
        else:
            # after 32 scales
            b_zero = tl.load(zeros + place // 2 + 2 * BLOCK + o_lane, mask=k < K, other=0)
            b_value = (b_level - b_zero.to(tl.int32)[None, :]).to(tl.float32)
    return b_value


@triton.jit
def _scaled_e2m1(
    levels, scales, i_b, o_lane, k, K, width,
    UNIT: tl.constexpr, HEADER: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Columns k … k + BK - 1 of e2m1, of one header: v · s, [BK, BN] float32, exact in bfloat16.

    Three bits of a code are exponent and mantissa of a value times 2^-126.
    """
    GROUP: tl.constexpr = BLOCK * 128 // HEADER
    o_u = tl.arange(0, BK // UNIT)[:, None]
    place = _header(i_b, k, K, width, UNIT, HEADER)
    m_unit = o_u * UNIT < K - k
    p_unit = levels + (place + HEADER) // 4 + (k % width // UNIT + o_u) * BLOCK + o_lane[None, :]
    b_unit = tl.load(p_unit, mask=m_unit, other=0)  # [units, BN]
    p_scale = scales + place + (k % width + o_u * UNIT) // GROUP * BLOCK + o_lane[None, :]
    b_scale = _of_byte(tl.load(p_scale, mask=m_unit, other=0), HEADER)
    o_c = tl.arange(0, UNIT)
    b_code = b_unit[:, None, :] >> (o_c % 4 * 8 + o_c // 4 * 4)[None, :, None]
    b_bits = (b_code & 7) << 22 | (b_code & 8) << 28
    b_value = b_bits.to(tl.float32, bitcast=True) * (2.0**126) * b_scale[:, None, :]
    return tl.reshape(b_value, [BK, BN])


@triton.jit
def _scale(
    scales, i_b, o_lane, k, K, width,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, UNIT: tl.constexpr, HEADER: tl.constexpr,
):  # fmt: skip
    """Scales of column k: [outputs] float32; see `_values`. Of e2m1 `scales` are bytes."""
    place = _header(i_b, k, K, width, UNIT, HEADER)
    if IS_FLOAT and BITS == 4:
        # a header has those of all groups of 128 columns
        p_byte = scales + place + k % width // (BLOCK * 128 // HEADER) * BLOCK + o_lane
        b_scale = _of_byte(tl.load(p_byte, mask=k < K, other=0), HEADER)
    else:
        b_scale = tl.load(scales + place // 4 + o_lane, mask=k < K, other=0.0)
    return b_scale
