"""Parts of products by weights in fragments: how lanes hold operands, and a step of the loop.

Columns of rows come from memory, or from shared memory where a kernel has made rows of its own
there, in bfloat16: of each span and warp the rows one after the other.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from specc.kernels.cuda.linear_q_unpack import SCALES_OF_FIRST, SCALES_OF_SECOND, operand_of

# columns of a span: of two instructions
SPAN = gl.constexpr(32)
# words of a tile of 16 outputs, and of both tiles of a block of 32
WORDS = gl.constexpr(128)
PAIR = gl.constexpr(256)
# words of scales of nvfp4 beside two tiles
SCALES = gl.constexpr(32)


@gluon.constexpr_function
def spans_of_tile(kind: str) -> int:
    return 2 if kind in ("int4", "mxfp4", "nvfp4") else 1


@gluon.jit
def parts_of_block(K, KIND: gl.constexpr, GROUP: gl.constexpr, HAS_ZEROS: gl.constexpr):
    """Words of a block before its zero points, and before its tiles, and how many tiles it has.

    Of nvfp4, which has a factor for each output here, scales are where zero points would be.
    """
    tiles = K // (spans_of_tile(KIND) * SPAN)
    groups = 1
    if GROUP != 0:
        groups = K // GROUP
    zeros = groups * (8 if KIND == "mxfp4" else 32)
    head = zeros
    if HAS_ZEROS:
        head = head + groups * 16
    if KIND == "nvfp4":
        head = head + tiles * SCALES
    return zeros, head, tiles


@gluon.jit
def beside_of_lanes(KIND: gl.constexpr, LZ: gl.constexpr):
    """[1, 32]: which word of a half of a block has a lane's zero points, or scales of nvfp4."""
    o_lane = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, LZ)), 0)
    if KIND == "nvfp4":
        return o_lane % 4 // 2 * 8 + o_lane // 4
    else:
        return o_lane // 4


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
def _scales_of(b_scale, SPAN_OF: gl.constexpr):
    """Scales of a span in bfloat16, of rows 0 … 7 and 8 … 15, of the bytes of a tile."""
    return gl.inline_asm_elementwise(
        SCALES_OF_FIRST if SPAN_OF == 0 else SCALES_OF_SECOND, "=r,r", [b_scale],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _for_words(b_lane, b_words):
    """Like `b_words`, two words of each lane, what it has one of."""
    b_all = gl.reshape(gl.join(b_lane, b_lane), b_words.shape)
    return gl.convert_layout(b_all, b_words.type.layout, assert_trivial=True)


@gluon.jit
def _scale_of(p_scale, IS_EXPONENT: gl.constexpr):
    b_scale = gl.load(p_scale)
    if IS_EXPONENT:
        b_scale = (b_scale.to(gl.int32) << 23).to(gl.float32, bitcast=True)
    return b_scale


@gluon.jit
def multiply_step(
    words, acc, p_x, m_row, rows, p_scale, p_zero, first, tiles,
    KIND: gl.constexpr, GROUP: gl.constexpr, HAS_ZEROS: gl.constexpr, SPANS: gl.constexpr,
    W: gl.constexpr, NB: gl.constexpr, BM: gl.constexpr, BS: gl.constexpr, U: gl.constexpr,
    A: gl.constexpr, LX: gl.constexpr, LZ: gl.constexpr,
):  # fmt: skip
    """Take a step into the sums: U tiles of NB blocks, of warp 0 from tile `first` on.

    Rows are at p_x where m_row, or BS of them in shared memory: `rows`, which is None otherwise, is
    [spans of a warp, W, BS, 32], or [spans of a warp, W, 32] of one row, zeros after the last
    column.
    """
    # spans that share a scale, as far as they are of one step, which no group begins inside of
    SHARED: gl.constexpr = U * SPANS if GROUP == 0 else min(GROUP // SPAN, U * SPANS)
    PER_GROUP: gl.constexpr = max(GROUP // SPAN, 1)
    # a warp has all of its tiles, or none: then its words are of others, and its rows are 0
    if rows is None:
        m_x = m_row & (first + warps_of(W, LX) * U < tiles)
        p_x = p_x + first * (SPANS * SPAN)
    # the rest of an address is a constant
    if GROUP != 0:
        i_a = gl.minimum(first + warps_of(W, A) * U, tiles - U) * SPANS // PER_GROUP
        p_scale = p_scale + i_a * 32
    if HAS_ZEROS or KIND == "nvfp4":
        o_z = gl.expand_dims(gl.arange(0, W, gl.SliceLayout(1, LZ)), 1)
        i_z = gl.minimum(first + o_z * U, tiles - U)
        p_zero = p_zero + (i_z * SCALES if KIND == "nvfp4" else i_z * SPANS // PER_GROUP * 16)
    for part in gl.static_range(U * SPANS // SHARED):
        sums = acc
        if GROUP != 0:
            sums = (gl.zeros([W, 16, BM], gl.float32, A),) * NB
        for v in gl.static_range(SHARED):
            if rows is None:
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
                if KIND == "nvfp4":
                    i_scale = (part * SHARED + v) // SPANS * SCALES
                    b_scale = gl.load(p_zero + (i_scale + n * (SCALES // 2)))
                    b_scale = _scales_of(b_scale, (part * SHARED + v) % SPANS)
                    b_rows = _for_words(b_scale, b_words)
                elif HAS_ZEROS:
                    i_zero = part * SHARED // PER_GROUP * 16
                    b_rows = _for_words(gl.load(p_zero + (i_zero + n * 8)), b_words)
                b_w = operand_of(b_words, b_rows, KIND, W, A)
                new = new + (mma_v2(b_w, b_x, sums[n]),)  # type: ignore[assignment]  # noqa: RUF005
            sums = new
        if GROUP != 0:
            new = ()
            for n in gl.static_range(NB):
                p_own = p_scale + (part * SHARED // PER_GROUP * 32 + n * 16)
                grouped = sums[n] * _scale_of(p_own, KIND == "mxfp4")
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
