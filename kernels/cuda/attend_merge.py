"""Parts of a tile's result: what one split of the keys gives, stored and merged again.

A part is the softmax over its keys alone, and the logarithm of the sum of their exponentials.

Source: flash decoding: partial softmax over splits of the keys, merged by their log-sum-exp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.arrivals import is_last
from specc.kernels.cuda.attend_rows import find_tokens

# splits that one program merges: with more, the last of each such group merges it, and the last
# of these the groups, so that no program has a long row of loads
GROUP = tl.constexpr(8)


@triton.jit
def store_columns(p, o_row, b_out, m_row, first, DV: tl.constexpr):
    """Store columns from `first` on of rows o_row [BM] of DV numbers."""
    o_v = first + tl.arange(0, b_out.shape[1])
    m_out = m_row[:, None] & (o_v < DV)[None, :]
    tl.store(p + o_row[:, None] * DV + o_v[None, :], b_out.to(p.dtype.element_ty), mask=m_out)


@triton.jit
def _find_largest(lse, i_part, step, count, m_row, BM: tl.constexpr, MERGED: tl.constexpr):
    """[BM] the largest logarithm of parts i_part, i_part + step, …; 0 of rows that see no key."""
    o_m = tl.arange(0, BM)
    b_m = tl.full([BM], float("-inf"), tl.float32)
    for i in tl.range(0, count, MERGED, num_stages=1):
        for j in tl.static_range(MERGED):
            o_row = (i_part + (i + j) * step).to(tl.int64) * BM + o_m
            b_lse = tl.load(lse + o_row, mask=m_row & (i + j < count), other=float("-inf"))
            b_m = tl.maximum(b_m, b_lse)
    # -inf - -inf is NaN
    return tl.where(b_m == float("-inf"), 0.0, b_m)


@triton.jit
def _merge_columns(
    partial, lse, b_m, i_part, step, count, m_row, first, DV: tl.constexpr, BM: tl.constexpr,
    BV: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """BV columns of parts i_part, i_part + step, …, always in this order, MERGED at a time.

    Args:
        b_m: [BM] as `_find_largest` has them.
        first: column.

    Returns:
        rows [BM, BV], and the logarithms [BM] of their sums.
    """
    o_m = tl.arange(0, BM)
    o_v = first + tl.arange(0, BV)
    m_out = m_row[:, None] & (o_v < DV)[None, :]
    b_l = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, BV], tl.float32)
    for i in tl.range(0, count, MERGED, num_stages=1):
        for j in tl.static_range(MERGED):
            o_row = (i_part + (i + j) * step).to(tl.int64) * BM + o_m
            is_one = i + j < count
            b_lse = tl.load(lse + o_row, mask=m_row & is_one, other=float("-inf"))
            p_part = partial + o_row[:, None] * DV + o_v[None, :]
            b_part = tl.load(p_part, mask=m_out & is_one, other=0.0)
            b_weight = tl.exp2(b_lse - b_m)
            b_l += b_weight
            b_acc += b_weight[:, None] * b_part
    b_total = tl.where(b_l > 0, b_l, 1.0)
    b_lse = tl.where(b_l > 0, b_m + tl.log2(b_total), float("-inf"))
    return b_acc / b_total[:, None], b_lse


@triton.jit
def _merge_group(
    partial, lse, out, o_out, i_part, step, count, m_row, is_all, DV: tl.constexpr,
    BM: tl.constexpr, BV: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Merge parts i_part, i_part + step, … to the result, or, unless they are all, to the first."""
    b_m = _find_largest(lse, i_part, step, count, m_row, BM, MERGED)
    o_first = i_part.to(tl.int64) * BM + tl.arange(0, BM)
    b_lse = b_m
    for first in tl.range(0, DV, BV, num_stages=1):
        b_out, b_lse = _merge_columns(
            partial, lse, b_m, i_part, step, count, m_row, first, DV, BM, BV, MERGED
        )
        if is_all:
            store_columns(out, o_out, b_out, m_row, first, DV)
        else:
            if BV < DV:
                # other threads may still read what is written here
                tl.debug_barrier()
            store_columns(partial, o_first, b_out, m_row, first, DV)
    if not is_all:
        if BV < DV:
            tl.debug_barrier()
        tl.store(lse + o_first, b_lse, mask=m_row)


