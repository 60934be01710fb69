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

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specc.kernels.cuda.dependent import let_next_start, wait_alone
from specc.kernels.cuda.linear_q_fragments_loop import (
    PAIR,
    SPAN,
    WORDS,
    all_steps,
    first_steps,
    parts_of_block,
    row_layout,
    scales_of_block,
    spans_of_tile,
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
    `weight` are words and `scales` float32 of the same blocks. K is a multiple
    of the columns of U tiles. Words of a step are loaded one step ahead, or, with a RING, copied to
    shared memory RING - 1 steps ahead; what is asked for at first no step writes, so it is asked
    for before the wait.
    """
    SPANS: gl.constexpr = spans_of_tile(KIND)
    A: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    LX: gl.constexpr = row_layout(W, BM)
    i_n = gl.program_id(1)
    first_row = gl.program_id(0) * BM
    zeros, head, tiles = parts_of_block(K, KIND, GROUP, HAS_ZEROS)
    i_b = i_n * NB // 2
    begin = i_b.to(gl.int64) * (head + tiles * PAIR)
    half = i_n * NB % 2
    p_words = weight + begin + head + half * WORDS
    held = first_steps(p_words, tiles, W, NB, U, RING)
    wait_alone(IS_DEPENDENT)

    o_m = gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(2, LX)))
    o_m = gl.expand_dims(gl.expand_dims(o_m, 0), 2)
    o_k = gl.arange(0, SPAN, gl.SliceLayout(0, gl.SliceLayout(1, LX)))
    o_k = gl.expand_dims(gl.expand_dims(o_k, 0), 1)
    p_x = x + first_row.to(gl.int64) * K + (o_m * K + o_k)
    m_row = (o_m < num_rows - first_row) & (o_k < K)
    p_scale, p_lane = scales_of_block(scales, weight + zeros, begin, half, KIND, W, A)
    acc = all_steps(
        held, p_words, p_x, m_row, p_scale, p_lane, tiles,
        KIND, GROUP, HAS_ZEROS, SPANS, W, NB, BM, U, RING, A,
    )  # fmt: skip
    let_next_start(IS_DEPENDENT)

    for n in gl.static_range(NB):
        b_out = gl.sum(acc[n], 0)  # [16, BM]
        o_row = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(0, A))), 1)
        o_col = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(0, A))), 0)
        o_n = (i_b // pairs * (2 * pairs) + i_b % pairs + (half + n) * pairs) * 16 + o_row
        if GROUP == 0:
            b_out = b_out * gl.load(scales + (begin + half * 16 + n * 16 + o_row))
        b_out = b_out + gl.load(bias + o_n, mask=o_n < bias_size, other=0.0).to(gl.float32)
        m_out = (o_col < num_rows - first_row) & (o_n < size)
        p_out = out + first_row.to(gl.int64) * size + (o_col * size + o_n)
        gl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_out)
