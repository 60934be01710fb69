"""Rows of heads in Triton: of D columns, in tiles of BD; which a sequence has, where keys are."""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.dependent import load_early


@triton.jit
def find_tokens(q_start, i_b, num_tokens, num_seqs, tokens_each):
    """The first token of a sequence, the one after its last, and after the last that has rows."""
    first = i_b * tokens_each
    last = first + tokens_each
    if tokens_each == 0:
        first = tl.maximum(load_early(q_start + i_b, True, 0), 0)
        last = tl.minimum(load_early(q_start + i_b + 1, True, 0), num_tokens)
    # rows after the last sequence are dead tokens of it
    return first, last, tl.where(i_b == num_seqs - 1, num_tokens, last)


@triton.jit
def load_rows(p, o_d, D: tl.constexpr, BD: tl.constexpr):
    """What pointers [rows, BD] point to; columns from D on are zeros."""
    # a mask is spared where heads fill their tile
    if D >= BD:
        return tl.load(p)
    else:
        return tl.load(p, mask=(o_d < D)[None, :], other=0.0)


@triton.jit
def load_keys(p, o_d, m_key, D: tl.constexpr, BD: tl.constexpr, IS_MASKED: tl.constexpr):
    """Rows [rows, BD] at pointers [rows, 1]; where masked, zeros of keys that are not there."""
    if IS_MASKED:
        return tl.load(p + o_d[None, :], mask=m_key[:, None] & (o_d < D)[None, :], other=0.0)
    else:
        return load_rows(p + o_d[None, :], o_d, D, BD)


@triton.jit
def find_rows(
    p_table, i_key, o_n, m_key, num_blocks, block_size, stride_kb, stride_ks, stride_vb, stride_vs,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Where keys i_key + o_n and their values are: offsets of the block, and [BN] of its rows."""
    if PAGE == 0:
        # the whole block lies in one page
        i_page = i_key // block_size
        i_row = tl.load(p_table + i_page)
        # what a broken table names stays inside the cache
        i_row = tl.minimum(tl.maximum(i_row, 0), num_blocks - 1).to(tl.int64)
        i_slot = (i_key - i_page * block_size).to(tl.int64)
        i_k = i_row * stride_kb + i_slot * stride_ks
        i_v = i_row * stride_vb + i_slot * stride_vs
        # small: within a block of keys
        return i_k, i_v, o_n * stride_ks, o_n * stride_vs
    else:
        o_key = i_key + o_n
        b_row = tl.load(p_table + o_key // PAGE, mask=m_key, other=0)
        b_row = tl.minimum(tl.maximum(b_row, 0), num_blocks - 1).to(tl.int64)
        o_k = b_row * stride_kb + (o_key % PAGE) * stride_ks
        return 0, 0, o_k, b_row * stride_vb + (o_key % PAGE) * stride_vs
