"""Kernels of `specc::add_norm_*` for weights in fragments: one to eight rows, in bfloat16.

A program adds the residual, multiplies by gamma and rounds once, into shared memory in the order in
which warps take rows from there, and sums squares meanwhile: the scale of the norm is common to a
row, so it multiplies what the products have added up. Then it goes through blocks of 32 outputs,
every `num_programs`-th: what it has made of the rows serves them all, and the words of its next
block are asked for while the one before is multiplied.

A row has the same bits whatever other rows there are: the same columns are added up in the same
order, those of squares, too.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from specc.kernels.cuda.act_and_mul import activated
from specc.kernels.cuda.dependent import let_next_start, wait_alone
from specc.kernels.cuda.linear_q_fragments_loop import (
    PAIR,
    SPAN,
    WORDS,
    copy_layout,
    copy_step,
    lane_layout,
    load_words,
    multiply_step,
    parts_of_block,
    row_layout,
    scales_of_block,
    spans_of_tile,
    word_layout,
    words_of_warps,
)

# columns that are normed at a time: eight a thread of eight warps
CHUNK = gl.constexpr(2048)
SPANS_OF_CHUNK = gl.constexpr(8)


@gluon.jit
def normed_rows(
    x, residual, gamma, total, num_rows, K, eps, offset,
    W: gl.constexpr, BM: gl.constexpr, BS: gl.constexpr, CHUNKS: gl.constexpr,
    US: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """(x + residual) · gamma of BS rows in shared memory, and what multiplies products, [1, BM].

    Every program stores its share of x + residual in `total`.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32, 1], [1, W, 1], [2, 1, 0])
    # by spans of a warp, of which a step has US, and by chunks
    S3: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [2, 1, 0])
    S4: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [3, 2, 1, 0])
    J: gl.constexpr = SPANS_OF_CHUNK
    if BS == 1:
        rows = gl.allocate_shared_memory(
            gl.bfloat16, [CHUNKS * J, W, SPAN], gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
        )
        chunks = rows._reinterpret(gl.bfloat16, [CHUNKS, J, W, SPAN], S3)
    else:
        rows = gl.allocate_shared_memory(gl.bfloat16, [CHUNKS * J, W, BS, SPAN], S3)
        chunks = rows._reinterpret(gl.bfloat16, [CHUNKS, J, W, BS, SPAN], S4)
    o_m = gl.arange(0, BS, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    o_m = gl.expand_dims(gl.expand_dims(o_m, 1), 2)
    o_g = gl.arange(0, CHUNK // 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    o_g = gl.expand_dims(gl.expand_dims(o_g, 0), 2)
    o_e = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    o_e = gl.expand_dims(gl.expand_dims(o_e, 0), 1)
    b_squares = gl.zeros([BS, CHUNK // 8], gl.float32, gl.SliceLayout(2, L))
    for i_c in range(0, (K + CHUNK - 1) // CHUNK):
        o_k = i_c * CHUNK + o_g * 8 + o_e
        m_k = o_k < K
        m_x = m_k & (o_m < num_rows)
        o_x = o_m * K + o_k
        b_x = gl.load(x + o_x, mask=m_x, other=0.0).to(gl.float32)
        b_x += gl.load(residual + o_x, mask=m_x, other=0.0).to(gl.float32)
        # the next layers read the rounded sum: normalize what they see
        b_total = b_x.to(gl.bfloat16)
        m_own = (i_c * (CHUNK // 8) + o_g) % gl.num_programs(0) == gl.program_id(0)
        gl.store(total + o_x, b_total, mask=m_x & m_own)
        b_x = b_total.to(gl.float32)
        b_squares += gl.sum(b_x * b_x, 2)
        b_gamma = gl.load(gamma + o_k, mask=m_k, other=0.0).to(gl.float32) + offset
        b_y = gl.reshape((b_x * b_gamma).to(gl.bfloat16), [BS, J // US, W, US, SPAN])
        b_y = gl.permute(b_y, [1, 3, 2, 0, 4])
        if BS == 1:
            chunks.index(i_c).store(gl.reshape(b_y, [J, W, SPAN]))
        else:
            chunks.index(i_c).store(gl.reshape(b_y, [J, W, BS, SPAN]))
    b_sum = gl.sum(b_squares, 1)
    if BS == 1:
        b_scale = gl.rsqrt(gl.sum(b_sum, 0) / K + eps)
    else:
        b_scale = gl.rsqrt(b_sum / K + eps)
        b_scale = gl.convert_layout(b_scale, gl.SliceLayout(0, gl.SliceLayout(0, A)))
        b_scale = gl.expand_dims(b_scale, 0)
    return rows, b_scale


@gluon.jit
def first_words(
    p_words, i_b, blocks, block_words, tiles,
    W: gl.constexpr, U: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Ask for the first steps of a program's blocks: a ring or words, and the step after those."""
    LW: gl.constexpr = word_layout(W)
    LC: gl.constexpr = copy_layout(W, U * 2)
    first = 0
    if RING != 0:
        o_c = gl.expand_dims(gl.arange(0, U * PAIR, gl.SliceLayout(0, LC)), 0)
        S: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
        held = gl.allocate_shared_memory(gl.int32, [RING, W, U * PAIR], S)
        for turn in gl.static_range(RING - 1):
            if i_b < blocks:
                p_copy = p_words + i_b.to(gl.int64) * block_words + o_c
                copy_step(held, turn, p_copy, first, tiles, U, W, LC)
            else:
                async_copy.commit_group()
            i_b, first = _next_step(i_b, first, tiles, W * U)
    else:
        o_w = gl.expand_dims(gl.arange(0, WORDS, gl.SliceLayout(0, LW)), 0)
        p_tile = p_words + gl.minimum(i_b, blocks - 1).to(gl.int64) * block_words + o_w
        held = load_words(p_tile + words_of_warps(0, tiles, U, W, LW), U, 2)
        i_b, first = _next_step(i_b, first, tiles, W * U)
    return held, i_b, first


@gluon.jit
def _next_step(i_b, first, tiles, STEP: gl.constexpr):
    """The step after one, which may be of a program's next block."""
    is_last = first + STEP >= tiles
    return (
        gl.where(is_last, i_b + gl.num_programs(0), i_b),
        gl.where(is_last, 0, first + STEP),
    )


@gluon.jit
def block_sums(
    p_words, scales, p_zero, rows, held, turn, i_b, i_ahead, first_ahead, blocks,
    block_words, tiles,
    KIND: gl.constexpr, GROUP: gl.constexpr, HAS_ZEROS: gl.constexpr,
    W: gl.constexpr, BM: gl.constexpr, BS: gl.constexpr, U: gl.constexpr, RING: gl.constexpr,
    A: gl.constexpr,
):  # fmt: skip
    """Both halves of a block, [16, BM] each, before the norm's scale; words of the next steps."""
    SPANS: gl.constexpr = spans_of_tile(KIND)
    LW: gl.constexpr = word_layout(W)
    LC: gl.constexpr = copy_layout(W, U * 2)
    LX: gl.constexpr = row_layout(W, BM)
    LZ: gl.constexpr = lane_layout(W)
    begin = i_b.to(gl.int64) * block_words
    p_scale, p_lane = scales_of_block(scales, p_zero, begin, 0, KIND, W, A)
    acc = (gl.zeros([W, 16, BM], gl.float32, A),) * 2
    for first in range(0, tiles, W * U):
        if RING != 0:
            async_copy.wait_group(RING - 2)
            words = ()
            for j in gl.static_range(U * 2):
                word = held.index(turn).slice(j * WORDS, WORDS, dim=1).load(LW)
                words = words + (word,)  # type: ignore[assignment]  # noqa: RUF005
            free = gl.where(turn == 0, RING - 1, turn - 1)
            if i_ahead < blocks:
                o_c = gl.expand_dims(gl.arange(0, U * PAIR, gl.SliceLayout(0, LC)), 0)
                p_copy = p_words + i_ahead.to(gl.int64) * block_words + o_c
                copy_step(held, free, p_copy, first_ahead, tiles, U, W, LC)
            else:
                async_copy.commit_group()
            turn = gl.where(turn == RING - 1, 0, turn + 1)
        else:
            words = held
            o_w = gl.expand_dims(gl.arange(0, WORDS, gl.SliceLayout(0, LW)), 0)
            # after the last step those of it once more
            i_next = gl.where(i_ahead < blocks, i_ahead, i_b)
            p_tile = p_words + i_next.to(gl.int64) * block_words + o_w
            held = load_words(p_tile + words_of_warps(first_ahead, tiles, U, W, LW), U, 2)
        i_ahead, first_ahead = _next_step(i_ahead, first_ahead, tiles, W * U)
        acc = multiply_step(
            words, acc, None, None, rows, p_scale, p_lane, first, tiles,
            KIND, GROUP, HAS_ZEROS, SPANS, W, 2, BM, BS, U, A, LX, LZ,
        )  # fmt: skip
    b_first, b_second = gl.sum(acc[0], 0), gl.sum(acc[1], 0)
    if GROUP == 0:
        o_row = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(0, A))), 1)
        b_first = b_first * gl.load(scales + (begin + o_row))
        b_second = b_second * gl.load(scales + (begin + 16 + o_row))
    return b_first, b_second, held, turn, i_ahead, first_ahead


@gluon.jit(do_not_specialize=["num_rows", "size", "bias_size", "activation"])
def add_norm_fragments_kernel(
    x,
    residual,
    gamma,
    weight,
    scales,
    bias,
    out,
    total,
    num_rows,
    size,
    bias_size,
    activation,
    K,
    eps,
    offset,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    IS_GATED: gl.constexpr,
    W: gl.constexpr,
    BM: gl.constexpr,
    BS: gl.constexpr,
    CHUNKS: gl.constexpr,
    U: gl.constexpr,
    RING: gl.constexpr,
    IS_DEPENDENT: gl.constexpr,
):
    """norm(x + residual) times a weight of `size` outputs; or a gate and what it multiplies.

    x, residual and total [num_rows, K], BS rows at most; K is a multiple of the columns of U tiles
    and no more than CHUNKS chunks. `weight` are words and `scales` float32 of
    the same blocks. bias [bias_size] counts where it is not empty; out [num_rows, size], or, gated,
    [num_rows, size / 2]: then the halves of a block are size / 2 outputs apart, else 16.
    """
    A: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    SPANS: gl.constexpr = spans_of_tile(KIND)
    zeros, head, tiles = parts_of_block(K, KIND, GROUP, HAS_ZEROS)
    i_n, blocks, block_words = gl.program_id(0), size // 32, head + tiles * PAIR
    p_words = weight + head
    held, i_ahead, first_ahead = first_words(
        p_words, i_n, blocks, block_words, tiles, W, U, RING
    )  # fmt: skip
    wait_alone(IS_DEPENDENT)

    rows, b_scale = normed_rows(
        x, residual, gamma, total, num_rows, K, eps, offset, W, BM, BS, CHUNKS, U * SPANS, A
    )
    o_row = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(0, A))), 1)
    o_col = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(0, A))), 0)
    turn = 0
    for i_b in range(i_n, blocks, gl.num_programs(0)):
        b_first, b_second, held, turn, i_ahead, first_ahead = block_sums(
            p_words, scales, weight + zeros, rows, held, turn, i_b, i_ahead, first_ahead,
            blocks, block_words, tiles,
            KIND, GROUP, HAS_ZEROS, W, BM, BS, U, RING, A,
        )  # fmt: skip
        b_first, b_second = b_first * b_scale, b_second * b_scale
        m_out = o_col < num_rows
        if IS_GATED:
            p_out = out + (o_col * (size // 2) + i_b * 16 + o_row)
            b_out = activated(b_first, activation) * b_second
            gl.store(p_out, b_out.to(gl.bfloat16), mask=m_out)
        else:
            o_n = i_b * 32 + o_row
            b_first += gl.load(bias + o_n, mask=o_n < bias_size, other=0.0).to(gl.float32)
            b_second += gl.load(bias + o_n + 16, mask=o_n < bias_size, other=0.0).to(gl.float32)
            p_out = out + (o_col * size + o_n)
            gl.store(p_out, b_first.to(gl.bfloat16), mask=m_out)
            gl.store(p_out + 16, b_second.to(gl.bfloat16), mask=m_out)
    if RING != 0:
        async_copy.wait_group(0)
    let_next_start(IS_DEPENDENT)
