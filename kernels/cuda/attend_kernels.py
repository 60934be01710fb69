"""The kernel of `specc::attend`: a split of the keys for a tile of rows; the last one merges.

It attends to keys and values of heads, or to latents (`attend_latent_kernels`).

Source: FlashAttention-2, arXiv:2307.08691 §3; flash decoding (`attend_merge`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.attend_chunks import bits_from, bounds_in_chunks, first_nodes
from specc.kernels.cuda.attend_latent_kernels import latent_products, load_queries
from specc.kernels.cuda.attend_merge import merge_arrived, store_columns
from specc.kernels.cuda.attend_rows import find_rows, find_tokens, load_rows, products
from specc.kernels.cuda.attend_slopes import biases, distances
from specc.kernels.cuda.attend_softmax import (
    LOG2E,
    end_softmax,
    log_sums,
    start_softmax,
    take_scores,
)
from specc.kernels.cuda.attend_visible import divide, is_visible, node_bits, seen_by_any
from specc.kernels.cuda.attend_visits import extend_share, find_bounds, find_end, share_blocks
from specc.kernels.cuda.attend_work import find_work
from specc.kernels.cuda.dependent import let_next_start, load_early, wait_alone
from specc.kernels.cuda.kv_quantized import in_words, load_scales, weigh


@triton.jit
def attend_block(
    acc,  # [BM, BDV], of latents in halves two
    b_l,  # [BM]
    b_m,  # [BM]
    rows,  # queries, [BM, BD] or of latents several; of each row p_q, p_words, m_live, b_position
    keys,  # p_k, p_v, p_table, num_blocks, block_size, strides of blocks and rows of both
    seen,  # length, window, sink, num_words
    i_key,
    end,
    qk_scale,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    PAGE: tl.constexpr,
    IS_TREE: tl.constexpr,
    IS_MASKED: tl.constexpr,
    softcap=None,
    b_slope=None,  # [BM], or none
    ROUNDS: tl.constexpr = False,
    CHUNK: tl.constexpr = 0,
    first_position=0,  # the least of live rows
    b_first=None,  # [BM] see `first_nodes`; of trees with chunks
):
    """Take keys i_key … i_key + BN - 1 into the running softmax."""
    queries, p_q, p_words, m_live, b_position = rows
    p_k, p_v, p_table, num_blocks, block_size, stride_kb, stride_ks, stride_vb, stride_vs = keys
    length, window, sink, num_words = seen
    IS_LATENT: tl.constexpr = len(queries) > 1
    o_n = tl.arange(0, BN)
    o_dv = tl.arange(0, BDV)
    o_key = i_key + o_n  # [BN]
    m_key = o_key < end

    i_k, i_v, o_k, o_v = find_rows(
        p_table, i_key, o_n, m_key, num_blocks, block_size,
        stride_kb, stride_ks, stride_vb, stride_vs, PAGE,
    )  # fmt: skip
    p_k += i_k
    p_v += i_v
    p_v_row = p_v + o_v
    p_v += o_v[:, None] + o_dv[None, :]  # [BN, BDV]
    IS_QUANTIZED: tl.constexpr = p_k.dtype.element_ty.primitive_bitwidth == 8
    b_k_scale = None
    b_v_scale = None
    if IS_QUANTIZED:
        b_k_scale = load_scales(p_k + o_k, m_key, D, IS_MASKED)  # [BN]

    b_low = b_position
    b_high = b_position
    m_v = m_key
    if IS_MASKED:
        if IS_TREE:
            b_low, b_high = node_bits(p_words, m_live, i_key - length, num_words)
            if CHUNK:
                b_low = bits_from(b_low, b_first - (i_key - length))
                b_high = bits_from(b_high, b_first - (i_key - length) - 32)
        # values that no row sees may be NaN, and 0 · NaN is NaN: they are never read
        if CHUNK and IS_TREE:
            m_v = m_key & seen_by_any(
                o_key, o_n, b_low, b_high, first_position, window, sink, length, CHUNK
            )
        elif IS_LATENT:
            # rows along the first axis, as below: the other way round float32 spills
            m_seen = m_live[:, None] & is_visible(
                o_key[None, :], o_n[None, :], b_position[:, None], b_low[:, None],
                b_high[:, None], window, sink, length, IS_TREE,
            )  # fmt: skip
            m_v = m_key & (tl.max(m_seen.to(tl.int32), 0) > 0)
        else:
            m_seen = m_live[None, :] & is_visible(
                o_key[:, None], o_n[:, None], b_position[None, :], b_low[None, :],
                b_high[None, :], window, sink, length, IS_TREE, CHUNK,
            )  # fmt: skip  # [BN, BM]
            m_v = m_key & (tl.max(m_seen.to(tl.int32), 1) > 0)
    if IS_LATENT:
        b_s, values = latent_products(
            queries, p_q, m_live, p_k + o_k, m_v, DV, D - DV, BDV, BD, BC, IS_MASKED
        )
    else:
        if IS_MASKED:
            b_v = tl.load(p_v, mask=m_v[:, None] & (o_dv < DV)[None, :], other=0.0)
        else:
            b_v = load_rows(p_v, o_dv, DV, BDV)
        values = (b_v,)
        if IS_QUANTIZED:
            b_v_scale = load_scales(p_v_row, m_v, DV, IS_MASKED)
        b_s = products(queries[0], p_q, m_live, p_k, o_k, m_key, D, BD, BC, IS_MASKED)
    if b_k_scale is not None:
        b_s = b_s * b_k_scale[None, :]
    b_bias = None
    if b_slope is not None:
        b_far = distances(
            p_words, m_live, b_position, o_key, o_n, b_low, b_high, i_key - length, length,
            num_words, IS_TREE and IS_MASKED,
        )  # fmt: skip
        b_bias = biases(b_slope, b_far, b_position, qk_scale, ROUNDS)
    m_s = m_key[None, :]
    if IS_MASKED:
        m_s = m_s & is_visible(
            o_key[None, :], o_n[None, :], b_position[:, None], b_low[:, None],
            b_high[:, None], window, sink, length, IS_TREE, CHUNK,
        )  # fmt: skip
    b_p, b_shrink, b_l, b_m = take_scores(b_s, b_l, b_m, m_s, qk_scale, softcap, IS_MASKED, b_bias)
    return weigh_values(acc, b_p, b_shrink, values, b_v_scale, queries[0].dtype), b_l, b_m


@triton.jit
def weigh_values(acc, b_p, b_shrink, values, b_scale, dtype: tl.constexpr):
    """Accumulators [BM, …], scaled by b_shrink [BM], and values [BN, …] by weights b_p [BM, BN].

    Scales [BN] of quantized rows are `b_scale`.
    """
    new = ()
    for j in tl.static_range(len(acc)):
        b_w, b_v = weigh(b_p, values[j], b_scale, dtype)
        new += (tl.dot(b_w, b_v, acc[j] * b_shrink[:, None], input_precision="ieee"),)  # type: ignore[assignment]
    return new


@triton.jit(
    do_not_specialize=[
        "window", "sink", "num_tokens", "num_seqs", "num_heads", "group", "num_words",
        "num_blocks", "num_pages", "block_size", "tokens_each", "num_splits", "slots", "waves",
        "num_parts", "stride_table", "stride_words",
    ]
)  # fmt: skip
def attend_kernel(
    q,
    k_cache,
    v_cache,  # none of latents, whose first DV columns are the values
    out,
    partial,  # [parts, BM, DV] of each KV head
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
    group,
    num_words,
    num_blocks,
    num_pages,
    block_size,
    tokens_each,
    num_splits,
    slots,
    waves,
    num_parts,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_table,
    stride_words,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BB: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    MERGED: tl.constexpr,
    PAGE: tl.constexpr,
    IS_TREE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    sinks=None,  # [H], or none
    softcap=None,  # of scores, or none
    slopes=None,  # [H] float32, or none
    ROUNDS: tl.constexpr = False,
    CHUNK: tl.constexpr = 0,
):
    # until the wait below nothing is read but integers that are older than the keys
    # neighbors are the KV heads of one part: what is long starts early for all of them
    num_kv_heads = num_heads // group
    num_programs = tl.num_programs(0) // num_kv_heads
    i_program = tl.program_id(0) // num_kv_heads
    i_kv = tl.program_id(0) - i_program * num_kv_heads
    if not IS_TREE:
        # the last tokens of a chunk see the most keys: they start first
        is_chunk = num_splits == 1
        i_program = tl.where(is_chunk, num_programs - 1 - i_program, i_program)
    capacity = num_pages * block_size
    reach = window + sink
    if CHUNK:
        reach = tl.minimum(reach, CHUNK)
    batch = q_start, cache_len, num_seqs, num_tokens, tokens_each, group, reach, capacity
    i_b, i_tile, i_split, splits, i_part = find_work(
        i_program, num_programs, batch, num_splits, slots, waves, MIN_BLOCKS, BM, BN, BB
    )
    is_idle = i_b < 0
    i_b = tl.maximum(i_b, 0)
    first, last, last_row = find_tokens(q_start, i_b, num_tokens, num_seqs, tokens_each)
    length = tl.maximum(load_early(cache_len + i_b, True, 0), 0)

    o_r = i_tile * BM + tl.arange(0, BM)
    o_token = divide(o_r, group)
    o_t = first + o_token  # [BM]
    o_h = i_kv * group + o_r - o_token * group
    m_row = o_t < last_row
    # what is in the cache by lengths alone: to wait for nothing else is one load less in a row
    m_live = load_early(slot + o_t, o_t < last, -1) >= 0
    b_position = load_early(position + o_t, o_t < last, 0).to(tl.int32)
    wait_alone(IS_DEPENDENT)
    if is_idle:
        return
    IS_LATENT: tl.constexpr = v_cache is None
    p_q = q + o_t.to(tl.int64) * stride_qt + o_h.to(tl.int64) * stride_qh  # [BM]
    # queries of dead tokens may be NaN, and stay in their rows
    if IS_LATENT:
        queries = load_queries(p_q, m_row, DV, D - DV, BDV, BD)
    else:
        o_d = tl.arange(0, BD)
        m_q = m_row[:, None] & (o_d < D)[None, :]
        queries = (tl.load(p_q[:, None] + o_d[None, :], mask=m_q, other=0.0),)  # [BM, BD]

    likely, low, start, full = find_bounds(
        first, last, length, capacity, window, m_live, b_position, IS_TREE
    )
    first_position = 0
    b_first = None
    if CHUNK:
        first_position = tl.min(tl.where(m_live, b_position, 2147483647), 0)
        last_position = tl.max(tl.where(m_live, b_position, 0), 0)
        low, start, is_crossed = bounds_in_chunks(
            low, start, first_position, last_position, length, CHUNK, IS_TREE
        )
        if IS_TREE:
            p_words = ancestors + o_t.to(tl.int64) * stride_words
            num_read = tl.where(is_crossed, num_words, 0)
            b_first = first_nodes(p_words, m_live, b_position, length, num_read, CHUNK)
    i_first, i_last, i_full, i_rest, num_sinks, skip = share_blocks(
        likely, low, start, full, sink, i_split, splits, BN
    )

    b_slope = None
    if slopes is not None:
        b_slope = tl.load(slopes + o_h, mask=m_row, other=0.0)
    b_m, b_l = start_softmax(sinks, o_h, m_row, i_split)
    acc = ()
    for _ in tl.static_range(0, DV, BDV):
        acc += (tl.zeros([BM, BDV], tl.float32),)  # type: ignore[assignment]
    qk_scale = scale * LOG2E
    p_k = k_cache + i_kv.to(tl.int64) * in_words(stride_kh, k_cache)
    # of latents, keys
    p_v = k_cache if IS_LATENT else v_cache
    p_v += i_kv.to(tl.int64) * in_words(stride_vh, p_v)
    stride_kb, stride_ks = in_words(stride_kb, k_cache), in_words(stride_ks, k_cache)
    stride_vb, stride_vs = in_words(stride_vb, p_v), in_words(stride_vs, p_v)
    p_table = block_table + i_b.to(tl.int64) * stride_table  # type: ignore[attr-defined]
    p_words = ancestors + o_t.to(tl.int64) * stride_words
    rows = queries, p_q, p_words, m_live, b_position
    keys = p_k, p_v, p_table, num_blocks, block_size, stride_kb, stride_ks, stride_vb, stride_vs
    seen = length, window, sink, num_words

    # of latents first what is masked, so that no masks are kept in registers beside the loop
    for i_turn in tl.static_range(2):
        if (i_turn == 0) != IS_LATENT:
            for i in range(i_full, i_rest):
                acc, b_l, b_m = attend_block(
                    acc, b_l, b_m, rows, keys, seen, (i + skip) * BN, capacity, qk_scale,
                    D, DV, BD, BDV, BN, BC, PAGE, IS_TREE, False, softcap, b_slope, ROUNDS,
                )  # fmt: skip
        else:
            end = find_end(slot, first, last, m_live, b_position, capacity, BB, IS_TREE)
            i_last = extend_share(i_last, i_rest, end, skip, i_split, splits, BN)
            # what is left of the split lies before the full blocks and after them
            for i in tl.range(i_first, i_last - (i_rest - i_full), num_stages=1):
                i_visit = tl.where(i < i_full, i, i + i_rest - i_full)
                i_block = tl.where(i_visit < num_sinks, i_visit, i_visit + skip)
                acc, b_l, b_m = attend_block(
                    acc, b_l, b_m, rows, keys, seen, i_block * BN, end, qk_scale,
                    D, DV, BD, BDV, BN, BC, PAGE, IS_TREE, True, softcap, b_slope, ROUNDS,
                    CHUNK, first_position, b_first,
                )  # fmt: skip

    let_next_start(IS_DEPENDENT)
    m_any, b_total = end_softmax(b_l, m_live)
    parts = ()
    for j in tl.static_range(len(acc)):
        parts += (tl.where(m_any[:, None], acc[j] / b_total[:, None], 0.0),)  # type: ignore[assignment]
    o_out = o_t.to(tl.int64) * num_heads + o_h  # [BM]
    o_dv = tl.arange(0, BDV)
    # before the branch: `store_columns` in it took registers from the loop, as Triton 3.7 has it
    p_out = out + o_out[:, None] * DV + o_dv[None, :]
    m_out = m_row[:, None] & (o_dv < DV)[None, :]
    if splits == 1:
        tl.store(p_out, parts[0].to(out.dtype.element_ty), mask=m_out)  # type: ignore[misc]
        for j in tl.static_range(1, len(parts)):
            store_columns(out, o_out, parts[j], m_row, j * BDV, DV)
        return

    b_lse = log_sums(b_m, b_total, m_any)
    i_part += i_kv * num_parts
    o_part = (i_part + i_split).to(tl.int64) * BM + tl.arange(0, BM)
    tl.store(lse + o_part, b_lse, mask=m_row)
    for k in tl.static_range(len(parts)):
        store_columns(partial, o_part, parts[k], m_row, k * BDV, DV)
    merge_arrived(
        partial, lse, arrived, out, o_out, i_part, i_split, splits, m_row, DV, BM, BDV, MERGED
    )
