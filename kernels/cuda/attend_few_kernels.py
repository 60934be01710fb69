"""The kernel of `specc::attend` for a single sequence of few rows: what is done once must be short.

A program of such a launch has one key block or two, so its time is not that of its keys, but of the
instructions and loads that wait for one another before and after them. Here key blocks go round the
splits (split s takes s, s + splits, …), so that a program finds its first one without knowing how
long the sequence is; nothing is divided; blocks that all rows see are loaded as pages, one table
entry a page; and the last program of a tile loads all parts at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.arrivals import is_last
from specc.kernels.cuda.attend_kernels import attend_block
from specc.kernels.cuda.attend_merge import merge_rows, store_columns
from specc.kernels.cuda.attend_rows import find_tokens
from specc.kernels.cuda.attend_softmax import (
    LOG2E,
    end_softmax,
    log_sums,
    start_softmax,
    take_scores,
)
from specc.kernels.cuda.attend_visible import either, has_bit, node_bits
from specc.kernels.cuda.attend_visits import NEVER, find_few
from specc.kernels.cuda.dependent import let_next_start, load_early, wait_alone
from specc.kernels.cuda.kv_quantized import in_words, scales_at, values_of, weigh

# full blocks of a program from which on they are loaded ahead of their use
AHEAD = tl.constexpr(3)


@triton.jit
def _table_rows(block_table, i_block, num_pages, block_size, BN: tl.constexpr, PAGE: tl.constexpr):
    """What the table has for the pages of a key block; those after its end are 0."""
    if PAGE == 0:
        # the whole block lies in one page
        i_page = i_block * BN // block_size + tl.arange(0, 1)
    else:
        i_page = i_block * (BN // PAGE) + tl.arange(0, BN // PAGE)
    return load_early(block_table + i_page, i_page < num_pages, 0)


@triton.jit
def _page_pointers(
    cache, b_row, i_block, block_size, num_blocks, D: tl.constexpr, BN: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Pointers to keys or values of a block [BN / PAGE, PAGE, D], of pages b_row [BN / PAGE].

    Args:
        cache: pointer to those of a KV head, strides of blocks and rows.
    """
    p_cache, stride_b, stride_s = cache
    o_s = tl.arange(0, PAGE if PAGE > 0 else BN)
    # what a broken table names stays inside the cache
    b_row = tl.minimum(tl.maximum(b_row, 0), num_blocks - 1).to(tl.int64)
    if PAGE == 0:
        # a block that lies in one page may begin inside it
        o_s += i_block * BN % block_size
        o_row = o_s.to(tl.int64) * stride_s
    else:
        o_row = o_s * stride_s
    p_page = p_cache + b_row * stride_b
    return p_page[:, None, None] + o_row[None, :, None] + tl.arange(0, D)[None, None, :]


