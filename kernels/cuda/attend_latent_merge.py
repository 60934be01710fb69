"""Parts of a tile of wide rows, stored and merged some columns at a time.

What `attend_merge` does for heads: rows of 512 numbers would not fit the registers twice.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_columns(p_row, b_out, m_row, first, R: tl.constexpr):
    """Columns from `first` on of rows [BM] of R numbers."""
    o_v = first + tl.arange(0, b_out.shape[1])
    m_out = m_row[:, None] & (o_v < R)[None, :]
    tl.store(p_row[:, None] + o_v[None, :], b_out.to(p_row.dtype.element_ty), mask=m_out)


@triton.jit
def merge_columns(
    partial,
    lse,
    p_out,  # [BM], rows of `out`
    i_part,
    step,
    count,
    m_row,
    is_whole,
    R: tl.constexpr,
    BM: tl.constexpr,
    BV: tl.constexpr,
):
    """Parts i_part, i_part + step, …, always in this order, BV columns at a time.

    What comes of them is the result, or, unless it is whole, the part that was the first.
    """
    o_m = tl.arange(0, BM)
    b_m = tl.full([BM], float("-inf"), tl.float32)
    for i in tl.range(0, count, num_stages=1):
        o_row = (i_part + i * step).to(tl.int64) * BM + o_m
        b_m = tl.maximum(b_m, tl.load(lse + o_row, mask=m_row, other=float("-inf")))
    # rows that see no key at all: -inf - -inf is NaN
    b_m = tl.where(b_m == float("-inf"), 0.0, b_m)
    o_first = i_part.to(tl.int64) * BM + o_m
    b_lse = b_m
    for first in tl.range(0, R, BV, num_stages=1):
        o_v = first + tl.arange(0, BV)
        m_out = m_row[:, None] & (o_v < R)[None, :]
        b_l = tl.zeros([BM], tl.float32)
        b_acc = tl.zeros([BM, BV], tl.float32)
        for i in tl.range(0, count, num_stages=1):
            o_row = (i_part + i * step).to(tl.int64) * BM + o_m
            b_own = tl.load(lse + o_row, mask=m_row, other=float("-inf"))
            b_part = tl.load(partial + o_row[:, None] * R + o_v[None, :], mask=m_out, other=0.0)
            b_weight = tl.exp2(b_own - b_m)
            b_l += b_weight
            b_acc += b_weight[:, None] * b_part
        b_total = tl.where(b_l > 0, b_l, 1.0)
        b_acc /= b_total[:, None]
        b_lse = tl.where(b_l > 0, b_m + tl.log2(b_total), float("-inf"))
        if is_whole:
            p = p_out[:, None] + o_v[None, :]
            tl.store(p, b_acc.to(p_out.dtype.element_ty), mask=m_out)
        else:
            # other threads may still read what is written here
            tl.debug_barrier()
            tl.store(partial + o_first[:, None] * R + o_v[None, :], b_acc, mask=m_out)
    if not is_whole:
        tl.debug_barrier()
        tl.store(lse + o_first, b_lse, mask=m_row)
