"""The kernel of attention over cached latents: `attend_kernel` where values are in their keys.

A row of the cache is [latent, shared], one head for all queries, and its latent is key and value
both: it is read once. Rows are wide and tiles of queries are high (all heads of a token share the
cache), so accumulators fill the registers: latents of more than 256 columns are taken in two
halves, what heads share is a part of its own, and splits are merged some columns at a time.

Source: DeepSeek-V2, arXiv:2405.04434 §2.1; else as `attend_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.attend_merge import merge_arrived, store_columns
from specc.kernels.cuda.attend_rows import find_rows, find_tokens, load_keys
from specc.kernels.cuda.attend_softmax import (
    LOG2E,
    capped,
    end_softmax,
    log_sums,
    start_softmax,
    take_scores,
)
from specc.kernels.cuda.attend_visible import divide, is_visible, node_bits
from specc.kernels.cuda.attend_visits import extend_share, find_bounds, find_end, share_blocks
from specc.kernels.cuda.attend_work import find_work


@triton.jit
def _load_queries(p_q, o_c, m_row, first, width):
    """Columns first + o_c of queries, as far as there are `width` of them."""
    return tl.load(
        p_q[:, None] + (first + o_c)[None, :],
        mask=m_row[:, None] & (o_c < width)[None, :],
        other=0.0,
    )


@triton.jit
def _scores(
    b_q,  # [BM, BQ], the whole row if BC == BQ
    p_q,  # [BM]
    p_row,  # [BN]
    b_k,  # [BN, BQ], likewise
    b_s,
    m_row,
    m_key,
    first,
    WIDTH: tl.constexpr,
    BQ: tl.constexpr,
    BC: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Add products of queries and keys in columns first … first + WIDTH - 1 to [BM, BN] scores."""
    if BC >= BQ:
        b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision="ieee")
    else:
        # operands of a whole row would not fit the registers: a few columns at a time
        for i in tl.static_range(0, BQ, BC):
            o_c = tl.arange(0, BC)
            b_part = _load_queries(p_q, o_c, m_row, first + i, WIDTH - i)
            b_own = load_keys((p_row + (first + i))[:, None], o_c, m_key, WIDTH - i, BC, IS_MASKED)
            b_s = tl.dot(b_part, tl.trans(b_own), b_s, input_precision="ieee")
    return b_s


