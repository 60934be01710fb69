"""Kernels of `specc::experts`: the order of pairs, both products, and the sum of each token."""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.act_and_mul import activate, clamped
from specc.kernels.cuda.arrivals import is_last
from specc.kernels.cuda.dependent import let_next_start, wait_alone
from specc.kernels.cuda.linear_q_kernels import BLOCK, quantized_product

# experts of a token whose rows are asked for at once
TOGETHER = tl.constexpr(8)


@triton.jit(do_not_specialize=["num_pairs"])
def experts_order_kernel(ids, order, counts, num_pairs, BS: tl.constexpr):
    """Pairs of one expert, after those of all experts before it, and how many they are."""
    i_e = tl.program_id(0)
    o_s = tl.arange(0, BS)
    b_before = tl.zeros([BS], tl.int32)
    b_own = tl.zeros([BS], tl.int32)
    for s in range(0, num_pairs, BS):
        b_id = tl.load(ids + s + o_s, mask=o_s < num_pairs - s, other=-1)
        b_before += ((b_id >= 0) & (b_id < i_e)).to(tl.int32)
        b_own += (b_id == i_e).to(tl.int32)
    place = tl.sum(b_before, 0)
    tl.store(counts + i_e, tl.sum(b_own, 0))
    for s in range(0, num_pairs, BS):
        m_own = tl.load(ids + s + o_s, mask=o_s < num_pairs - s, other=-1) == i_e
        b_own = m_own.to(tl.int32)
        tl.store(order + place + tl.cumsum(b_own, 0) - 1, s + o_s, mask=m_own)
        place += tl.sum(b_own, 0)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "top_k", "routed"])
def experts_gate_up_kernel(
    x,
    ids,
    order,
    counts,
    levels,
    out,
    num_pairs,
    num_experts,
    top_k,
    size,
    K,
    ACTIVATION: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    KIND: tl.constexpr,
    IN_FRAGMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    scales=None,
    zeros=None,
    bias=None,  # [E, rows of a matrix], or none
    shared=None,  # [2 S · size, K], of the S experts after those of `levels`, or none
    routed=None,  # experts of `levels`, if there are others
):
    wait_alone(IS_DEPENDENT)
    expert, b_pair = _tile(ids, order, counts, num_pairs, num_experts, top_k, BT, BE, BM)
    if expert < 0:
        return
    o_i = tl.program_id(1) * BN + tl.arange(0, BN)
    o_in = tl.minimum(o_i, size - 1)
    if ACTIVATION == "clamped":
        # a gate's row, then the one that it is multiplied with
        o_row = tl.interleave(2 * o_in, 2 * o_in + 1)
    elif shared is not None:
        # rows of all gates, then those that they are multiplied with
        is_shared = expert >= routed
        o_in += tl.where(is_shared, (expert - routed) * size, 0).to(tl.int32)
        o_row = tl.interleave(o_in, o_in + tl.where(is_shared, num_experts - routed, 1) * size)
        levels = tl.where(is_shared, shared, levels)
        expert = tl.where(is_shared, 0, expert)
    else:
        o_row = tl.interleave(o_in, o_in + size)
    o_stored = o_row
    if IN_FRAGMENTS:
        # of fragments: both halves of a block
        o_gate = o_in // 16 * 32 + o_in % 16
        o_stored = tl.interleave(o_gate, o_gate + 16)
    o_token = tl.maximum(b_pair, 0) // top_k
    b_both = _product(
        x, o_token, b_pair >= 0, levels, scales, zeros, expert, o_stored, 2 * size, K, K,
        KIND, IN_FRAGMENTS, WIDTH, BM, 2 * BN, BK, PARTS,
    )  # fmt: skip
    let_next_start(IS_DEPENDENT)
    if bias is not None:
        b_both += tl.load(bias + expert * 2 * size + o_row)[None, :].to(tl.float32)
    b_gate, b_up = tl.split(tl.reshape(b_both, [BM, BN, 2]))
    if ACTIVATION == "clamped":
        b_out = clamped(b_gate, b_up)
    else:
        b_out = activate(b_gate, ACTIVATION) * b_up
    p_out = out + b_pair.to(tl.int64)[:, None] * size + o_i[None, :]
    m_out = (b_pair >= 0)[:, None] & (o_i < size)[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "top_k", "routed"])
