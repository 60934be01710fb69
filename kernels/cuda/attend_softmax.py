"""The running softmax of attention in Triton: sinks that it starts with, softcaps, a key block.

Scores are in powers of two: a score times log2(e), so that exponentials are `exp2`.

Source: FlashAttention-2, arXiv:2307.08691 §3; sinks of gpt-oss, arXiv:2508.10925 §2.2; softcaps of
Gemma 2, arXiv:2408.00118 §2.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def start_softmax(sinks, o_h, m_row, i_split):
    """Maxima and sums [BM] before the first key; a sink counts as a key of the first split.

    Args:
        sinks: [H] scores without values, or none.
        o_h: [BM] heads of rows.
        m_row: [BM]; Gluon takes the layout from it.
    """
    b_m = tl.where(m_row, float("-inf"), float("-inf"))
    b_l = tl.where(m_row, 0.0, 0.0)
    if sinks is not None:
        m_sink = m_row & (i_split == 0)
        b_sink = tl.load(sinks + o_h, mask=m_sink, other=float("-inf"))
        b_m = b_sink.to(tl.float32) * LOG2E
        b_l = tl.where(b_m == float("-inf"), 0.0, 1.0)
    return b_m, b_l


@triton.jit
def capped(b_s, qk_scale, softcap):
    """Products as scores within -softcap … softcap; `qk_scale` is their scale · log2(e)."""
    # tanh y = 1 - 2 / (1 + e^2y): next to 0 exact to a rounding beside 1, which moves a weight by
    # no more than scores of the softcap's size are rounded
    b_e = tl.exp2(b_s * (2.0 * qk_scale / softcap))
    return softcap * LOG2E * (1.0 - 2.0 / (1.0 + b_e))


@triton.jit
def take_scores(b_s, b_l, b_m, m_s, qk_scale, softcap, IS_MASKED: tl.constexpr, b_bias=None):
    """Take the scores [BM, BN] of a key block into sums and maxima.

    Args:
        b_s: products, which qk_scale > 0 makes scores.
        m_s: [BM, BN] keys that rows see; not read unless masked.
        softcap: of scores, or none.
        b_bias: [BM, BN] what is added to them then, or none.

    Returns:
        weights [BM, BN] of the keys, factors [BM] of what there was before, sums, maxima.
    """
    if softcap is not None:
        b_s = capped(b_s, qk_scale, softcap)
        qk_scale = 1.0
    if b_bias is not None:
        b_s = b_s * qk_scale + b_bias
        qk_scale = 1.0
    if IS_MASKED:
        b_s = tl.where(m_s, b_s * qk_scale, float("-inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
        # rows that have seen nothing yet: -inf - -inf is NaN
        b_base = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)
        b_p = tl.exp2(b_s - b_base[:, None])
    else:
        # scaled in the subtraction, as a scale is positive: one instruction for each number
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1) * qk_scale)
        b_base = b_m_new
        b_p = tl.exp2(b_s * qk_scale - b_base[:, None])
    b_shrink = tl.exp2(b_m - b_base)
    return b_p, b_shrink, b_l * b_shrink + tl.sum(b_p, 1), b_m_new


@triton.jit
def end_softmax(b_l, m_live):
    """Rows [BM] that see a key, and their sums; of others 1."""
    # of NaN, too: what a row sees of it reaches the result
    m_any = m_live & (b_l != 0)
    return m_any, tl.where(m_any, b_l, 1.0)


@triton.jit
def log_sums(b_m, b_total, m_any):
    """Logarithms [BM] of the sums; -inf of rows that see no key."""
    return tl.where(m_any, b_m + tl.log2(b_total), float("-inf"))