@triton.jit
def _attend_block(
    b_acc,  # [BM, BR]
    b_acc_2,  # [BM, BR], of the second half, if there is one
    b_l,  # [BM]
    b_m,  # [BM]
    rows,  # b_q [BM, BR], b_q_2, b_qs [BM, BS]; of each row p_q, p_words, and whether and where
    keys,  # k_cache, p_table, num_blocks, block_size, strides of blocks and rows
    seen,  # length, window, sink, num_words
    i_key,
    end,
    qk_scale,
    softcap,
    R: tl.constexpr,
    S: tl.constexpr,
    BR: tl.constexpr,
    BS: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    PAGE: tl.constexpr,
    IS_TREE: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Take keys i_key … i_key + BN - 1 into the running softmax."""
    b_q, b_q_2, b_qs, p_q, p_words, m_row, m_live, b_position = rows
    k_cache, p_table, num_blocks, block_size, stride_kb, stride_ks = keys
    length, window, sink, num_words = seen
    o_n = tl.arange(0, BN)
    o_key = i_key + o_n  # [BN]
    m_key = o_key < end

    i_k, _, o_k, _ = find_rows(
        p_table, i_key, o_n, m_key, num_blocks, block_size,
        stride_kb, stride_ks, stride_kb, stride_ks, PAGE,
    )  # fmt: skip
    p_row = k_cache + i_k + o_k  # [BN]

    m_own = m_key
    m_s = m_key[None, :]
    if IS_MASKED:
        b_low = b_position
        b_high = b_position
        if IS_TREE:
            b_low, b_high = node_bits(p_words, m_live, i_key - length, num_words)
        m_s = m_s & is_visible(
            o_key[None, :], o_n[None, :], b_position[:, None], b_low[:, None],
            b_high[:, None], window, sink, length, IS_TREE,
        )  # fmt: skip  # [BM, BN]
        # rows that nobody sees may be NaN, and 0 · NaN is NaN: they are never read
        m_own = tl.max((m_s & m_live[:, None]).to(tl.int32), 0) > 0
    IS_WIDE: tl.constexpr = R > BR
    o_c = tl.arange(0, BR)
    b_c = load_keys(p_row[:, None], o_c, m_own, R, BR, IS_MASKED)  # [BN, BR]
    b_c_2 = b_c
    if IS_WIDE:
        b_c_2 = load_keys((p_row + BR)[:, None], o_c, m_own, R - BR, BR, IS_MASKED)
    b_k = b_c
    if BC >= BS:
        b_k = load_keys((p_row + R)[:, None], tl.arange(0, BS), m_own, S, BS, IS_MASKED)
    b_s = tl.zeros([b_l.shape[0], BN], tl.float32)
    b_s = _scores(b_qs, p_q, p_row, b_k, b_s, m_row, m_own, R, S, BS, BC, IS_MASKED)
    b_s = _scores(b_q, p_q, p_row, b_c, b_s, m_row, m_own, 0, R, BR, BC, IS_MASKED)
    if IS_WIDE:
        b_s = _scores(b_q_2, p_q, p_row, b_c_2, b_s, m_row, m_own, BR, R - BR, BR, BC, IS_MASKED)
    if softcap is not None:
        b_s = capped(b_s, qk_scale, softcap)
        qk_scale = 1.0
    b_p, b_shrink, b_l, b_m = take_scores(b_s, b_l, b_m, m_s, qk_scale, IS_MASKED)
    b_p = b_p.to(b_c.dtype)
    b_acc = tl.dot(b_p, b_c, b_acc * b_shrink[:, None], input_precision="ieee")
    if IS_WIDE:
        b_acc_2 = tl.dot(b_p, b_c_2, b_acc_2 * b_shrink[:, None], input_precision="ieee")
    return b_acc, b_acc_2, b_l, b_m


@triton.jit(
    do_not_specialize=[
        "window", "sink", "num_tokens", "num_seqs", "num_heads", "num_words",
        "num_blocks", "num_pages", "block_size", "tokens_each", "num_splits", "slots", "waves",
        "stride_table", "stride_words",
    ]
)  # fmt: skip
def attend_latent_kernel(
    q,
    k_cache,
    out,
    partial,  # [parts, BM, R]
    lse,  # [parts, BM]
    arrived,  # [parts], zeros before and after
    q_start,
    position,
    slot,
    cache_len,
    ancestors,
    block_table,
    scale,
    window,
    sink,
    num_tokens,
    num_seqs,
    num_heads,
    num_words,
    num_blocks,
    num_pages,
    block_size,
    tokens_each,
    num_splits,
    slots,
    waves,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_ks,
    stride_table,
    stride_words,
    R: tl.constexpr,
    S: tl.constexpr,
    BR: tl.constexpr,
    BS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BV: tl.constexpr,
    BB: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    PAGE: tl.constexpr,
    IS_TREE: tl.constexpr,
    sinks=None,  # [H], or none
    softcap=None,  # of scores, or none
):
    num_programs = tl.num_programs(0)
    i_program = tl.program_id(0)
    if not IS_TREE:
        # the last tokens of a chunk see the most keys: they start first
        i_program = tl.where(num_splits == 1, num_programs - 1 - i_program, i_program)
    capacity = num_pages * block_size
    reach = window + sink
    batch = q_start, cache_len, num_seqs, num_tokens, tokens_each, num_heads, reach, capacity
    i_b, i_tile, i_split, splits, i_part = find_work(
        i_program, num_programs, batch, num_splits, slots, waves, MIN_BLOCKS, BM, BN, BB
    )
    if i_b < 0:
        return
    first, last, last_row = find_tokens(q_start, i_b, num_tokens, num_seqs, tokens_each)
    length = tl.maximum(tl.load(cache_len + i_b), 0)

    o_r = i_tile * BM + tl.arange(0, BM)
    o_token = divide(o_r, num_heads)
    o_t = first + o_token  # [BM]
    o_h = o_r - o_token * num_heads
    m_row = o_t < last_row
    m_live = tl.load(slot + o_t, mask=o_t < last, other=-1) >= 0
    b_position = tl.load(position + o_t, mask=o_t < last, other=0).to(tl.int32)
    p_q = q + o_t.to(tl.int64) * stride_qt + o_h.to(tl.int64) * stride_qh  # [BM]
    # queries of dead tokens may be NaN, and stay in their rows
    b_qs = _load_queries(p_q, tl.arange(0, BS), m_row, R, S)
    b_q = b_qs
    b_q_2 = b_qs
    if BC >= BR:
        b_q = _load_queries(p_q, tl.arange(0, BR), m_row, 0, R)
        if R > BR:
            b_q_2 = _load_queries(p_q, tl.arange(0, BR), m_row, BR, R - BR)

    likely, low, start, full = find_bounds(
        first, last, length, capacity, window, m_live, b_position, IS_TREE
    )
    i_first, i_last, i_full, i_rest, num_sinks, skip = share_blocks(
        likely, low, start, full, sink, i_split, splits, BN
    )

    b_m, b_l = start_softmax(sinks, o_h, m_row, i_split)
    b_acc = tl.zeros([BM, BR], tl.float32)
    b_acc_2 = tl.zeros([BM, BR], tl.float32)
    qk_scale = scale * LOG2E
    p_table = block_table + i_b.to(tl.int64) * stride_table  # type: ignore[attr-defined]
    p_words = ancestors + o_t.to(tl.int64) * stride_words
    rows = b_q, b_q_2, b_qs, p_q, p_words, m_row, m_live, b_position
    keys = k_cache, p_table, num_blocks, block_size, stride_kb, stride_ks
    seen = length, window, sink, num_words

    end = find_end(slot, first, last, m_live, b_position, capacity, BB, IS_TREE)
    i_last = extend_share(i_last, i_rest, end, skip, i_split, splits, BN)
    # what not all rows see lies before the full blocks and after them; it is done first, so that
    # no masks are kept in registers beside the loop
    for i in tl.range(i_first, i_last - (i_rest - i_full), num_stages=1):
        i_visit = tl.where(i < i_full, i, i + i_rest - i_full)
        i_block = tl.where(i_visit < num_sinks, i_visit, i_visit + skip)
        b_acc, b_acc_2, b_l, b_m = _attend_block(
            b_acc, b_acc_2, b_l, b_m, rows, keys, seen, i_block * BN, end, qk_scale, softcap,
            R, S, BR, BS, BN, BC, PAGE, IS_TREE, True,
        )  # fmt: skip

    for i in range(i_full, i_rest):
        b_acc, b_acc_2, b_l, b_m = _attend_block(
            b_acc, b_acc_2, b_l, b_m, rows, keys, seen, (i + skip) * BN, capacity, qk_scale,
            softcap, R, S, BR, BS, BN, BC, PAGE, IS_TREE, False,
        )  # fmt: skip

    m_any, b_total = end_softmax(b_l, m_live)
    b_lse = log_sums(b_m, b_total, m_any)
    b_out = tl.where(m_any[:, None], b_acc / b_total[:, None], 0.0)
    b_out_2 = tl.where(m_any[:, None], b_acc_2 / b_total[:, None], 0.0)
    o_out = o_t.to(tl.int64) * num_heads + o_h  # [BM]
    if splits == 1:
        store_columns(out, o_out, b_out, m_row, 0, R)
        if R > BR:
            store_columns(out, o_out, b_out_2, m_row, BR, R)
        return

    o_part = (i_part + i_split).to(tl.int64) * BM + tl.arange(0, BM)
    tl.store(lse + o_part, b_lse, mask=m_row)
    store_columns(partial, o_part, b_out, m_row, 0, R)
    if R > BR:
        store_columns(partial, o_part, b_out_2, m_row, BR, R)
    merge_arrived(partial, lse, arrived, out, o_out, i_part, i_split, splits, m_row, R, BM, BV, 1)
