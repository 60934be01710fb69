"""Parts of products by weights in fragments: how lanes hold operands, and a step of the loop.

Columns of rows come from memory, or from shared memory where a kernel has made rows of its own
there, in bfloat16: of each span and warp the rows one after the other.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from specc.kernels.cuda.linear_q_unpack import operand_of, scales_of_span

# columns of a span: of two instructions
SPAN = gl.constexpr(32)
# words of a tile of 16 outputs, and of both tiles of a block of 32
WORDS = gl.constexpr(128)
PAIR = gl.constexpr(256)


@gluon.constexpr_function
def spans_of_tile(kind: str) -> int:
    return 2 if kind in ("int4", "mxfp4", "nvfp4") else 1


@gluon.constexpr_function
def scale_words(kind: str) -> int:
    """Of 16 outputs and the columns of a tile, where scales are bytes."""
    return {"mxfp4": 8, "nvfp4": 16}.get(kind, 0)


@gluon.jit
def parts_of_block(K, KIND: gl.constexpr, GROUP: gl.constexpr, HAS_ZEROS: gl.constexpr):
    """Words of a block before its zero points, and before its tiles, and how many tiles it has.

    GROUP is 0 where an output has one scale, or a factor; scales in bytes are where zero points
    would be.
    """
    tiles = K // (spans_of_tile(KIND) * SPAN)
    groups = 1
    if GROUP != 0:
        groups = K // GROUP
    zeros = groups * 32
    head = zeros + tiles * (2 * scale_words(KIND))
    if HAS_ZEROS:
        head = head + groups * 16
    return zeros, head, tiles


@gluon.constexpr_function
def word_layout(warps: int) -> gl.DistributedLinearLayout:
    """[W, 128] words: a tile for each warp, 16 bytes for each lane."""
    return copy_layout(warps, 1)


@gluon.constexpr_function
def copy_layout(warps: int, tiles: int) -> gl.DistributedLinearLayout:
    """[W, 128 · tiles] words: so many tiles for each warp, 16 bytes of each for a lane."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2]] + [[0, 128 << i] for i in range(tiles.bit_length() - 1)],
        lane_bases=[[0, 4 << i] for i in range(5)],
        warp_bases=[[1 << i, 0] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[warps, 128 * tiles],
    )


@gluon.constexpr_function
def lane_layout(warps: int) -> gl.DistributedLinearLayout:
    """[W, 32]: a number for each lane."""
    return gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[[0, 1 << i] for i in range(5)],
        warp_bases=[[1 << i, 0] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[warps, 32],
    )


