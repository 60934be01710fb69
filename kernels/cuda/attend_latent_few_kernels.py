"""The kernel of attention over latents for few tokens of a sequence: what is done once is short.

As in `attend_few_kernel`, key blocks go round the splits, so that a program finds its first one
without knowing how long the sequence is, and asks for it before its queries; the last program of a
tile loads all parts at once. But parts are as wide as a latent, 32 KiB of 16 rows, and one program
would read those of all splits: so values are shared out, too. A program multiplies its queries with
all columns of its keys, and has NV of the latent's four quarters as values. It takes quarters in
turn from its own first one on, so that what it weighs is what it has loaded as keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.arrivals import is_last
from specc.kernels.cuda.attend_merge import merge_tile, store_columns
from specc.kernels.cuda.attend_rows import find_tokens, load_keys
from specc.kernels.cuda.attend_softmax import (
    LOG2E,
    end_softmax,
    log_sums,
    start_softmax,
    take_scores,
)
from specc.kernels.cuda.attend_visible import divide, is_visible, node_bits
from specc.kernels.cuda.attend_visits import NO_WINDOW, find_few
from specc.kernels.cuda.dependent import let_next_start, load_early, wait_alone

# of a latent's columns
QUARTERS = tl.constexpr(4)
# of a sequence, at most
TOKENS = tl.constexpr(16)


@triton.jit
def _find_keys(places, i_block, o_n, BN: tl.constexpr, PAGE: tl.constexpr):
    """[BN] where the keys of a block are; what a broken table names stays inside the cache."""
    table, num_pages, num_blocks, block_size, stride_kb, stride_ks = places
    if PAGE == 0:
        # the whole block lies in one page, and may begin inside it
        i_page = i_block * BN // block_size
        i_row = load_early(table + i_page, i_page < num_pages, 0)
        i_row = tl.minimum(tl.maximum(i_row, 0), num_blocks - 1).to(tl.int64)
        i_slot = (i_block * BN - i_page * block_size).to(tl.int64)
        return i_row * stride_kb + i_slot * stride_ks + o_n * stride_ks
    else:
        i_page = i_block * (BN // PAGE) + o_n // PAGE
        b_row = load_early(table + i_page, i_page < num_pages, 0)
        b_row = tl.minimum(tl.maximum(b_row, 0), num_blocks - 1).to(tl.int64)
        return b_row * stride_kb + o_n % PAGE * stride_ks


@triton.jit
def _first_column(i_first, j, BC: tl.constexpr):
    """Of the j-th quarter of a program that begins with quarter i_first."""
    return (i_first + j) % QUARTERS * BC


@triton.jit
def _load_all(
    p_row, i_first, m_row, R: tl.constexpr, S: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Rows of queries or keys: the quarters [rows, BC] in a program's turn, what heads share.

    They are read past the first-level cache.
    """
    p, o_c, o_s = p_row[:, None], tl.arange(0, BC), tl.arange(0, BS)
    return (
        load_keys(p, o_c, m_row, BC, BC, IS_MASKED, _first_column(i_first, 0, BC), True),
        load_keys(p, o_c, m_row, BC, BC, IS_MASKED, _first_column(i_first, 1, BC), True),
        load_keys(p, o_c, m_row, BC, BC, IS_MASKED, _first_column(i_first, 2, BC), True),
        load_keys(p, o_c, m_row, BC, BC, IS_MASKED, _first_column(i_first, 3, BC), True),
        load_keys(p, o_s, m_row, S, BS, IS_MASKED, R, True),
    )