@triton.jit
def merge_arrived(
    partial, lse, arrived, out, o_out, i_part, i_split, splits, m_row, DV: tl.constexpr,
    BM: tl.constexpr, BV: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Merge a tile's parts, in their order, if this split was the last of its group to be stored.

    Args:
        arrived: counters of parts, zeros before and after.
        out: rows of DV numbers.
        o_out: [BM] those of the tile.
        i_part: of the tile's first split.
        BV: columns that are merged at a time.
        MERGED: parts that are loaded at a time.
    """
    # a part of each group is where its first split had its own
    i_leader = i_split // GROUP * GROUP
    size = tl.minimum(splits - i_leader, GROUP)
    if is_last(arrived + i_part + i_leader, size):
        _merge_group(
            partial, lse, out, o_out, i_part + i_leader, 1, size, m_row, splits <= GROUP,
            DV, BM, BV, MERGED,
        )  # fmt: skip
        if splits > GROUP:
            num_groups = (splits + GROUP - 1) // GROUP
            # no group begins with the second split: its counter is free
            if is_last(arrived + i_part + 1, num_groups):
                _merge_group(
                    partial, lse, out, o_out, i_part, GROUP, num_groups, m_row, True,
                    DV, BM, BV, MERGED,
                )  # fmt: skip


@triton.jit
def _take_parts(b_acc, b_l, b_m, b_part, b_lse, AXIS: tl.constexpr):
    """Take parts along an axis into rows [rows, D], their sums and the largest logarithms."""
    b_m_new = tl.maximum(b_m, tl.max(b_lse, AXIS))
    # rows that see no key at all: -inf - -inf is NaN
    b_base = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)
    b_weight = tl.exp2(b_lse - tl.expand_dims(b_base, AXIS))
    b_shrink = tl.exp2(b_m - b_base)
    b_l = b_l * b_shrink + tl.sum(b_weight, AXIS)
    b_acc = b_acc * b_shrink[:, None] + tl.sum(b_weight[:, :, None] * b_part, AXIS)
    return b_acc, b_l, b_m_new


@triton.jit
def merge_rows(
    partial,  # [tiles, max_splits, BM, D]
    lse,  # [tiles, BM, max_splits]
    i_tile,
    o_r,
    m_r,
    splits,
    max_splits,
    may_lack,
    D: tl.constexpr,
    BM: tl.constexpr,
    BP: tl.constexpr,
    IS_SPARSE: tl.constexpr,
):
    """Rows o_r of a tile from its parts, always in their order: BP are loaded at a time.

    Args:
        may_lack: parts are not loaded before it is known that they were written. Those of one
            sequence are few, and are loaded rather than waiting for sums first.
        IS_SPARSE: there may be parts that no program has written: their logarithms are -inf.

    Returns:
        [rows, D] in float32.
    """
    o_p = tl.arange(0, BP)
    o_d = tl.arange(0, D)
    b_m = tl.where(m_r, float("-inf"), float("-inf"))
    b_l = tl.where(m_r, 0.0, 0.0)
    b_acc = tl.zeros([o_r.shape[0], D], tl.float32)
    for i in tl.range(0, splits, BP, num_stages=1):
        m_part = m_r[:, None] & (i + o_p < splits)[None, :]  # [rows, BP]
        # sums of a row lie side by side: one load of all
        p_lse = lse + ((i_tile * BM + o_r) * max_splits)[:, None] + (i + o_p)[None, :]
        b_lse = tl.load(p_lse, mask=m_part, other=float("-inf"))
        m_written = b_lse != float("-inf")
        if may_lack:
            m_part = m_part & m_written
        o_part = (i_tile * max_splits + i + o_p)[None, :] * BM + o_r[:, None]
        p_part = partial + o_part[:, :, None] * D + o_d[None, None, :]
        b_part = tl.load(p_part, mask=m_part[:, :, None], other=0.0)  # [rows, BP, D]
        if IS_SPARSE:
            b_part = tl.where(m_written[:, :, None], b_part, 0.0)
        b_acc, b_l, b_m = _take_parts(b_acc, b_l, b_m, b_part, b_lse, 1)
    return b_acc * (1.0 / tl.where(b_l > 0, b_l, 1.0))[:, None]


@triton.jit
def merge_tile(
    partial, lse, i_part, count, m_row, D: tl.constexpr, BM: tl.constexpr, MERGED: tl.constexpr
):
    """A tile [BM, D] of parts i_part, i_part + 1, …, always in their order.

    MERGED are asked for at once. A thread has the same numbers of all of them: their dimension is
    the first, along which no warps are laid.
    """
    o_p, o_m, o_d = tl.arange(0, MERGED), tl.arange(0, BM), tl.arange(0, D)
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, D], tl.float32)
    for i in tl.range(0, count, MERGED, num_stages=1):
        m_part = (i + o_p < count)[:, None] & m_row[None, :]  # [MERGED, BM]
        o_row = (i_part + i + o_p)[:, None] * BM + o_m[None, :]
        p_part = partial + o_row[:, :, None] * D + o_d[None, None, :]
        b_part = tl.load(p_part, mask=m_part[:, :, None], other=0.0)
        b_lse = tl.load(lse + o_row, mask=m_part, other=float("-inf"))
        b_acc, b_l, b_m = _take_parts(b_acc, b_l, b_m, b_part, b_lse, 0)
    return b_acc * (1.0 / tl.where(b_l > 0, b_l, 1.0))[:, None]


@triton.jit(
    do_not_specialize=["num_tokens", "num_seqs", "num_heads", "group", "tokens_each", "max_splits"]
)
def merge_wide_kernel(
    out,  # [Nt, H, D]
    partial,  # [B, HK, max_splits, BM, D]
    lse,  # [B, HK, BM, max_splits]
    q_start,
    num_tokens,
    num_seqs,
    num_heads,
    group,
    tokens_each,
    max_splits,
    D: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BP: tl.constexpr,
):
    """Merge BR rows of a tile, BP parts at a time and always in this order: a launch of its own.

    Of wide tiles: their last program took longer for all rows than for a fifth of the keys.
    """
    i_kv = tl.program_id(1)
    i_b = tl.program_id(2)
    i_tile = i_b * tl.num_programs(1) + i_kv
    first, _, last_row = find_tokens(q_start, i_b, num_tokens, num_seqs, tokens_each)
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    o_token = o_r // group
    m_r = (first + o_token < last_row) & (o_r < BM)
    b_out = merge_rows(
        partial, lse, i_tile, o_r, m_r, max_splits, max_splits, num_seqs > 1, D, BM, BP, True
    )
    o_out = (first + o_token).to(tl.int64) * num_heads + i_kv * group + o_r - o_token * group
    store_columns(out, o_out, b_out, m_r, 0, D)