@gluon.constexpr_function
def row_layout(warps: int, rows: int) -> gl.DistributedLinearLayout:
    """[W, rows, 32] of x: 16 bytes of a row for each lane, which are its second operand."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1 << i] for i in range(3)]
        + [[0, 8 << i, 0] for i in range((rows // 8).bit_length() - 1)],
        lane_bases=[[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[1 << i, 0, 0] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[warps, rows, 32],
    )


@gluon.jit
def _span(b_words, NUMBER: gl.constexpr, SPANS: gl.constexpr, W: gl.constexpr):
    """Words of a span of a tile, of which a tile of 8 bits has one."""
    if SPANS == 1:
        return b_words
    else:
        b_words = gl.permute(gl.reshape(b_words, [W, 32, 2, 2]), [0, 1, 3, 2])
        b_first, b_second = gl.split(b_words)
        return gl.reshape(b_first if NUMBER == 0 else b_second, [W, 64])


@gluon.jit
def _second(b_x, W: gl.constexpr, BM: gl.constexpr, A: gl.constexpr):
    """32 columns of BM rows of each warp [W, BM, 32], as the second operand of its product."""
    # warp, row, lane of four, chunk of 16 columns, half of it, column of a pair
    b_x = gl.permute(gl.reshape(b_x, [W, BM, 4, 2, 2, 2]), [0, 3, 4, 2, 5, 1])
    return gl.convert_layout(
        gl.reshape(b_x, [W, 32, BM]), gl.DotOperandLayout(1, A, 2), assert_trivial=True
    )


@gluon.jit
def _shared_rows(span, W: gl.constexpr, BM: gl.constexpr, BS: gl.constexpr, LX: gl.constexpr):
    """[W, BM, 32] of BS rows in shared memory; of a single one all columns of a product are it."""
    if BS == 1:
        b_x = gl.expand_dims(span.load(gl.SliceLayout(1, LX)), 1)
        return b_x.broadcast_to([W, BM, 32])
    else:
        return span.load(LX)


@gluon.jit
def scales_of_block(
    scales, p_lane, begin, half, KIND: gl.constexpr, W: gl.constexpr, A: gl.constexpr
):
    """Where scales, or factors, of the first rows [1, 16, 1] of a half are, and zero points, or
    scales in bytes, of the first rows of each lane [1, 32]; of a block from word `begin` on.
    """
    o_r = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, A)))
    p_scale = scales + (begin + half * 16 + gl.expand_dims(gl.expand_dims(o_r, 0), 2))
    o_lane = gl.arange(0, 32, gl.SliceLayout(0, lane_layout(W)))
    o_word = o_lane // 4
    if KIND == "nvfp4":
        o_word = o_lane % 4 // 2 * 8 + o_word
    of_half: gl.constexpr = max(8, scale_words(KIND))
    return p_scale, p_lane + (begin + half * of_half + gl.expand_dims(o_word, 0))


@gluon.jit
def _for_words(b_lane, b_words):
    """Like `b_words`, two words of each lane, what it has one of."""
    b_all = gl.reshape(gl.join(b_lane, b_lane), b_words.shape)
    return gl.convert_layout(b_all, b_words.type.layout, assert_trivial=True)


@gluon.jit
def _scales_of(b_scale, KIND: gl.constexpr, NUMBER: gl.constexpr):
    """Scales of a span of a tile in bfloat16, of rows 0 … 7 and 8 … 15."""
    return gl.inline_asm_elementwise(
        scales_of_span(KIND, NUMBER), "=r,r", [b_scale], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def multiply_step(
    words, acc, p_x, m_row, rows, p_scale, p_lane, first, tiles,
    KIND: gl.constexpr, GROUP: gl.constexpr, HAS_ZEROS: gl.constexpr, SPANS: gl.constexpr,
    W: gl.constexpr, NB: gl.constexpr, BM: gl.constexpr, BS: gl.constexpr, U: gl.constexpr,
    A: gl.constexpr, LX: gl.constexpr, LZ: gl.constexpr,
):  # fmt: skip
    """Take a step into the sums: U tiles of NB blocks, of warp 0 from tile `first` on.

    Rows are at p_x where m_row, or BS of them in shared memory: `rows`, which is None otherwise, is
    [spans of a warp, W, BS, 32], or [spans of a warp, W, 32] of one row, zeros after the last
    column; then columns are sets of U tiles. p_scale and p_lane as of `scales_of_block`.
    """
    SCALES: gl.constexpr = scale_words(KIND)
    # spans that share a scale, as far as they are of one step, which no group begins inside of
    SHARED: gl.constexpr = U * SPANS if GROUP == 0 else min(GROUP // SPAN, U * SPANS)
    PER_GROUP: gl.constexpr = max(GROUP // SPAN, 1)
    # a warp whose tiles are not all there has the last U, and rows of 0 for those that others have
    if rows is None:
        o_t = first + warps_of(W, LX) * U
        i_t = gl.minimum(o_t, tiles - U)
        p_x = p_x + i_t * (SPANS * SPAN)
    # what is left of an address is a constant: groups do not begin within a step, or all of it does
    if GROUP != 0:
        i_a = gl.minimum(first + warps_of(W, A) * U, tiles - U) * SPANS // PER_GROUP
        p_scale = p_scale + i_a * 32
    if HAS_ZEROS or SCALES != 0:
        o_z = gl.expand_dims(gl.arange(0, W, gl.SliceLayout(1, LZ)), 1)
        i_z = gl.minimum(first + o_z * U, tiles - U)
        p_lane = p_lane + (i_z * SPANS // PER_GROUP * 16 if HAS_ZEROS else i_z * (2 * SCALES))
    for part in gl.static_range(U * SPANS // SHARED):
        sums = acc
        if GROUP != 0:
            sums = (gl.zeros([W, 16, BM], gl.float32, A),) * NB
        for v in gl.static_range(SHARED):
            if rows is None:
                m_x = m_row & (i_t + (part * SHARED + v) // SPANS >= o_t)
                b_x = gl.load(p_x + (part * SHARED + v) * SPAN, mask=m_x, other=0.0)
            else:
                span = rows.index(first // W * SPANS + part * SHARED + v)
                b_x = _shared_rows(span, W, BM, BS, LX)
            b_x = _second(b_x, W, BM, A)
            new = ()
            for n in gl.static_range(NB):
                b_words = words[(part * SHARED + v) // SPANS * NB + n]
                b_words = _span(b_words, (part * SHARED + v) % SPANS, SPANS, W)
                b_rows = None
                if SCALES != 0:
                    i_scale = (part * SHARED + v) // SPANS * (2 * SCALES) + n * SCALES
                    b_scale = gl.load(p_lane + i_scale)
                    b_scale = _scales_of(b_scale, KIND, (part * SHARED + v) % SPANS)
                    b_rows = _for_words(b_scale, b_words)
                elif HAS_ZEROS:
                    i_zero = part * SHARED // PER_GROUP * 16
                    b_rows = _for_words(gl.load(p_lane + (i_zero + n * 8)), b_words)
                b_w = operand_of(b_words, b_rows, KIND, W, A)
                new = new + (mma_v2(b_w, b_x, sums[n]),)  # type: ignore[assignment]  # noqa: RUF005
            sums = new
        if GROUP != 0:
            new = ()
            for n in gl.static_range(NB):
                p_own = p_scale + (part * SHARED // PER_GROUP * 32 + n * 16)
                grouped = sums[n] * gl.load(p_own)
                new = new + (acc[n] + grouped,)  # type: ignore[assignment]  # noqa: RUF005
            sums = new
        acc = sums
    return acc


@gluon.jit
def warps_of(W: gl.constexpr, L: gl.constexpr):
    """0 … W - 1, [W, 1, 1]."""
    o_w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    return gl.expand_dims(gl.expand_dims(o_w, 1), 2)


@gluon.jit
def load_words(p_words, U: gl.constexpr, NB: gl.constexpr):
    words = ()
    for u in gl.static_range(U):
        for n in gl.static_range(NB):
            more = gl.load(p_words + (u * PAIR + n * WORDS), cache_modifier=".cg")
            words = words + (more,)  # type: ignore[assignment]  # noqa: RUF005
    return words


@gluon.jit
def words_of_warps(first, tiles, U: gl.constexpr, W: gl.constexpr, L: gl.constexpr):
    """Where the words of a step begin of each warp, [W, 1]: of those without tiles, others'."""
    o_w = gl.expand_dims(gl.arange(0, W, gl.SliceLayout(1, L)), 1)
    return gl.minimum(first + o_w * U, tiles - U) * PAIR


