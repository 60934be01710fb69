"""Parts of a tile's result: what one split of the keys gives, stored and merged again.

A part is the softmax over its keys alone, and the logarithm of the sum of their exponentials.
"""

from __future__ import annotations

import triton
import triton.language as tl

# splits that one program merges: with more, the last of each such group merges it, and the last
# of these the groups, so that no program has a long row of loads
GROUP = tl.constexpr(8)


@triton.jit
def store_part(
    partial, lse, b_out, b_lse, i_part, m_row, DV: tl.constexpr, BM: tl.constexpr, BDV: tl.constexpr
):
    """Store rows of a part; those that see none of its keys are 0, with a sum of 0."""
    o_m = tl.arange(0, BM)
    o_dv = tl.arange(0, BDV)
    o_row = i_part.to(tl.int64) * BM + o_m  # [BM]
    tl.store(lse + o_row, b_lse, mask=m_row)
    m_out = m_row[:, None] & (o_dv < DV)[None, :]
    tl.store(partial + o_row[:, None] * DV + o_dv[None, :], b_out, mask=m_out)


@triton.jit
def merge_parts(
    partial,
    lse,
    i_part,
    step,
    count,
    m_row,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BDV: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Parts i_part, i_part + step, …, always in this order; MERGED of them are loaded at a time.

    Returns:
        rows [BM, BDV], and the logarithms [BM] of their sums.
    """
    o_m = tl.arange(0, BM)
    o_dv = tl.arange(0, BDV)
    m_out = m_row[:, None] & (o_dv < DV)[None, :]
    b_m = tl.full([BM], float("-inf"), tl.float32)
    for i in tl.range(0, count, MERGED, num_stages=1):
        for j in tl.static_range(MERGED):
            o_row = (i_part + (i + j) * step).to(tl.int64) * BM + o_m
            b_lse = tl.load(lse + o_row, mask=m_row & (i + j < count), other=float("-inf"))
            b_m = tl.maximum(b_m, b_lse)
    # rows that see no key at all: -inf - -inf is NaN
    b_m = tl.where(b_m == float("-inf"), 0.0, b_m)
    b_l = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, BDV], tl.float32)
    for i in tl.range(0, count, MERGED, num_stages=1):
        for j in tl.static_range(MERGED):
            o_row = (i_part + (i + j) * step).to(tl.int64) * BM + o_m
            is_one = i + j < count
            b_lse = tl.load(lse + o_row, mask=m_row & is_one, other=float("-inf"))
            p_part = partial + o_row[:, None] * DV + o_dv[None, :]
            b_part = tl.load(p_part, mask=m_out & is_one, other=0.0)
            b_weight = tl.exp2(b_lse - b_m)
            b_l += b_weight
            b_acc += b_weight[:, None] * b_part
    b_total = tl.where(b_l > 0, b_l, 1.0)
    b_lse = tl.where(b_l > 0, b_m + tl.log2(b_total), float("-inf"))
    return b_acc / b_total[:, None], b_lse
