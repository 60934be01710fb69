"""The second launch of `specc::attend` for wide tiles: merging of what splits of the keys gave.

Many programs merge a few rows each: the last program of a tile took longer for all of them than
for a fifth of the keys.

Source: flash decoding: partial softmax over splits of the keys, merged by their log-sum-exp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.dependent import load_early


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
    """Merge BR rows of a tile, BP parts at a time and always in this order."""
    i_kv = tl.program_id(1)
    i_b = tl.program_id(2)
    i_tile = i_b * tl.num_programs(1) + i_kv
    first = i_b * tokens_each
    last = first + tokens_each
    if tokens_each == 0:
        first = tl.maximum(load_early(q_start + i_b, True, 0), 0)
        last = tl.minimum(load_early(q_start + i_b + 1, True, 0), num_tokens)
    last_row = tl.where(i_b == num_seqs - 1, num_tokens, last)
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    o_token = o_r // group
    m_r = (first + o_token < last_row) & (o_r < BM)
    o_p = tl.arange(0, BP)
    o_d = tl.arange(0, D)
    b_m = tl.full([BR], float("-inf"), tl.float32)
    b_l = tl.zeros([BR], tl.float32)
    b_acc = tl.zeros([BR, D], tl.float32)
    for i in tl.range(0, max_splits, BP, num_stages=1):
        m_part = m_r[:, None] & (i + o_p < max_splits)[None, :]  # [BR, BP]
        # sums of a row lie side by side: one load of all
        p_lse = lse + ((i_tile * BM + o_r) * max_splits)[:, None] + (i + o_p)[None, :]
        b_lse = tl.load(p_lse, mask=m_part, other=float("-inf"))
        # -inf of parts that no program has written. Those of one sequence are few, and are loaded
        # rather than waiting for sums first; of several most may be such
        m_written = b_lse != float("-inf")
        if num_seqs > 1:
            m_part = m_part & m_written
        o_part = (i_tile * max_splits + i + o_p).to(tl.int64)[None, :] * BM + o_r[:, None]
        p_part = partial + o_part[:, :, None] * D + o_d[None, None, :]
        b_part = tl.load(p_part, mask=m_part[:, :, None], other=0.0)  # [BR, BP, D]
        b_part = tl.where(m_written[:, :, None], b_part, 0.0)
        b_m_new = tl.maximum(b_m, tl.max(b_lse, 1))
        # rows that see no key at all: -inf - -inf is NaN
        b_base = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)
        b_weight = tl.exp2(b_lse - b_base[:, None])
        b_shrink = tl.exp2(b_m - b_base)
        b_l = b_l * b_shrink + tl.sum(b_weight, 1)
        b_acc = b_acc * b_shrink[:, None] + tl.sum(b_weight[:, :, None] * b_part, 1)
        b_m = b_m_new
    b_out = b_acc * (1.0 / tl.where(b_l > 0, b_l, 1.0))[:, None]
    o_out = (first + o_token).to(tl.int64) * num_heads + i_kv * group + o_r - o_token * group
    p_out = out + o_out[:, None] * D + o_d[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_r[:, None])
