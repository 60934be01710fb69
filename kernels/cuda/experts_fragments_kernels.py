"""Kernels of `specc::experts` by matrices in fragments: up to 16 tokens, in bfloat16.

A program has the pairs of one expert: all tokens are columns of its product, those that chose
another expert zeros. It takes a block of 32 outputs, which are 16 of the gate and the 16 that they
multiply, so nothing is exchanged between both products but a row of a pair. See
`linear_q_fragments_kernels` for how a block is read, and `experts_kernels` for what both launches
do: results of a token have the same bits whatever other tokens there are.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specc.kernels.cuda.act_and_mul import activated, clamped
from specc.kernels.cuda.arrivals import is_last
from specc.kernels.cuda.dependent import let_next_start, wait_alone
from specc.kernels.cuda.linear_q_fragments_loop import (
    PAIR,
    SPAN,
    all_steps,
    first_steps,
    parts_of_block,
    row_layout,
    scales_of_block,
    spans_of_tile,
)

# experts of a token whose rows are asked for at once
TOGETHER = gl.constexpr(8)
# number of gpt-oss's gate, after those of `ACTIVATIONS`
CLAMPED = gl.constexpr(4)


@gluon.jit
def _pairs_of_expert(
    ids, num_pairs, num_experts, top_k, BM: gl.constexpr, BT: gl.constexpr, W: gl.constexpr
):
    """The program's expert, -1 for none, and the pair of each token [BM], -1 for none.

    Of an expert's pairs the first one has the program that multiplies them.
    """
    L: gl.constexpr = gl.BlockedLayout([1, BT], [32, 1], [W, 1], [1, 0])
    i_p = gl.program_id(0)
    o_t = gl.expand_dims(gl.arange(0, BT, gl.SliceLayout(0, L)), 0)
    o_pair = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(1, L)), 1) * top_k + o_t
    m_pair = (o_t < top_k) & (o_pair < num_pairs)
    own = gl.load(ids + i_p)
    m_own = m_pair & (gl.load(ids + o_pair, mask=m_pair, other=-1) == own)
    b_pair = gl.max(gl.where(m_own, o_pair, -1), 1)
    is_first = gl.min(gl.where(b_pair >= 0, b_pair, num_pairs), 0) == i_p
    return gl.where((own >= 0) & (own < num_experts) & is_first, own, -1), b_pair


@gluon.jit
def _sums(
    x, b_row, levels, scales, i_b, K,
    KIND: gl.constexpr, GROUP: gl.constexpr, HAS_ZEROS: gl.constexpr,
    W: gl.constexpr, BM: gl.constexpr, U: gl.constexpr, RING: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Rows b_row [BM] of x, -1 for none, times both halves of a block: [16, BM] float32 each."""
    SPANS: gl.constexpr = spans_of_tile(KIND)
    LX: gl.constexpr = row_layout(W, BM)
    zeros, head, tiles = parts_of_block(K, KIND, GROUP, HAS_ZEROS)
    begin = i_b.to(gl.int64) * (head + tiles * PAIR)
    p_words = levels + begin + head
    held = first_steps(p_words, tiles, W, 2, U, RING)
    b_x = gl.convert_layout(b_row, gl.SliceLayout(0, gl.SliceLayout(2, LX)))
    b_x = gl.expand_dims(gl.expand_dims(b_x, 0), 2)
    o_k = gl.arange(0, SPAN, gl.SliceLayout(0, gl.SliceLayout(1, LX)))
    o_k = gl.expand_dims(gl.expand_dims(o_k, 0), 1)
    p_scale, p_lane = scales_of_block(scales, levels + zeros, begin, 0, KIND, W, A)
    acc = all_steps(
        held, p_words, x + (b_x * K + o_k), (b_x >= 0) & (o_k < K), p_scale, p_lane, tiles,
        KIND, GROUP, HAS_ZEROS, SPANS, W, 2, BM, U, RING, A,
    )  # fmt: skip
    b_first, b_second = gl.sum(acc[0], 0), gl.sum(acc[1], 0)
    if GROUP == 0:
        o_row = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(0, A))), 1)
        b_first = b_first * gl.load(scales + (begin + o_row))
        b_second = b_second * gl.load(scales + (begin + 16 + o_row))
    return b_first, b_second


@gluon.jit
def _with_bias(b_sum, bias, o_n, bias_size, expert):
    """Sums of outputs o_n [16, 1] of a matrix, and their biases where `bias_size` is not 0."""
    p_bias = bias + (expert * bias_size + o_n)
    return b_sum + gl.load(p_bias, mask=o_n < bias_size, other=0.0).to(gl.float32)


