"""The second launch of `specc::attend` for wide tiles: merging of what splits of the keys gave.

Many programs merge a few rows each: the last program of a tile took longer for all of them than
for a fifth of the keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.attend_merge import merge_rows, store_columns
from specc.kernels.cuda.attend_rows import find_tokens


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
    first, _, last_row = find_tokens(q_start, i_b, num_tokens, num_seqs, tokens_each)
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    o_token = o_r // group
    m_r = (first + o_token < last_row) & (o_r < BM)
    b_out = merge_rows(
        partial, lse, i_tile, o_r, m_r, max_splits, max_splits, num_seqs > 1, D, BM, BP, True
    )
    o_out = (first + o_token).to(tl.int64) * num_heads + i_kv * group + o_r - o_token * group
    store_columns(out, o_out, b_out, m_r, 0, D)
