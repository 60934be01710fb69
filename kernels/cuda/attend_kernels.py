"""Kernels of `specc::attend`: one split of the keys for a tile of rows, and the merge of splits.

Source: FlashAttention-2, arXiv:2307.08691 §3; flash decoding: partial softmax over splits of the
keys, merged by their log-sum-exp.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_rows(p, o_d, D: tl.constexpr, BD: tl.constexpr):
    # a mask is spared where heads fill their tile
    if D == BD:
        return tl.load(p)
    else:
        return tl.load(p, mask=(o_d < D)[None, :], other=0.0)


@triton.jit
def _load_keys(p, o_d, m_key, D: tl.constexpr, BD: tl.constexpr, IS_MASKED: tl.constexpr):
    if IS_MASKED:
        return tl.load(p + o_d[None, :], mask=m_key[:, None] & (o_d < D)[None, :], other=0.0)
    else:
        return _load_rows(p + o_d[None, :], o_d, D, BD)


@triton.jit
def _node_bits(p_words, m_live, i_node, num_words):
    """64 bits of each row's ancestor words, from node `i_node` on, which may be negative."""
    i_word = i_node >> 6
    i_bit = (i_node & 63).to(tl.uint64)
    m_low = m_live & (i_word >= 0) & (i_word < num_words)
    m_high = m_live & (i_word >= -1) & (i_word + 1 < num_words)
    b_low = tl.load(p_words + i_word, mask=m_low, other=0).to(tl.uint64, bitcast=True)
    b_high = tl.load(p_words + i_word + 1, mask=m_high, other=0).to(tl.uint64, bitcast=True)
    # a shift by 64 is undefined: by 1, then by 63 - bit
    b_bits = (b_low >> i_bit) | ((b_high << 1) << (63 - i_bit))
    return b_bits.to(tl.uint32), (b_bits >> 32).to(tl.uint32)


@triton.jit
def _is_visible(
    b_key, b_bit, b_position, b_low, b_high, window, sink, length, IS_TREE: tl.constexpr
):
    """Which rows see which keys; one of them runs along each axis."""
    m_near = (b_key > b_position - window) | (b_key < sink)
    if IS_TREE:
        # halves of 32 bits: registers, for a tile of them
        b_half = tl.where(b_bit < 32, b_low, b_high)
        m_node = ((b_half >> (b_bit & 31).to(tl.uint32)) & 1) != 0
        # keys of the region are never cut by a window
        return tl.where(b_key < length, m_near, m_node)
    else:
        return m_near & (b_key <= b_position)


