"""Kernels of `specc::experts`: the order of pairs, both products, and the sum of each token."""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.act_and_mul import activate
from specc.kernels.reference.fused import GATE_LIMIT, GATE_SHARPNESS

LIMIT = tl.constexpr(GATE_LIMIT)
SHARPNESS = tl.constexpr(GATE_SHARPNESS)


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


@triton.jit
def _clamped(b_gate, b_up):
    """The gate of gpt-oss; see `gated` of the oracle."""
    # not by minima, which lose a NaN
    b_gate = tl.where(b_gate > LIMIT, LIMIT, b_gate)
    b_up = tl.where(b_up > LIMIT, LIMIT, tl.where(b_up < -LIMIT, -LIMIT, b_up))
    return b_gate / (1.0 + tl.exp(b_gate * -SHARPNESS)) * (b_up + 1.0)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "top_k"])
def experts_gate_up_kernel(
    x,
    ids,
    order,
    counts,
    weight,
    out,
    num_pairs,
    num_experts,
    top_k,
    size,
    K,
    ACTIVATION: tl.constexpr,
    BS: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    bias=None,  # [E, rows of a matrix], or none
):
    expert, b_pair = _tile(ids, order, counts, num_pairs, num_experts, BS, BE, BM)
    if expert < 0:
        return
    o_i = tl.program_id(1) * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    m_m = (b_pair >= 0)[:, None]
    o_token = (tl.maximum(b_pair, 0) // top_k).to(tl.int64)
    o_i_in = tl.minimum(o_i, size - 1)
    if ACTIVATION == "clamped":
        # a gate's row, then the one that it is multiplied with
        o_gate = expert.to(tl.int64) * 2 * size + 2 * o_i_in
        o_up = o_gate + 1
    else:
        o_gate = expert.to(tl.int64) * 2 * size + o_i_in
        o_up = o_gate + size
    p_x = x + o_token[:, None] * K + o_k[None, :]
    p_gate = weight + o_gate[:, None] * K + o_k[None, :]
    p_up = weight + o_up[:, None] * K + o_k[None, :]
    b_gate = tl.zeros([BM, BN], tl.float32)
    b_up = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        m_k = o_k[None, :] < K - k  # [1, BK]
        b_x = tl.load(p_x + k, mask=m_m & m_k, other=0.0)  # [BM, BK]
        b_w = tl.load(p_gate + k, mask=m_k, other=0.0)  # [BN, BK]
        b_gate = tl.dot(b_x, tl.trans(b_w), b_gate, input_precision="ieee")
        b_w = tl.load(p_up + k, mask=m_k, other=0.0)
        b_up = tl.dot(b_x, tl.trans(b_w), b_up, input_precision="ieee")
    if bias is not None:
        b_gate += tl.load(bias + o_gate)[None, :].to(tl.float32)
        b_up += tl.load(bias + o_up)[None, :].to(tl.float32)
    if ACTIVATION == "clamped":
        b_out = _clamped(b_gate, b_up)
    else:
        b_out = activate(b_gate, ACTIVATION) * b_up
    p_out = out + b_pair.to(tl.int64)[:, None] * size + o_i[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_m & (o_i < size)[None, :])


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def experts_down_kernel(
    x,
    ids,
    order,
    counts,
    weight,
    out,
    num_pairs,
    num_experts,
    size,
    K,
    BS: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    bias=None,  # [E, rows of a matrix], or none
):
    expert, b_pair = _tile(ids, order, counts, num_pairs, num_experts, BS, BE, BM)
    if expert < 0:
        return
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    m_m = (b_pair >= 0)[:, None]
    o_row = expert.to(tl.int64) * size + tl.minimum(o_n, size - 1)
    p_x = x + tl.maximum(b_pair, 0).to(tl.int64)[:, None] * K + o_k[None, :]
    p_w = weight + o_row[:, None] * K + o_k[None, :]
    b_out = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        m_k = o_k[None, :] < K - k  # [1, BK]
        b_x = tl.load(p_x + k, mask=m_m & m_k, other=0.0)  # [BM, BK]
        b_w = tl.load(p_w + k, mask=m_k, other=0.0)  # [BN, BK]
        b_out = tl.dot(b_x, tl.trans(b_w), b_out, input_precision="ieee")
    if bias is not None:
        b_out += tl.load(bias + o_row)[None, :].to(tl.float32)
    p_out = out + b_pair.to(tl.int64)[:, None] * size + o_n[None, :]
    tl.store(p_out, b_out, mask=m_m & (o_n < size)[None, :])


@triton.jit(do_not_specialize=["num_experts", "top_k"])
def experts_sum_kernel(
    found,
    ids,
    weights,
    out,
    num_experts,
    top_k,
    size,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    """Weighted sum of the outputs of one token's experts, a block of columns."""
    i_n = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    m_h = o_h < size
    b_out = tl.zeros([BH], tl.float32)
    for t in range(0, top_k, BT):
        o_t = t + tl.arange(0, BT)
        o_pair = i_n * top_k + o_t
        m_t = o_t < top_k
        b_id = tl.load(ids + o_pair, mask=m_t, other=-1)
        b_weight = tl.load(weights + o_pair, mask=m_t, other=0.0).to(tl.float32)
        # of pairs without an expert nothing was written
        m_th = ((b_id >= 0) & (b_id < num_experts))[:, None] & m_h[None, :]  # [BT, BH]
        b_found = tl.load(found + o_pair[:, None] * size + o_h[None, :], mask=m_th, other=0.0)
        b_out += tl.sum(tl.where(m_th, b_found * b_weight[:, None], 0.0), 0)
    tl.store(out + i_n * size + o_h, b_out.to(out.dtype.element_ty), mask=m_h)


@triton.jit
def _tile(
    ids,
    order,
    counts,
    num_pairs,
    num_experts,
    BS: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
):
    """The program's tile: its expert, -1 for none, and the pair of each row [BM], -1 for none."""
    if order is None:
        expert, b_pair = _tile_of_few(ids, num_pairs, num_experts, BS, BM)
    else:
        expert, b_pair = _tile_of_sorted(order, counts, num_experts, BE, BM)
    return expert, b_pair


@triton.jit
def _tile_of_few(ids, num_pairs, num_experts, BS: tl.constexpr, BM: tl.constexpr):
    """Pair i leads a tile if a multiple of BM pairs of its expert come before it."""
    i_t = tl.program_id(0)
    o_s = tl.arange(0, BS)
    b_id = tl.load(ids + o_s, mask=o_s < num_pairs, other=-1)
    own = tl.load(ids + i_t)
    is_expert = (own >= 0) & (own < num_experts)
    m_own = b_id == own
    b_rank = tl.cumsum(m_own.to(tl.int32), 0) - 1
    rank = tl.sum((m_own & (o_s < i_t)).to(tl.int32), 0)
    o_rank = rank + tl.arange(0, BM)
    m_row = m_own[None, :] & (b_rank[None, :] == o_rank[:, None])  # [BM, BS]
    b_pair = tl.max(tl.where(m_row, o_s[None, :], -1), 1)
    return tl.where(is_expert & (rank % BM == 0), own, -1), b_pair


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
