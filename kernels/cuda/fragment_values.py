"""What levels of a weight in fragments stand for, for products of many rows and for decoding.

Kernels of few rows have levels where their instruction takes them (`linear_q_fragments_kernels`).
Here they are laid out by columns: a word has four of an output in 4 bits, two in 8 bits
(`specc.artifact.fragments`). `width` columns share a scale, all K where an output has one.
"""

from __future__ import annotations

import triton
import triton.language as tl

OUTPUTS: tl.constexpr = tl.constexpr(32)
# columns of a tile of 4 bits
TILE: tl.constexpr = tl.constexpr(64)
# what factors of nvfp4 are times, where they multiply bits as they lie
FACTORS_TIMES: tl.constexpr = tl.constexpr(2.0**10)


@triton.constexpr_function
def bits_of(kind: str) -> int:
    return 4 if kind in ("int4", "mxfp4", "nvfp4") else 8


@triton.constexpr_function
def group_of_e2m1(kind: str) -> int:
    """Columns of a scale that is a byte; 0 of other kinds."""
    return {"mxfp4": 32, "nvfp4": 16}.get(kind, 0)


@triton.jit
def fragment_values(
    words, zeros, i_b, o_lane, k, K, width,
    KIND: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Columns k … k + BK - 1 of outputs o_lane [BN] of blocks i_b: u - z, or v, [BK, BN] float32.

    `words` are int32, `zeros` the same memory in int16, or None where all are the middle; where
    there are some, columns are of one group.
    """
    BITS: tl.constexpr = bits_of(KIND)
    COLUMNS: tl.constexpr = 16 // BITS  # of a word
    zero_words, head, block_words = _parts(zeros, K, width, KIND)
    o_half, o_r, o_g = o_lane // 16, o_lane // 8 % 2, o_lane % 8
    o_k = k + tl.arange(0, BK // COLUMNS)[:, None] * COLUMNS
    o_word = ((o_k * BITS // 256 * 2 + o_half[None, :]) * 8 + o_g[None, :]) * 16 + o_k // 8 % 4 * 4
    if BITS == 4:
        o_word += o_k // 32 % 2 * 2 + o_k // 4 % 2
    else:
        o_word += o_k // 4 % 2 * 2 + o_k // 2 % 2
    p_word = words + i_b * block_words + head + o_word
    b_word = tl.load(p_word, mask=o_k < K, other=0)[:, None, :]  # [words, 1, BN]
    # columns 2 h + e of a word, or e
    o_c = tl.arange(0, COLUMNS)[None, :, None]
    o_half = o_c % 2 * 16
    if BITS == 4:
        o_i = o_r[None, None, :] + o_c // 2 * 2
        if KIND == "int4":
            b_value = (b_word >> (o_half + o_i * 4) & 15).to(tl.float32)
        else:
            # to where bfloat16 has sign, exponent and mantissa; of the last but for its mantissa
            b_turn = tl.where(o_i == 3, 28, tl.where(o_i == 2, 6, tl.where(o_i == 1, 26, 0)))
            b_bits = _turned(b_word, o_half + b_turn) & tl.where(o_i == 3, 0x8180, 0x81C0)
            b_bits |= _turned(b_word, o_half + 4) & tl.where(o_i == 3, 0x0040, 0)
            b_value = _bfloat16(b_bits) * 2.0**126
    else:
        b_half = b_word >> o_half
        if KIND == "fp8":
            b_other = (b_half << 4 & 0x80F0) | (b_half >> 4 & 0x0700)
            b_bits = tl.where(o_r[None, None, :] == 0, b_half & 0x87F0, b_other)
            b_value = _bfloat16(b_bits) * 2.0**120
        else:
            b_level = b_half >> o_r[None, None, :] * 8 & 255
            b_value = (b_level ^ 128).to(tl.float32) - 128.0
    b_value = tl.reshape(b_value, [BK, BN])
    if KIND == "int4":
        if zeros is None:
            b_value -= 8.0
        else:
            o_zero = ((k // width * 2 + o_lane // 16) * 8 + o_g) * 2 + o_r
            p_zero = zeros + (i_b * block_words + zero_words) * 2 + o_zero
            b_zero = tl.load(p_zero, mask=k < K, other=0).to(tl.int32)
            b_value += (_bfloat16(b_zero) + 128.0)[None, :]
    return b_value


@triton.jit
def fragment_scale(words, scales, zeros, i_b, o_lane, k, K, width, KIND: tl.constexpr):
    """Scales float32 of columns k of outputs: both of one shape, or of [n, 1] and [BN].

    `scales` are the same memory as `words` in float32. Of nvfp4 without the factors of outputs.
    """
    before, _, block_words = _parts(zeros, K, width, KIND)
    GROUP: tl.constexpr = group_of_e2m1(KIND)
    if GROUP != 0:
        o_half, o_r, o_g = o_lane // 16, o_lane // 8 % 2, o_lane % 8
        o_word = (k // TILE * 2 + o_half) * (32 // GROUP) + k // GROUP % (32 // GROUP)
        p_word = words + i_b * block_words + before + o_word * 8 + o_g
        b_byte = tl.load(p_word, mask=k < K, other=0) >> (o_r * 2 + k // 32 % 2) * 8 & 255
        if KIND == "nvfp4":
            b_scale = _bfloat16((b_byte << 4) + 0x7000) * 2.0**-116
        else:
            b_scale = _bfloat16((b_byte << 7) + 0x3700) * 2.0**-110
    else:
        o_scale = k // width * OUTPUTS + o_lane
        b_scale = tl.load(scales + i_b * block_words + o_scale, mask=k < K, other=0.0)
    return b_scale


@triton.jit
def fragment_factors(scales, i_b, o_lane, K, KIND: tl.constexpr):
    """What sums of outputs of nvfp4 are multiplied by, float32."""
    _, _, block_words = _parts(None, K, K, KIND)
    return tl.load(scales + i_b * block_words + o_lane) * (1.0 / FACTORS_TIMES)


@triton.jit
def _parts(zeros, K, width, KIND: tl.constexpr):
    """Words of a block before its zero points or scales in bytes, before its levels, and all."""
    GROUP: tl.constexpr = group_of_e2m1(KIND)
    if GROUP != 0:
        before = OUTPUTS
        head = OUTPUTS + K // GROUP * (OUTPUTS // 4)
    else:
        before = K // width * OUTPUTS
        head = before
        if zeros is not None:
            head += K // width * (OUTPUTS // 2)
    return before, head, head + K * bits_of(KIND)


@triton.jit
def _turned(b_word, b_count):
    """Words rotated to the right."""
    b_word, b_count = b_word.to(tl.uint32, bitcast=True), (b_count & 31).to(tl.uint32)
    return (b_word >> b_count | b_word << (32 - b_count & 31)).to(tl.int32, bitcast=True)


@triton.jit
def _bfloat16(b_bits):
    """Values of bits of bfloat16, in float32."""
    return (b_bits << 16).to(tl.float32, bitcast=True)