@gluon.jit(
    do_not_specialize=["num_pairs", "num_experts", "top_k", "bias_size", "activation", "size"]
)
def experts_fragments_gate_up_kernel(
    x,
    ids,
    levels,
    scales,
    bias,
    out,
    num_pairs,
    num_experts,
    top_k,
    bias_size,
    activation,
    size,
    K,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    W: gl.constexpr,
    BM: gl.constexpr,
    BT: gl.constexpr,
    U: gl.constexpr,
    RING: gl.constexpr,
    IS_DEPENDENT: gl.constexpr,
):
    """Rows of pairs, `out` [pairs, size], of x [tokens, K]: 16 outputs of a gate's block.

    `levels` are words and `scales` float32 of the same blocks. bias
    [experts, bias_size] counts where it is not empty. `activation` is a number of `activated`, or
    CLAMPED, of which outputs of a matrix take turns.
    """
    A: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    wait_alone(IS_DEPENDENT)
    expert, b_pair = _pairs_of_expert(ids, num_pairs, num_experts, top_k, BM, BT, W)
    if expert < 0:
        return
    i_n = gl.program_id(1)
    b_gate, b_up = _sums(
        x, gl.where(b_pair < 0, -1, b_pair // top_k), levels, scales,
        expert * (size // 16) + i_n, K, KIND, GROUP, HAS_ZEROS, W, BM, U, RING, A,
    )  # fmt: skip
    let_next_start(IS_DEPENDENT)
    o_row = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(0, A))), 1)
    o_n = i_n * 16 + o_row
    is_in_turn = activation == CLAMPED
    b_gate = _with_bias(b_gate, bias, gl.where(is_in_turn, 2 * o_n, o_n), bias_size, expert)
    o_up = gl.where(is_in_turn, 2 * o_n + 1, o_n + size)
    b_up = _with_bias(b_up, bias, o_up, bias_size, expert)
    if is_in_turn:  # noqa: SIM108 (one of them is computed)
        b_out = clamped(b_gate, b_up)
    else:
        b_out = activated(b_gate, activation) * b_up
    b_col = gl.convert_layout(b_pair, gl.SliceLayout(0, gl.SliceLayout(0, A)))
    b_col = gl.expand_dims(b_col, 0)
    gl.store(out + (b_col * size + o_n), b_out.to(out.dtype.element_ty), mask=b_col >= 0)


@gluon.jit(do_not_specialize=["num_pairs", "num_experts", "top_k", "bias_size", "size"])
def experts_fragments_down_kernel(
    x,
    ids,
    levels,
    scales,
    bias,
    found,
    weights,
    out,
    arrived,
    num_pairs,
    num_experts,
    top_k,
    bias_size,
    size,
    K,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    W: gl.constexpr,
    BM: gl.constexpr,
    BT: gl.constexpr,
    U: gl.constexpr,
    RING: gl.constexpr,
    IS_DEPENDENT: gl.constexpr,
):
    """Rows of pairs in `found` [pairs, size]; the last program of a block adds up, see there."""
    A: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    wait_alone(IS_DEPENDENT)
    expert, b_pair = _pairs_of_expert(ids, num_pairs, num_experts, top_k, BM, BT, W)
    i_n = gl.program_id(1)
    if expert >= 0:
        b_first, b_second = _sums(
            x, b_pair, levels, scales, expert * (size // 32) + i_n, K,
            KIND, GROUP, HAS_ZEROS, W, BM, U, RING, A,
        )  # fmt: skip
        o_row = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(0, A))), 1)
        o_n = i_n * 32 + o_row
        b_first = _with_bias(b_first, bias, o_n, bias_size, expert)
        b_second = _with_bias(b_second, bias, o_n + 16, bias_size, expert)
        b_col = gl.convert_layout(b_pair, gl.SliceLayout(0, gl.SliceLayout(0, A)))
        b_col = gl.expand_dims(b_col, 0)
        p_found = found + (b_col * size + o_n)
        gl.store(p_found, b_first, mask=b_col >= 0)
        gl.store(p_found + 16, b_second, mask=b_col >= 0)
    let_next_start(IS_DEPENDENT)
    if is_last(arrived + i_n, gl.num_programs(0)):
        L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])
        o_m = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(1, L)), 1)
        o_h = i_n * 32 + gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, L)), 0)
        b_sum = gl.zeros([BM, 32], gl.float32, L)
        for first in range(0, top_k, TOGETHER):
            # one after another as sums, side by side as loads
            for i in gl.static_range(TOGETHER):
                o_pair = o_m * top_k + first + i
                m_pair = (first + i < top_k) & (o_pair < num_pairs)
                b_id = gl.load(ids + o_pair, mask=m_pair, other=-1)
                b_weight = gl.load(weights + o_pair, mask=m_pair, other=0.0).to(gl.float32)
                # of pairs without an expert nothing was written
                m_found = (b_id >= 0) & (b_id < num_experts) & (o_h < size)
                b_found = gl.load(found + (o_pair * size + o_h), mask=m_found, other=0.0)
                b_sum += gl.where(m_found, b_found * b_weight, 0.0)
        m_out = (o_m * top_k < num_pairs) & (o_h < size)
        gl.store(out + (o_m * size + o_h), b_sum.to(out.dtype.element_ty), mask=m_out)
