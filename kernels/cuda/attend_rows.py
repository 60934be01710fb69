"""Rows of D columns in tiles of BD, in Triton: which a sequence has, where keys are, products."""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.dependent import load_early
from specc.kernels.cuda.kv_quantized import values_of


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
def load_rows(p, o_d, D: tl.constexpr, BD: tl.constexpr, IS_EARLY: tl.constexpr = False):
    """What pointers [rows, BD] point to; columns from D on are zeros."""
    CACHE: tl.constexpr = ".cg" if IS_EARLY else ""
    # a mask is spared where heads fill their tile
    if D >= BD:
        return tl.load(p, cache_modifier=CACHE)
    else:
        return tl.load(p, mask=(o_d < D)[None, :], other=0.0, cache_modifier=CACHE)


@triton.jit
def load_keys(
    p, o_d, m_key, D: tl.constexpr, BD: tl.constexpr, IS_MASKED: tl.constexpr, first=0,
    IS_EARLY: tl.constexpr = False,
):  # fmt: skip
    """Columns of rows [rows, BD] at pointers [rows, 1]: D of them, from `first` on.

    Where masked, zeros of keys that are not there; early ones are read past the first-level cache.
    """
    if IS_MASKED:
        CACHE: tl.constexpr = ".cg" if IS_EARLY else ""
        m_in = m_key[:, None] & (o_d < D)[None, :]
        p += (first + o_d)[None, :]
        return tl.load(p, mask=m_in, other=0.0, cache_modifier=CACHE)
    else:
        return load_rows(p + (first + o_d)[None, :], o_d, D, BD, IS_EARLY)


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


@triton.jit
def products(
    b_q, p_q, m_row, p_k, o_k, m_key,
    D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, IS_MASKED: tl.constexpr,
    b_s=None, b_k=None,
):  # fmt: skip
    """Queries [BM, BD], which p_q [BM] points to, too, times keys: [BM, BN].

    Keys are at p_k and offsets o_k [BN], or without these at p_k [BN].

    Args:
        BC: columns that one product takes. Fewer than BD are loaded from p_q, and b_q is not read.
        b_s: [BM, BN] what products are added to, or none.
        b_k: [BN, BD] keys that are loaded already, or none.
    """
    if BC >= BD:
        if b_k is None:
            b_k = load_keys(_in_rows(p_k, o_k), tl.arange(0, BD), m_key, D, BD, IS_MASKED)
            b_k = values_of(b_k, b_q.dtype)
        b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision="ieee")
    else:
        # without tensor cores a thread holds whole rows of its operands: a few columns at a time
        if b_s is None:
            b_s = tl.zeros([m_row.shape[0], m_key.shape[0]], tl.float32)
        for i in tl.static_range(0, BD, BC):
            o_c = i + tl.arange(0, BC)
            m_q = m_row[:, None] & (o_c < D)[None, :]
            b_part = tl.load(p_q[:, None] + o_c[None, :], mask=m_q, other=0.0)
            b_own = load_keys(_in_rows(p_k, o_k), o_c, m_key, D, BD, IS_MASKED)
            b_own = values_of(b_own, b_part.dtype)
            b_s = tl.dot(b_part, tl.trans(b_own), b_s, input_precision="ieee")
    return b_s


@triton.jit
def _in_rows(p_k, o_k):
    return p_k[:, None] if o_k is None else p_k + o_k[:, None]