@triton.jit
def _find_pages(
    cache, b_row, i_block, block_size, num_blocks, D: tl.constexpr, BN: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """As `_page_pointers`, and of quantized rows those to their ends, where scales are."""
    pages = (_page_pointers(cache, b_row, i_block, block_size, num_blocks, D, BN, PAGE),)
    if cache[0].dtype.element_ty.primitive_bitwidth == 8:
        ends = cache[0] + D, cache[1], cache[2]
        p_end = _page_pointers(ends, b_row, i_block, block_size, num_blocks, 1, BN, PAGE)
        pages += (p_end,)  # type: ignore[assignment]
    return pages


@triton.jit
def _load_pages(pages, m_key, IS_MASKED: tl.constexpr, IS_EARLY: tl.constexpr = False):
    """Rows [BN / PAGE, PAGE, D] of keys or values, and of quantized ones their scales [.., .., 1].

    Args:
        pages: as of `_find_pages`.
        m_key: [BN / PAGE, PAGE] keys that are there; not read unless masked.
        IS_EARLY: past the first-level cache.
    """
    CACHE: tl.constexpr = ".cg" if IS_EARLY else ""
    if IS_MASKED:
        rows = (tl.load(pages[0], mask=m_key[:, :, None], other=0.0),)
    else:
        rows = (tl.load(pages[0], cache_modifier=CACHE),)
    if len(pages) > 1:
        p_scale = scales_at(pages[1], 0)
        if IS_MASKED:
            rows += (tl.load(p_scale, mask=m_key[:, :, None], other=0.0),)  # type: ignore[assignment]
        else:
            rows += (tl.load(p_scale, cache_modifier=CACHE),)  # type: ignore[assignment]
    return rows


@triton.jit
def _take(
    b_acc,  # [BM, D]
    b_l,  # [BM]
    b_m,  # [BM]
    b_q,  # [BM, D]
    keys,  # as of `_load_pages`
    values,  # likewise
    m_s,  # [BM, BN]
    qk_scale,
    softcap,
    IS_MASKED: tl.constexpr,
):
    """Take a block into the running softmax."""
    BN: tl.constexpr = keys[0].shape[0] * keys[0].shape[1]
    b_k = tl.reshape(keys[0], [BN, b_q.shape[1]])
    b_v = tl.reshape(values[0], [BN, b_q.shape[1]])
    b_s = tl.dot(b_q, tl.trans(values_of(b_k, b_q.dtype)))  # [BM, BN]
    b_v_scale = None
    if len(keys) > 1:
        b_s = b_s * tl.reshape(keys[1], [BN])[None, :]
        b_v_scale = tl.reshape(values[1], [BN])
    b_p, b_shrink, b_l, b_m = take_scores(b_s, b_l, b_m, m_s, qk_scale, softcap, IS_MASKED)
    b_p, b_v = weigh(b_p, b_v, b_v_scale, b_q.dtype)
    b_acc = tl.dot(b_p, b_v, b_acc * b_shrink[:, None])
    return b_acc, b_l, b_m


@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_heads", "group", "shift", "num_words", "num_blocks", "num_pages",
        "block_size", "tokens_each", "max_splits", "stride_words",
    ]
)  # fmt: skip
def attend_few_kernel(
    q,
    k_cache,
    v_cache,
    out,
    partial,  # [tiles, HK, max_splits, BM, D]
    lse,  # [tiles, HK, BM, max_splits]
    arrived,  # [tiles, HK], zeros before and after
    q_start,
    position,
    slot,
    cache_len,
    ancestors,
    block_table,
    scale,
    num_tokens,
    num_heads,
    group,
    shift,  # a token has 1 << shift rows, of which `group` are its heads
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
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_words,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    BP: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    PAGE: tl.constexpr,
    IS_TREE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    sinks=None,  # [H], or none
    softcap=None,  # of scores, or none
):
    # until the wait below nothing is read but integers that are older than the keys
    i_kv = tl.program_id(0)
    i_split = tl.program_id(1)
    i_tile = tl.program_id(2)
    first, last, _ = find_tokens(q_start, 0, num_tokens, 1, tokens_each)
    length = tl.maximum(load_early(cache_len, True, 0), 0)
    capacity = num_pages * block_size

    end, full, num_visits, splits, first_new = find_few(
        slot, position, first, last, num_tokens, length, capacity, max_splits, 32, MIN_BLOCKS,
        BN, IS_TREE,
    )  # fmt: skip

    o_m = tl.arange(0, BM)
    o_r = i_tile * BM + o_m
    o_token = o_r >> shift
    o_t = first + o_token  # [BM]
    o_head = o_r - (o_token << shift)
    o_h = i_kv * group + o_head
    m_row = (o_t < num_tokens) & (o_head < group)
    m_own = m_row & (o_t < last)
    m_live = load_early(slot + o_t, m_own, -1) >= 0
    b_position = o_m
    if not IS_TREE:
        b_position = load_early(position + o_t, m_own, 0).to(tl.int32)
    # Where the first keys are does not depend on lengths. Committed rows that this pass does not
    # write again are older than the kernel before: blocks of them alone are read before the wait.
    ROWS: tl.constexpr = PAGE if PAGE > 0 else BN
    o_d = tl.arange(0, D)
    p_k = k_cache + i_kv.to(tl.int64) * in_words(stride_kh, k_cache)
    p_v = v_cache + i_kv.to(tl.int64) * in_words(stride_vh, v_cache)
    stride_kb, stride_ks = in_words(stride_kb, k_cache), in_words(stride_ks, k_cache)
    stride_vb, stride_vs = in_words(stride_vb, v_cache), in_words(stride_vs, v_cache)
    IS_QUANTIZED: tl.constexpr = k_cache.dtype.element_ty.primitive_bitwidth == 8
    num_old = tl.minimum(tl.minimum(length, first_new), capacity) // BN
    is_ahead = i_split + AHEAD * max_splits <= num_old
    b_row = _table_rows(block_table, i_split, num_pages, block_size, BN, PAGE)
    of_keys = p_k, stride_kb, stride_ks
    of_values = p_v, stride_vb, stride_vs
    first_keys = (tl.zeros([BN // ROWS, ROWS, D], k_cache.dtype.element_ty),)
    if IS_QUANTIZED:
        first_keys += (tl.zeros([BN // ROWS, ROWS, 1], tl.float32),)  # type: ignore[assignment]
    first_values = first_keys
    if (i_split < num_old) & (is_ahead == 0):
        pages = _find_pages(of_keys, b_row, i_split, block_size, num_blocks, D, BN, PAGE)
        first_keys = _load_pages(pages, 0, False, IS_DEPENDENT)
        pages = _find_pages(of_values, b_row, i_split, block_size, num_blocks, D, BN, PAGE)
        first_values = _load_pages(pages, 0, False, IS_DEPENDENT)
    wait_alone(IS_DEPENDENT)
    p_q = q + o_t * stride_qt + o_h * stride_qh  # [BM]
    # queries of dead tokens may be NaN, and stay in their rows
    b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_row[:, None], other=0.0)
    if i_split >= splits:
        return

    b_m, b_l = start_softmax(sinks, o_h, m_row, i_split)
    b_acc = tl.zeros([BM, D], tl.float32)
    qk_scale = scale * LOG2E
    p_words = ancestors + o_t * stride_words
    o_n = tl.arange(0, BN)

    keys = p_k, p_v, block_table, num_blocks, block_size, stride_kb, stride_ks, stride_vb, stride_vs
    i_rest = i_split
    if is_ahead:
        rows = (b_q,), p_q, p_words, m_live, b_position
        count = (tl.maximum(full - i_split, 0) + splits - 1) // splits
        for i in range(0, count):
            i_key = (i_split + i * splits) * BN
            acc, b_l, b_m = attend_block(
                (b_acc,), b_l, b_m, rows, keys, (length, NEVER, 0, num_words), i_key, capacity,
                qk_scale,
                D, D, D, D, BN, D, PAGE, IS_TREE, False, softcap,
            )  # fmt: skip
            b_acc = acc[0]
        i_rest += count * splits
        b_row = _table_rows(block_table, i_rest, num_pages, block_size, BN, PAGE)
    elif i_split < tl.minimum(full, num_old):
        b_acc, b_l, b_m = _take(
            b_acc, b_l, b_m, b_q, first_keys, first_values, 0, qk_scale, softcap, False
        )
        i_rest += splits
        b_row = _table_rows(block_table, i_rest, num_pages, block_size, BN, PAGE)
    for i in tl.range(i_rest, num_visits, splits, num_stages=1):
        key_pages = _find_pages(of_keys, b_row, i, block_size, num_blocks, D, BN, PAGE)
        value_pages = _find_pages(of_values, b_row, i, block_size, num_blocks, D, BN, PAGE)
        b_row = _table_rows(block_table, i + splits, num_pages, block_size, BN, PAGE)
        if i < full:
            rest_keys = _load_pages(key_pages, 0, False)
            rest_values = _load_pages(value_pages, 0, False)
            b_acc, b_l, b_m = _take(
                b_acc, b_l, b_m, b_q, rest_keys, rest_values, 0, qk_scale, softcap, False
            )
        else:
            # values that no row sees may be NaN, and 0 · NaN is NaN: they are never read
            o_in = tl.arange(0, BN // ROWS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
            m_key = i * BN + o_in < end  # [BN / ROWS, ROWS]
            rest_keys = _load_pages(key_pages, m_key, True)
            if IS_TREE:
                b_low, b_high = node_bits(p_words, m_live, i * BN - length, num_words)
                any_low = tl.reduce(b_low, 0, either)
                any_high = tl.reduce(b_high, 0, either)
                m_key &= (i * BN + o_in < length) | has_bit(o_in, any_low, any_high)
                m_s = (i * BN + o_n < length)[None, :]
                m_s = m_s | has_bit(o_n[None, :], b_low[:, None], b_high[:, None])
            else:
                m_s = (i * BN + o_n)[None, :] <= b_position[:, None]
            m_s &= (i * BN + o_n < end)[None, :]
            rest_values = _load_pages(value_pages, m_key, True)
            b_acc, b_l, b_m = _take(
                b_acc, b_l, b_m, b_q, rest_keys, rest_values, m_s, qk_scale, softcap, True
            )

    let_next_start(IS_DEPENDENT)
    m_any, b_total = end_softmax(b_l, m_live)
    b_out = tl.where(m_any[:, None], b_acc * (1.0 / b_total)[:, None], 0.0)
    if splits == 1:
        o_out = o_t * num_heads + o_h
        p_out = out + o_out[:, None] * D + o_d[None, :]
        tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_row[:, None])
        return

    i_tile_head = i_tile * tl.num_programs(0) + i_kv
    i_part = i_tile_head * max_splits
    b_lse = log_sums(b_m, b_total, m_any)
    tl.store(lse + i_part * BM + o_m * max_splits + i_split, b_lse, mask=m_row)
    o_part = (i_part + i_split) * BM + o_m
    tl.store(partial + o_part[:, None] * D + o_d[None, :], b_out, mask=m_row[:, None])
    if is_last(arrived + i_tile_head, splits):
        num_rows = tl.minimum(((num_tokens - first) << shift) - i_tile * BM, BM)
        for i in tl.range(0, num_rows, BR, num_stages=1):
            o_i = i + tl.arange(0, BR)
            o_i_token = (i_tile * BM + o_i) >> shift
            o_i_head = (i_tile * BM + o_i) - (o_i_token << shift)
            m_i = (first + o_i_token < num_tokens) & (o_i_head < group) & (o_i < BM)
            b_rows = merge_rows(
                partial, lse, i_tile_head, o_i, m_i, splits, max_splits, False, D, BM, BP, False
            )
            o_i_out = (first + o_i_token) * num_heads + i_kv * group + o_i_head
            store_columns(out, o_i_out, b_rows, m_i, 0, D)