@triton.jit
def _take(
    acc,  # NV times [BM, BC]
    b_l,  # [BM]
    b_m,  # [BM]
    queries,  # as of `_load_all`
    keys,  # likewise
    m_s,  # [BM, BN]
    m_seen,  # [BN] that some row sees
    qk_scale,
    softcap,
    IS_MASKED: tl.constexpr,
):
    """Take a key block into the running softmax."""
    # two chains of products, each of which waits for itself alone
    b_s = tl.dot(queries[4], tl.trans(keys[4]))
    b_other = tl.dot(queries[0], tl.trans(keys[0]))
    b_s = tl.dot(queries[1], tl.trans(keys[1]), b_s)
    b_other = tl.dot(queries[2], tl.trans(keys[2]), b_other)
    b_s = tl.dot(queries[3], tl.trans(keys[3]), b_s) + b_other
    b_p, b_shrink, b_l, b_m = take_scores(b_s, b_l, b_m, m_s, qk_scale, softcap, IS_MASKED)
    b_p = b_p.to(keys[0].dtype)
    new = ()
    for j in tl.static_range(len(acc)):
        b_v = keys[j]
        if IS_MASKED:
            # rows that nobody sees may be NaN, and 0 · NaN is NaN
            b_v = tl.where(m_seen[:, None], b_v, 0.0)
        new += (tl.dot(b_p, b_v, acc[j] * b_shrink[:, None]),)  # type: ignore[assignment]
    return new, b_l, b_m