@triton.jit
def _attend_block(
    b_acc,  # [BM, BDV]
    b_l,  # [BM]
    b_m,  # [BM]
    b_q,  # [BM, BD]
    p_q,  # [BM]
    p_k,
    p_v,
    p_table,
    p_words,  # [BM]
    i_block,
    end,
    length,
    m_live,  # [BM]
    b_position,  # [BM]
    window,
    sink,
    qk_scale,
    num_words,
    num_blocks,
    block_size,
    stride_kb,
    stride_ks,
    stride_vb,
    stride_vs,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    PAGE: tl.constexpr,
    IS_TREE: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Take one block of keys into the running softmax."""
    o_n = tl.arange(0, BN)
    o_dv = tl.arange(0, BDV)
    o_key = i_block * BN + o_n  # [BN]
    m_key = o_key < end

    if PAGE == 0:
        # the whole block lies in one page
        i_page = i_block * BN // block_size
        i_row = tl.load(p_table + i_page)
        # what a broken table names stays inside the cache
        i_row = tl.minimum(tl.maximum(i_row, 0), num_blocks - 1).to(tl.int64)
        i_slot = (i_block * BN - i_page * block_size).to(tl.int64)
        p_k += i_row * stride_kb + i_slot * stride_ks
        p_v += i_row * stride_vb + i_slot * stride_vs
        o_k = o_n * stride_ks  # [BN], small: within a block of keys
        o_v = o_n * stride_vs
    else:
        b_row = tl.load(p_table + o_key // PAGE, mask=m_key, other=0)
        b_row = tl.minimum(tl.maximum(b_row, 0), num_blocks - 1).to(tl.int64)
        o_k = b_row * stride_kb + (o_key % PAGE) * stride_ks  # [BN]
        o_v = b_row * stride_vb + (o_key % PAGE) * stride_vs
    p_v += o_v[:, None] + o_dv[None, :]  # [BN, BDV]

    if IS_MASKED:
        b_low = b_position
        b_high = b_position
        if IS_TREE:
            b_low, b_high = _node_bits(p_words, m_live, i_block * BN - length, num_words)
        # values that no row sees may be NaN, and 0 · NaN is NaN: they are never read
        m_seen = m_live[None, :] & _is_visible(
            *(o_key[:, None], o_n[:, None], b_position[None, :], b_low[None, :]),
            *(b_high[None, :], window, sink, length, IS_TREE),
        )  # [BN, BM]
        m_v = m_key & (tl.max(m_seen.to(tl.int32), 1) > 0)
        b_v = tl.load(p_v, mask=m_v[:, None] & (o_dv < DV)[None, :], other=0.0)
    else:
        b_v = _load_rows(p_v, o_dv, DV, BDV)

    if BC == BD:
        b_k = _load_keys(p_k + o_k[:, None], tl.arange(0, BD), m_key, D, BD, IS_MASKED)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [BM, BN]
    else:
        # without tensor cores a thread holds whole rows of its operands: a few columns at a time
        b_s = tl.zeros([b_q.shape[0], BN], tl.float32)
        for i in tl.static_range(0, BD, BC):
            o_c = i + tl.arange(0, BC)
            m_q = m_live[:, None] & (o_c < D)[None, :]
            b_part = tl.load(p_q[:, None] + o_c[None, :], mask=m_q, other=0.0)
            b_k = _load_keys(p_k + o_k[:, None], o_c, m_key, D, BD, IS_MASKED)
            b_s = tl.dot(b_part, tl.trans(b_k), b_s, input_precision="ieee")
    b_s *= qk_scale
    if IS_MASKED:
        m_s = m_key[None, :] & _is_visible(
            *(o_key[None, :], o_n[None, :], b_position[:, None], b_low[:, None]),
            *(b_high[:, None], window, sink, length, IS_TREE),
        )
        b_s = tl.where(m_s, b_s, float("-inf"))
    b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
    b_base = b_m_new
    if IS_MASKED:
        # rows that have seen nothing yet: -inf - -inf is NaN
        b_base = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)
    b_p = tl.exp2(b_s - b_base[:, None])
    b_shrink = tl.exp2(b_m - b_base)
    b_l = b_l * b_shrink + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], input_precision="ieee")
    return b_acc, b_l, b_m_new


@triton.jit(
    do_not_specialize=[
        *("window", "sink", "num_tokens", "num_seqs", "num_heads", "group", "num_words"),
        *("num_blocks", "num_pages", "block_size", "num_splits", "stride_table", "stride_words"),
    ]
)
def attend_kernel(
    q,
    k_cache,
    v_cache,
    out,
    partial,
    lse,
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
    num_splits,
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
    PAGE: tl.constexpr,
    IS_TREE: tl.constexpr,
):
    i_tile = tl.program_id(0)
    i_kv = tl.program_id(1)
    i_split = tl.program_id(2)
    if not IS_TREE:
        # the last tokens of a chunk see the most keys: they start first
        i_tile = tl.num_programs(0) - 1 - i_tile

    # tiles of sequence b begin at number q_start[b] · group // BM + b: each sequence gets at
    # least its tiles, at most one more, and no sum over sequences is needed
    num_before = 0
    for i in range(0, num_seqs, BB):
        o_b = i + tl.arange(0, BB)
        b_start = tl.load(q_start + o_b, mask=o_b < num_seqs, other=0)  # [BB]
        m_before = (o_b < num_seqs) & (b_start * group // BM + o_b <= i_tile)
        num_before += tl.sum(m_before.to(tl.int32), 0)
    i_b = num_before - 1
    if i_b < 0:
        return
    first = tl.maximum(tl.load(q_start + i_b), 0)
    last = tl.minimum(tl.load(q_start + i_b + 1), num_tokens)
    # rows behind the last sequence are dead tokens of it
    last_row = tl.where(i_b == num_seqs - 1, num_tokens, last)
    i_row = (i_tile - first * group // BM - i_b) * BM
    if first + i_row // group >= last_row:
        return

    o_r = i_row + tl.arange(0, BM)
    o_t = first + o_r // group  # [BM]
    o_h = i_kv * group + o_r % group
    m_row = o_t < last_row
    m_live = tl.load(slot + o_t, mask=o_t < last, other=-1) >= 0
    b_position = tl.load(position + o_t, mask=m_live, other=0).to(tl.int32)
    first_position = tl.min(tl.where(m_live, b_position, 2147483647), 0)
    last_position = tl.max(tl.where(m_live, b_position, -1), 0)
    capacity = num_pages * block_size
    length = tl.maximum(tl.load(cache_len + i_b), 0)

    # keys 0 … end - 1; those from `low` to `full` every row sees
    if IS_TREE:
        last_slot = -1
        for i in range(first, last, BB):
            o_b = i + tl.arange(0, BB)
            last_slot = tl.maximum(
                last_slot, tl.max(tl.load(slot + o_b, mask=o_b < last, other=-1), 0)
            )
        end = tl.minimum(last_slot + 1, capacity)
        full = tl.minimum(length, end)
    else:
        end = tl.minimum(last_position + 1, capacity)
        full = tl.minimum(first_position + 1, end)
    end = tl.where(last_position >= 0, end, 0)
    low = tl.maximum(last_position - window + 1, 0)
    start = tl.maximum(first_position - window + 1, 0)
    if IS_TREE:
        start = tl.minimum(start, length)

    # the blocks to visit, numbered 0 … num_visits - 1: sinks, then those from `start` on
    i_start = tl.minimum(start, end) // BN
    num_sinks = tl.minimum((tl.minimum(sink, end) + BN - 1) // BN, i_start)
    skip = i_start - num_sinks
    num_visits = (end + BN - 1) // BN - skip
    live_splits = tl.minimum(tl.maximum(num_visits // MIN_BLOCKS, 1), num_splits)

    o_dv = tl.arange(0, BDV)
    o_out = o_t.to(tl.int64) * num_heads + o_h  # [BM]
    p_lse = lse + i_split * (num_tokens.to(tl.int64) * num_heads) + o_out
    if i_split >= live_splits:
        tl.store(p_lse, tl.full([BM], float("-inf"), tl.float32), mask=m_row)
        return
    i_first = num_visits * i_split // live_splits
    i_last = num_visits * (i_split + 1) // live_splits
    i_full = tl.minimum(tl.maximum((low + BN - 1) // BN - skip, i_first), i_last)
    i_rest = tl.minimum(tl.maximum(full // BN - skip, i_full), i_last)

    p_q = q + o_t.to(tl.int64) * stride_qt + o_h.to(tl.int64) * stride_qh  # [BM]
    o_d = tl.arange(0, BD)
    m_q = m_live[:, None] & (o_d < D)[None, :]
    b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_q, other=0.0)  # [BM, BD]
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, BDV], tl.float32)
    qk_scale = scale * 1.4426950408889634
    p_k = k_cache + i_kv.to(tl.int64) * stride_kh
    p_v = v_cache + i_kv.to(tl.int64) * stride_vh
    p_table = block_table + i_b.to(tl.int64) * stride_table  # type: ignore[attr-defined]
    p_words = ancestors + o_t.to(tl.int64) * stride_words

    for i in range(i_full, i_rest):
        b_acc, b_l, b_m = _attend_block(
            *(b_acc, b_l, b_m, b_q, p_q, p_k, p_v, p_table, p_words, i + skip, end, length),
            *(m_live, b_position, window, sink, qk_scale, num_words, num_blocks, block_size),
            *(stride_kb, stride_ks, stride_vb, stride_vs),
            *(D, DV, BD, BDV, BN, BC, PAGE, IS_TREE, False),
        )
    # what is left of the split lies in front of the full blocks and behind them
    for i in tl.range(i_first, i_last - (i_rest - i_full), num_stages=1):
        i_visit = tl.where(i < i_full, i, i + i_rest - i_full)
        i_block = tl.where(i_visit < num_sinks, i_visit, i_visit + skip)
        b_acc, b_l, b_m = _attend_block(
            *(b_acc, b_l, b_m, b_q, p_q, p_k, p_v, p_table, p_words, i_block, end, length),
            *(m_live, b_position, window, sink, qk_scale, num_words, num_blocks, block_size),
            *(stride_kb, stride_ks, stride_vb, stride_vs),
            *(D, DV, BD, BDV, BN, BC, PAGE, IS_TREE, True),
        )

    m_any = m_live & (b_l != 0)
    b_total = tl.where(m_any, b_l, 1.0)
    b_out = tl.where(m_any[:, None], b_acc / b_total[:, None], 0.0)
    m_out = m_row[:, None] & (o_dv < DV)[None, :]
    if num_splits == 1:
        p_out = out + o_out[:, None] * DV + o_dv[None, :]
        tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_out)
    else:
        b_lse = tl.where(m_any, b_m + tl.log2(b_total), float("-inf"))
        tl.store(p_lse, b_lse, mask=m_row)
        p_partial = partial + i_split * (num_tokens.to(tl.int64) * num_heads * DV)
        p_partial += o_out[:, None] * DV + o_dv[None, :]
        tl.store(p_partial, b_out, mask=m_out & m_any[:, None])


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def merge_splits_kernel(
    out,
    partial,
    lse,
    num_rows,
    num_splits,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    BR: tl.constexpr,
    BS: tl.constexpr,
):
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BDV)
    o_row = o_r.to(tl.int64)  # [BR]
    b_m = tl.full([BR], float("-inf"), tl.float32)
    b_l = tl.zeros([BR], tl.float32)
    b_acc = tl.zeros([BR, BDV], tl.float32)
    for i in range(0, num_splits, BS):
        o_s = i + tl.arange(0, BS)
        m_s = (o_r < num_rows)[:, None] & (o_s < num_splits)[None, :]
        o_part = o_s[None, :].to(tl.int64) * num_rows + o_row[:, None]  # [BR, BS]
        b_lse = tl.load(lse + o_part, mask=m_s, other=float("-inf"))
        # splits without keys wrote no partial result
        b_part = tl.load(
            partial + o_part[:, :, None] * DV + o_d[None, None, :],
            mask=(b_lse > float("-inf"))[:, :, None] & (o_d < DV)[None, None, :],
            other=0.0,
        )  # [BR, BS, BDV]
        b_m_new = tl.maximum(b_m, tl.max(b_lse, 1))
        b_base = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)
        b_weight = tl.exp2(b_lse - b_base[:, None])  # [BR, BS]
        b_shrink = tl.exp2(b_m - b_base)
        b_l = b_l * b_shrink + tl.sum(b_weight, 1)
        b_acc = b_acc * b_shrink[:, None] + tl.sum(b_weight[:, :, None] * b_part, 1)
        b_m = b_m_new
    b_out = b_acc / tl.where(b_l > 0, b_l, 1.0)[:, None]
    p_out = out + o_row[:, None] * DV + o_d[None, :]
    m_out = (o_r < num_rows)[:, None] & (o_d < DV)[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_out)
