"""The kernel of `specc::linear_q` for weights in fragments: 1 to 32 rows, in bfloat16.

A weight lies as tensor cores take their first operand (`specc.artifact.fragments`), so what a lane
loads are its registers: nothing goes through shared memory to be laid out anew, and the columns of
an instruction are rows of x. Warps of a program divide its columns, each with tiles of its own of
a step; what they have found is added up once, after the last step.

The order of a sum follows from W and U, and columns of an instruction do not touch each other: a
row has the same bits whatever other rows there are, as long as those two are the same.

Written in Gluon, as Triton neither lets a kernel say which lane has which element nor a product
take its operand from registers that were loaded so. Source of the order of fragments: PTX ISA,
mma.m16n8k16; of weights in that order: Marlin, arXiv:2408.11743 §3.4.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from specc.kernels.cuda.dependent import let_next_start, wait_alone
from specc.kernels.cuda.linear_q_fragments_loop import (
    PAIR,
    SPAN,
    WORDS,
    beside_of_lanes,
    copy_layout,
    copy_step,
    lane_layout,
    load_words,
    multiply_step,
    parts_of_block,
    row_layout,
    spans_of_tile,
    warps_of,
    word_layout,
    words_of_warps,
)


@gluon.jit(do_not_specialize=["num_rows", "size", "bias_size", "pairs"])
def linear_q_fragments_kernel(
    x,
    weight,
    scales,
    bias,
    out,
    num_rows,
    size,
    bias_size,
    pairs,
    K,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    W: gl.constexpr,
    NB: gl.constexpr,
    BM: gl.constexpr,
    U: gl.constexpr,
    RING: gl.constexpr,
    IS_DEPENDENT: gl.constexpr,
):
    """16 · NB outputs of up to BM rows, NB = 1 or 2; a step is U tiles of each of W warps.

    x [num_rows, K], bias [bias_size], which counts where it is not empty, out [num_rows, size]. The
    second half of a block has the outputs 16 · `pairs` after the first.
    `weight` are words and `scales` float32, or bytes of mxfp4, of the same blocks; of nvfp4, whose
    GROUP is 0, scales are factors. K is a multiple
    of the columns of U tiles. Words of a step are loaded one step ahead, or, with a RING, copied to
    shared memory RING - 1 steps ahead; what is asked for at first no step writes, so it is asked
    for before the wait.
    """
    SPANS: gl.constexpr = spans_of_tile(KIND)
    A: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    LW: gl.constexpr = word_layout(W)
    LC: gl.constexpr = copy_layout(W, U * NB)
    LX: gl.constexpr = row_layout(W, BM)
    LZ: gl.constexpr = lane_layout(W)
    i_n = gl.program_id(0)
    zeros, head, tiles = parts_of_block(K, KIND, GROUP, HAS_ZEROS)
    i_b = i_n * NB // 2
    begin = i_b.to(gl.int64) * (head + tiles * PAIR)
    half = i_n * NB % 2
    p_words = weight + begin + head + half * WORDS
    p_tile = p_words + gl.expand_dims(gl.arange(0, WORDS, gl.SliceLayout(0, LW)), 0)
    if RING != 0:
        o_c = gl.arange(0, U * NB * WORDS, gl.SliceLayout(0, LC))
        o_c = o_c // (NB * WORDS) * PAIR + o_c % (NB * WORDS)
        p_copy = p_words + gl.expand_dims(o_c, 0)
        S: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
        ring = gl.allocate_shared_memory(gl.int32, [RING, W, U * NB * WORDS], S)
        for turn in gl.static_range(RING - 1):
            copy_step(ring, turn, p_copy, turn * (W * U), tiles, U, W, LC)
    else:
        words = load_words(p_tile + words_of_warps(0, tiles, U, W, LW), U, NB)
    wait_alone(IS_DEPENDENT)

    o_m = gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(2, LX)))
    o_m = gl.expand_dims(gl.expand_dims(o_m, 0), 2)
    o_k = gl.arange(0, SPAN, gl.SliceLayout(0, gl.SliceLayout(1, LX)))
    o_k = gl.expand_dims(gl.expand_dims(o_k, 0), 1)
    p_x = x + (o_m * K + warps_of(W, LX) * (U * SPANS * SPAN) + o_k)
    m_row = (o_m < num_rows) & (o_k < K)
    o_r = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, A)))
    o_r = gl.expand_dims(gl.expand_dims(o_r, 0), 2)
    p_scale = scales + (begin * (4 if KIND == "mxfp4" else 1) + half * 16 + o_r)
    p_zero = weight + (begin + zeros + half * (16 if KIND == "nvfp4" else 8))
    p_zero = p_zero + beside_of_lanes(KIND, LZ)
    acc = (gl.zeros([W, 16, BM], gl.float32, A),) * NB
    if RING != 0:
        turn = 0
        for first in range(0, tiles, W * U):
            async_copy.wait_group(RING - 2)
            words = ()
            for j in gl.static_range(U * NB):
                words = words + (ring.index(turn).slice(j * WORDS, WORDS, dim=1).load(LW),)  # noqa: RUF005
            free = gl.where(turn == 0, RING - 1, turn - 1)
            copy_step(ring, free, p_copy, first + (RING - 1) * W * U, tiles, U, W, LC)
            acc = multiply_step(
                words, acc, p_x, m_row, None, p_scale, p_zero, first, tiles,
                KIND, GROUP, HAS_ZEROS, SPANS, W, NB, BM, BM, U, A, LX, LZ,
            )  # fmt: skip
            turn = gl.where(turn == RING - 1, 0, turn + 1)
        async_copy.wait_group(0)
    else:
        for first in range(0, tiles, W * U):
            ahead = load_words(p_tile + words_of_warps(first + W * U, tiles, U, W, LW), U, NB)
            acc = multiply_step(
                words, acc, p_x, m_row, None, p_scale, p_zero, first, tiles,
                KIND, GROUP, HAS_ZEROS, SPANS, W, NB, BM, BM, U, A, LX, LZ,
            )  # fmt: skip
            words = ahead
    let_next_start(IS_DEPENDENT)

    for n in gl.static_range(NB):
        b_out = gl.sum(acc[n], 0)  # [16, BM]
        o_row = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(0, A))), 1)
        o_col = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(0, A))), 0)
        o_n = (i_b // pairs * (2 * pairs) + i_b % pairs + (half + n) * pairs) * 16 + o_row
        if GROUP == 0:
            b_out = b_out * gl.load(scales + (begin + half * 16 + n * 16 + o_row))
        b_out = b_out + gl.load(bias + o_n, mask=o_n < bias_size, other=0.0).to(gl.float32)
        m_out = (o_col < num_rows) & (o_n < size)
        gl.store(out + (o_col * size + o_n), b_out.to(out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["first", "size", "group", "pairs"])
def linear_q_fragments_decode_kernel(
    weight,
    scales,
    zeros,
    out,
    first,
    size,
    group,
    pairs,
    K,
    KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):
    """32 columns of the outputs of block `first` + i as floats, in `out` [size, K].

    `weight` is the same memory in int16, `zeros` in bfloat16, `scales` as of the product; `group`
    columns share a scale. Both halves of a block are 16 · `pairs` rows apart in `out`.
    """
    IS_4_BITS: tl.constexpr = KIND == "int4" or KIND == "mxfp4" or KIND == "nvfp4"
    BITS: tl.constexpr = 4 if IS_4_BITS else 8
    i_s = tl.program_id(1)
    groups = K // group
    i_group = i_s * 32 // group
    head = groups * (16 if KIND == "mxfp4" else 64)
    if KIND == "nvfp4":
        head = 64
    begin = head
    if HAS_ZEROS:
        begin = head + groups * 32
    if KIND == "nvfp4":
        begin = head + K
    # elements of 16 bits before the block
    block = (first + tl.program_id(0)).to(tl.int64) * (begin + K * BITS * 2)

    o_n = tl.arange(0, 32)[:, None]
    o_k = tl.arange(0, 32)[None, :]
    o_half, o_r, o_g = o_n // 16, o_n // 8 % 2, o_n % 8
    o_q, o_c, o_h, o_e = o_k // 8, o_k // 4 % 2, o_k // 2 % 2, o_k % 2
    if IS_4_BITS:
        o_word = (((i_s // 2 * 2 + o_half) * 8 + o_g) * 4 + o_q) * 4 + i_s % 2 * 2 + o_c
    else:
        o_word = (((i_s * 2 + o_half) * 8 + o_g) * 4 + o_q) * 4 + o_c * 2 + o_h
    b_half = tl.load(weight + block + begin + o_word * 2 + o_e).to(tl.int32) & 0xFFFF  # [32, 32]
    o_i = o_r + 2 * o_h
    if KIND == "int4":
        b_w = (b_half >> o_i * 4 & 15).to(tl.float32) + 128.0
        b_zero = -136.0
    elif KIND == "int8":
        b_w = ((b_half >> o_r * 8 & 255) ^ 128).to(tl.float32) - 128.0
        b_zero = 0.0
    elif KIND == "fp8":
        b_other = (b_half << 4 & 0x80F0) | (b_half >> 4 & 0x0700)
        b_w = _bfloat16(tl.where(o_r == 0, b_half & 0x87F0, b_other)) * 2.0**120
        b_zero = 0.0
    else:
        b_last = (b_half << 1 & 0x8000) | (b_half >> 5 & 0x0100) | (b_half >> 4 & 0x00C0)
        b_w = _bfloat16(tl.where(o_i == 3, b_last, b_half << o_i * 3 & 0x81C0)) * 2.0**126
        b_zero = 0.0
    if HAS_ZEROS:
        b_zero = tl.load(zeros + block + head + ((i_group * 2 + o_half) * 8 + o_g) * 2 + o_r)
        b_zero = b_zero.to(tl.float32)
    if KIND == "nvfp4":
        # a byte of the tile, half, group of a span, row of 8, r and span; 0 is of levels that are 0
        p_byte = weight + block + head + (i_s // 2 * 2 + o_half) * 32 + (o_q // 2 * 8 + o_g) * 2
        b_byte = tl.load(p_byte + o_r).to(tl.int32) >> i_s % 2 * 8 & 255
        b_factor = tl.load(scales + block // 2 + o_n)
        b_scale = _bfloat16(b_byte << 4 | 0x7000) * 2.0**-126 * b_factor
    elif KIND == "mxfp4":
        b_exponent = tl.load(scales + block * 2 + i_group * 32 + o_n).to(tl.int32)
        b_scale = (b_exponent << 23).to(tl.float32, bitcast=True)
    else:
        b_scale = tl.load(scales + block // 2 + i_group * 32 + o_n)
    b_w = (b_w + b_zero) * b_scale
    i_b = tl.program_id(0)
    o_out = (i_b // pairs * (2 * pairs) + i_b % pairs + o_half * pairs) * 16 + o_n % 16
    p_out = out + o_out.to(tl.int64) * K + i_s * 32 + o_k
    tl.store(p_out, b_w.to(out.dtype.element_ty), mask=o_out < size)


@triton.jit
def _bfloat16(b_bits):
    """Values of bits of bfloat16, in float32."""
    return (b_bits << 16).to(tl.float32, bitcast=True)