def experts_down_kernel(
    x,
    ids,
    order,
    counts,
    levels,
    found,
    weights,
    out,
    arrived,
    num_pairs,
    num_experts,
    top_k,
    size,
    K,
    BT: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    KIND: tl.constexpr,
    IN_FRAGMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    scales=None,
    zeros=None,
    bias=None,  # [E, rows of a matrix], or none
    shared=None,  # [size, S · K], of the S experts after those of `levels`, or none
    routed=None,  # experts of `levels`, if there are others
):
    """Rows of pairs in `found`. Of few tokens the last program of a block of columns adds up."""
    wait_alone(IS_DEPENDENT)
    expert, b_pair = _tile(ids, order, counts, num_pairs, num_experts, top_k, BT, BE, BM)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    m_n = o_n < size
    if expert >= 0:
        o_row = tl.minimum(o_n, size - 1)
        stride = K
        if shared is not None:
            # a row has columns of all
            is_shared = expert >= routed
            levels = tl.where(is_shared, shared + (expert - routed) * K, levels)
            stride = tl.where(is_shared, num_experts - routed, 1) * K
            expert = tl.where(is_shared, 0, expert)
        b_out = _product(
            x, tl.maximum(b_pair, 0), b_pair >= 0, levels, scales, zeros, expert, o_row, size, K,
            stride, KIND, IN_FRAGMENTS, WIDTH, BM, BN, BK, PARTS,
        )  # fmt: skip
        if bias is not None:
            b_out += tl.load(bias + expert * size + o_row)[None, :].to(tl.float32)
        p_out = found + b_pair.to(tl.int64)[:, None] * size + o_n[None, :]
        tl.store(p_out, b_out, mask=(b_pair >= 0)[:, None] & m_n[None, :])
    let_next_start(IS_DEPENDENT)
    if out is not None:  # noqa: SIM102 (known to the compiler)
        if is_last(arrived + tl.program_id(1), tl.num_programs(0)):
            o_m = tl.arange(0, BM).to(tl.int64)
            m_m = o_m * top_k < num_pairs
            b_sum = _weighted_sum(found, ids, weights, o_m, m_m, o_n, num_experts, top_k, size)
            p_out = out + o_m[:, None] * size + o_n[None, :]
            tl.store(p_out, b_sum.to(out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def _product(
    x, o_x, m_x, levels, scales, zeros, expert, o_row, num_rows, K, stride,
    KIND: tl.constexpr, IN_FRAGMENTS: tl.constexpr,
    WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Rows o_x [BM], where m_x, times rows o_row [BN] of an expert's matrix: [BM, BN] float32.

    Where KIND is empty, `levels` are floats [E, num_rows, K], rows `stride` apart.
    """
    o_x = o_x.to(tl.int64)
    if KIND != "":
        i_b = expert * ((num_rows + BLOCK - 1) // BLOCK) + o_row // BLOCK
        return quantized_product(
            x, o_x, m_x[:, None], levels, scales, zeros, i_b, o_row % BLOCK, K,
            KIND, IN_FRAGMENTS, WIDTH, BM, BN, BK, PARTS,
        )  # fmt: skip
    else:
        o_k = tl.arange(0, BK)
        p_x = x + o_x[:, None] * K + o_k[None, :]
        p_w = levels + (expert * num_rows + o_row)[:, None] * stride + o_k[None, :]
        b_out = tl.zeros([BM, BN], tl.float32)
        for k in range(0, K, BK):
            m_k = o_k[None, :] < K - k  # [1, BK]
            b_x = tl.load(p_x + k, mask=m_x[:, None] & m_k, other=0.0)  # [BM, BK]
            b_w = tl.load(p_w + k, mask=m_k, other=0.0)  # [BN, BK]
            b_out = tl.dot(b_x, tl.trans(b_w), b_out, input_precision="ieee")
        return b_out


@triton.jit(do_not_specialize=["num_experts", "top_k"])
def experts_sum_kernel(
    found,
    ids,
    weights,
    out,
    num_experts,
    top_k,
    size,
    BH: tl.constexpr,
):
    """Weighted sum of the outputs of one token's experts, a block of columns."""
    o_n = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    b_out = _weighted_sum(found, ids, weights, o_n, o_n >= 0, o_h, num_experts, top_k, size)
    p_out = out + o_n[:, None] * size + o_h[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=(o_h < size)[None, :])


@triton.jit
def _weighted_sum(found, ids, weights, o_n, m_n, o_h, num_experts, top_k, size):
    """Columns o_h [BH] of tokens o_n [BN] where m_n: float32, in the order of a token's experts."""
    b_out = tl.zeros([o_n.shape[0], o_h.shape[0]], tl.float32)
    for first in range(0, top_k, TOGETHER):
        # one after another as sums, side by side as loads
        for i in tl.static_range(TOGETHER):
            m_t = m_n & (first + i < top_k)
            o_pair = o_n * top_k + first + i
            b_id = tl.load(ids + o_pair, mask=m_t, other=-1)
            b_weight = tl.load(weights + o_pair, mask=m_t, other=0.0).to(tl.float32)
            # of pairs without an expert nothing was written
            m_nh = ((b_id >= 0) & (b_id < num_experts))[:, None] & (o_h < size)[None, :]
            b_found = tl.load(found + o_pair[:, None] * size + o_h[None, :], mask=m_nh, other=0.0)
            b_out += tl.where(m_nh, b_found * b_weight[:, None], 0.0)
    return b_out


@triton.jit
def _tile(
    ids,
    order,
    counts,
    num_pairs,
    num_experts,
    top_k,
    BT: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
):
    """The program's tile: its expert, -1 for none, and the pair of each row [BM], -1 for none."""
    if order is None:
        expert, b_pair = _tile_of_few(ids, num_pairs, num_experts, top_k, BM, BT)
    else:
        expert, b_pair = _tile_of_sorted(order, counts, num_experts, BE, BM)
    return expert.to(tl.int64), b_pair


@triton.jit
def _tile_of_few(ids, num_pairs, num_experts, top_k, BM: tl.constexpr, BT: tl.constexpr):
    """Row i of a tile is of token i; of an expert's pairs the first one has the tile."""
    i_t = tl.program_id(0)
    o_t = tl.arange(0, BT)[None, :]
    o_pair = tl.arange(0, BM)[:, None] * top_k + o_t  # [BM, BT]
    m_pair = (o_t < top_k) & (o_pair < num_pairs)
    b_id = tl.load(ids + o_pair, mask=m_pair, other=-1)
    own = tl.load(ids + i_t)
    m_own = m_pair & (b_id == own)
    b_pair = tl.max(tl.where(m_own, o_pair, -1), 1)
    is_first = tl.min(tl.where(b_pair >= 0, b_pair, num_pairs), 0) == i_t
    return tl.where((own >= 0) & (own < num_experts) & is_first, own, -1), b_pair


@triton.jit
def _tile_of_sorted(order, counts, num_experts, BE: tl.constexpr, BM: tl.constexpr):
    """Tiles in the order of experts: the one that has tile i, and where its pairs start."""
    i_t = tl.program_id(0)
    expert, tile, first, count = -1, 0, 0, 0
    num_tiles, num_before = 0, 0
    for e in range(0, num_experts, BE):
        o_e = e + tl.arange(0, BE)
        b_count = tl.load(counts + o_e, mask=o_e < num_experts, other=0)
        b_tiles = (b_count + BM - 1) // BM
        b_end = num_tiles + tl.cumsum(b_tiles, 0)
        # of one expert at most
        m_own = (b_end > i_t) & (b_end - b_tiles <= i_t)
        b_first = num_before + tl.cumsum(b_count, 0) - b_count
        expert += tl.sum(tl.where(m_own, o_e + 1, 0), 0)
        tile += tl.sum(tl.where(m_own, i_t - (b_end - b_tiles), 0), 0)
        first += tl.sum(tl.where(m_own, b_first, 0), 0)
        count += tl.sum(tl.where(m_own, b_count, 0), 0)
        num_tiles += tl.sum(b_tiles, 0)
        num_before += tl.sum(b_count, 0)
    o_place = tile * BM + tl.arange(0, BM)
    b_pair = tl.load(order + first + o_place, mask=o_place < count, other=-1)
    return expert, b_pair