@gluon.jit
def copy_step(ring, turn, p_copy, first, tiles, U: gl.constexpr, W: gl.constexpr, LC: gl.constexpr):
    """Ask for the words of a step, in one copy: each has a barrier."""
    o_w = words_of_warps(first, tiles, U, W, LC)
    async_copy.async_copy_global_to_shared(ring.index(turn), p_copy + o_w)
    async_copy.commit_group()


@gluon.jit
def first_steps(
    p_words, tiles, W: gl.constexpr, NB: gl.constexpr, U: gl.constexpr, RING: gl.constexpr
):
    """Ask for the first words of a program: a ring in shared memory, or words, of a step."""
    if RING != 0:
        LC: gl.constexpr = copy_layout(W, U * NB)
        S: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
        held = gl.allocate_shared_memory(gl.int32, [RING, W, U * NB * WORDS], S)
        for turn in gl.static_range(RING - 1):
            p_copy = p_words + _words_of_step(U, NB, LC)
            copy_step(held, turn, p_copy, turn * (W * U), tiles, U, W, LC)
    else:
        LW: gl.constexpr = word_layout(W)
        o_w = gl.expand_dims(gl.arange(0, WORDS, gl.SliceLayout(0, LW)), 0)
        held = load_words(p_words + o_w + words_of_warps(0, tiles, U, W, LW), U, NB)
    return held


@gluon.jit
def _words_of_step(U: gl.constexpr, NB: gl.constexpr, LC: gl.constexpr):
    """Where the words of a warp's U tiles of NB blocks are, [1, U · NB · 128]."""
    o_c = gl.arange(0, U * NB * WORDS, gl.SliceLayout(0, LC))
    return gl.expand_dims(o_c // (NB * WORDS) * PAIR + o_c % (NB * WORDS), 0)


@gluon.jit
def all_steps(
    held, p_words, p_x, m_row, p_scale, p_lane, tiles,
    KIND: gl.constexpr, GROUP: gl.constexpr, HAS_ZEROS: gl.constexpr, SPANS: gl.constexpr,
    W: gl.constexpr, NB: gl.constexpr, BM: gl.constexpr, U: gl.constexpr, RING: gl.constexpr,
    A: gl.constexpr,
):  # fmt: skip
    """Sums of a program, NB of [W, 16, BM], from what `first_steps` has asked for."""
    LW: gl.constexpr = word_layout(W)
    LC: gl.constexpr = copy_layout(W, U * NB)
    LX: gl.constexpr = row_layout(W, BM)
    LZ: gl.constexpr = lane_layout(W)
    acc = (gl.zeros([W, 16, BM], gl.float32, A),) * NB
    if RING != 0:
        p_copy = p_words + _words_of_step(U, NB, LC)
        turn = 0
        for first in range(0, tiles, W * U):
            async_copy.wait_group(RING - 2)
            words = ()
            for j in gl.static_range(U * NB):
                word = held.index(turn).slice(j * WORDS, WORDS, dim=1).load(LW)
                words = words + (word,)  # type: ignore[assignment]  # noqa: RUF005
            free = gl.where(turn == 0, RING - 1, turn - 1)
            copy_step(held, free, p_copy, first + (RING - 1) * W * U, tiles, U, W, LC)
            acc = multiply_step(
                words, acc, p_x, m_row, None, p_scale, p_lane, first, tiles,
                KIND, GROUP, HAS_ZEROS, SPANS, W, NB, BM, BM, U, A, LX, LZ,
            )  # fmt: skip
            turn = gl.where(turn == RING - 1, 0, turn + 1)
        async_copy.wait_group(0)
    else:
        p_tile = p_words + gl.expand_dims(gl.arange(0, WORDS, gl.SliceLayout(0, LW)), 0)
        words = held
        for first in range(0, tiles, W * U):
            ahead = load_words(p_tile + words_of_warps(first + W * U, tiles, U, W, LW), U, NB)
            acc = multiply_step(
                words, acc, p_x, m_row, None, p_scale, p_lane, first, tiles,
                KIND, GROUP, HAS_ZEROS, SPANS, W, NB, BM, BM, U, A, LX, LZ,
            )  # fmt: skip
            words = ahead
    return acc