@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_seqs", "num_heads", "num_words", "num_blocks", "num_pages",
        "block_size", "tokens_each", "max_splits", "stride_table", "stride_words",
    ]
)  # fmt: skip
def attend_latent_few_kernel(
    q,
    k_cache,
    out,
    partial,  # [sequences, tiles, quarters, max_splits, BM, BC]
    lse,  # [sequences, tiles, quarters, max_splits, BM]
    arrived,  # [sequences, tiles, programs of a split], zeros before and after
    q_start,
    position,
    slot,
    cache_len,
    ancestors,
    block_table,
    scale,
    num_tokens,
    num_seqs,
    num_heads,
    num_words,
    num_blocks,
    num_pages,
    block_size,
    tokens_each,
    max_splits,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_ks,
    stride_table,
    stride_words,
    R: tl.constexpr,
    S: tl.constexpr,
    BC: tl.constexpr,
    BS: tl.constexpr,
    NV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    MERGED: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    PAGE: tl.constexpr,
    IS_TREE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    sinks=None,  # [H], or none
    softcap=None,  # of scores, or none
):
    # until the wait below nothing is read but integers that are older than the keys, and keys that
    # the kernel before does not write
    SHARES: tl.constexpr = QUARTERS // NV
    i_tile = tl.program_id(0) // SHARES
    i_share = tl.program_id(0) % SHARES
    i_split = tl.program_id(1)
    i_b = tl.program_id(2)
    i_first = i_share * NV
    first, last, last_row = find_tokens(q_start, i_b, num_tokens, num_seqs, tokens_each)
    length = tl.maximum(load_early(cache_len + i_b, True, 0), 0)
    capacity = num_pages * block_size

    end, full, num_visits, splits, first_new = find_few(
        slot, position, first, last, last_row, length, capacity, max_splits, TOKENS, MIN_BLOCKS,
        BN, IS_TREE,
    )  # fmt: skip

    o_m = tl.arange(0, BM)
    o_r = i_tile * BM + o_m
    o_token = divide(o_r, num_heads)
    o_t = first + o_token  # [BM]
    o_h = o_r - o_token * num_heads
    m_row = o_t < last_row
    m_own = o_t < last
    m_live = load_early(slot + o_t, m_own, -1) >= 0
    b_position = o_m
    if not IS_TREE:
        b_position = load_early(position + o_t, m_own, 0).to(tl.int32)

    table = block_table + i_b.to(tl.int64) * stride_table  # type: ignore[attr-defined]
    places = table, num_pages, num_blocks, block_size, stride_kb, stride_ks
    o_n = tl.arange(0, BN)
    # Where the first keys are does not depend on lengths. Committed rows that this pass does not
    # write again are older than the kernel before: blocks of them alone are read before the wait,
    # and none where another sequence may share them, and write them.
    num_old = tl.minimum(tl.minimum(length, first_new), capacity) // BN
    num_old = tl.where(num_seqs > 1, 0, tl.minimum(num_old, full))
    is_ahead = (i_split < num_old) & (i_split < splits)
    b_key = _find_keys(places, i_split, o_n, BN, PAGE)
    b_zero = tl.zeros([BN, BC], k_cache.dtype.element_ty)
    none = (b_zero, b_zero, b_zero, b_zero, tl.zeros([BN, BS], k_cache.dtype.element_ty))
    # In branches, so that all of a block is asked for at once: else a few columns at a time are,
    # and put where the product reads them.
    keys = none
    if is_ahead:
        keys = _load_all(k_cache + b_key, i_first, o_n >= 0, R, S, BC, BS, False)
    wait_alone(IS_DEPENDENT)
    if i_split >= splits:
        return
    p_q = q + o_t * stride_qt + o_h * stride_qh  # [BM]
    # queries of dead tokens may be NaN, and stay in their rows
    queries = _load_all(p_q, i_first, m_row, R, S, BC, BS, True)

    b_m, b_l = start_softmax(sinks, o_h, m_row, i_split)
    acc = ()
    for _ in tl.static_range(NV):
        acc += (tl.zeros([BM, BC], tl.float32),)  # type: ignore[assignment]
    qk_scale = scale * LOG2E
    p_words = ancestors + o_t * stride_words

    i_rest = i_split
    if is_ahead:
        acc, b_l, b_m = _take(acc, b_l, b_m, queries, keys, 0, 0, qk_scale, softcap, False)
        i_rest += splits
    count = (tl.maximum(full - i_rest, 0) + splits - 1) // splits
    for i in range(0, count):
        b_key = _find_keys(places, i_rest + i * splits, o_n, BN, PAGE)
        keys = _load_all(k_cache + b_key, i_first, o_n >= 0, R, S, BC, BS, False)
        acc, b_l, b_m = _take(acc, b_l, b_m, queries, keys, 0, 0, qk_scale, softcap, False)
    for i in tl.range(i_rest + count * splits, num_visits, splits, num_stages=1):
        b_key = _find_keys(places, i, o_n, BN, PAGE)
        o_key = i * BN + o_n
        keys = none
        if i * BN < end:
            keys = _load_all(k_cache + b_key, i_first, o_key < end, R, S, BC, BS, True)
        b_low = b_position
        b_high = b_position
        if IS_TREE:
            b_low, b_high = node_bits(p_words, m_live, i * BN - length, num_words)
        m_s = is_visible(
            o_key[None, :], o_n[None, :], b_position[:, None], b_low[:, None], b_high[:, None],
            NO_WINDOW, 0, length, IS_TREE,
        )  # fmt: skip
        m_s = m_s & (o_key < end)[None, :]
        m_seen = tl.max((m_s & m_live[:, None]).to(tl.int32), 0) > 0
        acc, b_l, b_m = _take(acc, b_l, b_m, queries, keys, m_s, m_seen, qk_scale, softcap, True)

    let_next_start(IS_DEPENDENT)
    m_any, b_total = end_softmax(b_l, m_live)
    b_lse = log_sums(b_m, b_total, m_any)
    # quarters of rows are rows of a quarter
    o_out = (o_t * num_heads + o_h) * QUARTERS
    i_all = i_b * (tl.num_programs(0) // SHARES) + i_tile
    for j in tl.static_range(NV):
        b_out = tl.where(m_any[:, None], acc[j] * (1.0 / b_total)[:, None], 0.0)
        if splits == 1:
            p_out = out + _first_column(i_first, j, BC)
            store_columns(p_out, o_out, b_out, m_row, 0, BC)
        else:
            o_part = ((i_all * QUARTERS + i_first + j) * max_splits + i_split) * BM + o_m
            tl.store(lse + o_part, b_lse, mask=m_row)
            store_columns(partial, o_part, b_out, m_row, 0, BC)
    if splits == 1:
        return
    if is_last(arrived + i_all * SHARES + i_share, splits):
        for k in tl.static_range(NV):
            i_part = (i_all * QUARTERS + i_first + k) * max_splits
            b_all = merge_tile(partial, lse, i_part, splits, m_row, BC, BM, MERGED)
            store_columns(out + _first_column(i_first, k, BC), o_out, b_all, m_row, 0, BC)
