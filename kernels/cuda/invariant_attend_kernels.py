"""The kernel of `specc::invariant_attend`: attention whose bits follow from a row's keys alone.

A row's keys are numbered as plain decoding has them in its cache: what is committed, then the
ancestors of its token by depth, whatever slots these lie in. Key block b always holds keys
b · BN …, blocks of a split are always the same, and the splits of a row are merged in their order.
Masks are applied in every block. Blocks and splits of which a row sees nothing leave what it has as
it was, so that rows of several tokens may share a tile.

Source: FlashAttention-2, arXiv:2307.08691 §3; flash decoding (`attend_merge`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.arrivals import is_last
from specc.kernels.cuda.attend_chunks import place_of_bit
from specc.kernels.cuda.attend_rows import find_tokens, products
from specc.kernels.cuda.attend_slopes import biases, count_bits, nodes_from
from specc.kernels.cuda.attend_softmax import LOG2E, end_softmax, start_softmax, take_scores

# keys of each of the first SPLITS splits; those of the next SPLITS are twice as long, and so on
FIRST_KEYS = tl.constexpr(128)
SPLITS = tl.constexpr(16)
# splits that a program looks at: those of 2^27 keys
MOST_SPLITS = tl.constexpr(256)
# parts that are loaded at a time
MERGED = tl.constexpr(4)


@triton.jit
def split_start(i_split):
    """The first key of a split."""
    i_doubled = i_split // SPLITS
    return (((i_split % SPLITS + SPLITS) << i_doubled) - SPLITS) * FIRST_KEYS


@triton.jit
def _find_tile(q_start, i_tile, num_seqs, num_tokens, tokens_each, T, BB: tl.constexpr):
    """The sequence of a tile of T tokens, -1 of none, and the tile's number among its own."""
    i_b = -1
    i_own = 0
    total = 0
    for i in range(0, num_seqs, BB):
        o_b = i + tl.arange(0, BB)
        m_b = o_b < num_seqs
        b_first = o_b * tokens_each
        b_last = b_first + tokens_each
        if tokens_each == 0:
            b_first = tl.maximum(tl.load(q_start + o_b, mask=m_b, other=0), 0)
            b_last = tl.minimum(tl.load(q_start + o_b + 1, mask=m_b, other=0), num_tokens)
        # rows after the last sequence are dead tokens of it
        b_last = tl.where(o_b == num_seqs - 1, num_tokens, b_last)
        b_tiles = tl.where(m_b, (tl.maximum(b_last - b_first, 0) + T - 1) // T, 0)
        b_end = total + tl.cumsum(b_tiles, 0)
        m_own = (b_end - b_tiles <= i_tile) & (i_tile < b_end)
        i_b += tl.sum(tl.where(m_own, o_b + 1, 0), 0)
        i_own += tl.sum(tl.where(m_own, i_tile - (b_end - b_tiles), 0), 0)
        total += tl.sum(b_tiles, 0)
    return i_b, i_own


@triton.jit
def _slots_of_path(p_words, num_words, o_key, length, capacity):
    """[BN] slots of keys of one token; `capacity` of keys that are not on its path.

    Args:
        p_words: the token's words.
        o_key: [BN] keys as plain decoding numbers them.
    """
    b_slot = tl.where(o_key < length, o_key, capacity)
    # nodes of the path before the one that is looked for; below 0 once that is found
    b_rank = o_key - length
    for i in range(0, num_words):
        word = tl.load(p_words + i).to(tl.uint64, bitcast=True)
        count = count_bits(word.to(tl.uint32)) + count_bits((word >> 32).to(tl.uint32))
        is_here = (b_rank >= 0) & (b_rank < count)
        b_place = place_of_bit(word, tl.maximum(b_rank, 0))
        b_slot = tl.where(is_here, length + i * 64 + b_place, b_slot)
        b_rank = tl.where(b_rank >= 0, b_rank - count, b_rank)
    return tl.minimum(b_slot, capacity)


@triton.jit
def _own_place(o_key, b_own, b_position, region):
    """What of a row a key is as far from as it is in positions: nodes count back from the row."""
    return tl.where(o_key < region, b_position, b_own)


@triton.jit
def _sees(o_key, b_own, b_position, seen, CHUNK: tl.constexpr):
    """Which rows see which keys; keys run along one axis, rows along the other.

    Args:
        b_own: the row's own key; -1 of rows that see none.
        b_position: its position.
        seen: window, its sink, and the key from which on no window cuts.
    """
    window, sink, region = seen
    m_seen = (o_key > b_position - window) | (o_key < sink) | (o_key >= region)
    m_seen = m_seen & (o_key <= b_own)
    if CHUNK:
        b_from = _own_place(o_key, b_own, b_position, region)
        m_seen = m_seen & (o_key >= b_from - b_position % CHUNK)
    return m_seen


@triton.jit
def _take_block(
    b_acc,  # [BM, BDV]
    b_l,  # [BM]
    b_m,  # [BM]
    rows,  # b_q [BM, BD]; p_q, m_row, b_own, b_position [BM]
    keys,  # p_k, p_v, p_table, num_blocks, block_size, strides of blocks and rows of both
    seen,  # see `_sees`
    o_key,  # [BN]
    b_slot,  # [BN] their slots
    m_here,  # [BM] rows that have these keys
    capacity,
    qk_scale,
    softcap,
    b_slope,  # [BM], or none
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BC: tl.constexpr,
    ROUNDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Take a key block into the running softmax of the rows that see some of it."""
    b_q, p_q, m_row, b_own, b_position = rows
    p_k, p_v, p_table, num_blocks, block_size, stride_kb, stride_ks, stride_vb, stride_vs = keys
    m_key = b_slot < capacity
    i_page = b_slot // block_size
    b_block = tl.load(p_table + i_page, mask=m_key, other=0)
    # what a broken table names stays inside the cache
    b_block = tl.minimum(tl.maximum(b_block, 0), num_blocks - 1).to(tl.int64)
    b_row = b_slot - i_page * block_size
    p_k += b_block * stride_kb + b_row * stride_ks  # [BN]
    p_v += b_block * stride_vb + b_row * stride_vs

    b_end = tl.where(m_here, b_own, -1)
    # values that no row sees may be NaN, and 0 · NaN is NaN: they are never read
    m_seen = _sees(o_key[:, None], b_end[None, :], b_position[None, :], seen, CHUNK)
    m_v = m_key & (tl.max(m_seen.to(tl.int32), 1) > 0)
    o_dv = tl.arange(0, BDV)
    b_v = tl.load(p_v[:, None] + o_dv[None, :], mask=m_v[:, None] & (o_dv < DV)[None, :], other=0.0)
    b_s = products(b_q, p_q, m_row, p_k, None, m_key, D, BD, BC, True)
    b_bias = None
    if b_slope is not None:
        o_far = o_key[None, :]
        b_far = o_far - _own_place(o_far, b_own[:, None], b_position[:, None], seen[2])
        b_bias = biases(b_slope, b_far, b_position, qk_scale, ROUNDS)
    m_s = m_key[None, :] & _sees(o_key[None, :], b_end[:, None], b_position[:, None], seen, CHUNK)
    b_p, b_shrink, b_l_new, b_m_new = take_scores(
        b_s, b_l, b_m, m_s, qk_scale, softcap, True, b_bias
    )
    b_new = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], input_precision="ieee")
    # rows that see nothing of it are left as they are, whatever others read
    m_any = tl.max(m_s.to(tl.int32), 1) > 0
    b_acc = tl.where(m_any[:, None], b_new, b_acc)
    return b_acc, tl.where(m_any, b_l_new, b_l), tl.where(m_any, b_m_new, b_m)


@triton.jit
def _merge(b_acc, b_l, b_m, b_part, b_part_l, b_part_m):
    """Take a part into what the parts before it have come to."""
    b_m_new = tl.maximum(b_m, b_part_m)
    # rows without keys so far: -inf - -inf is NaN
    b_base = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)
    b_old, b_own = tl.exp2(b_m - b_base), tl.exp2(b_part_m - b_base)
    b_new = b_acc * b_old[:, None] + b_part * b_own[:, None]
    m_any = b_part_m != float("-inf")
    b_acc = tl.where(m_any[:, None], b_new, b_acc)
    return b_acc, tl.where(m_any, b_l * b_old + b_part_l * b_own, b_l), b_m_new


@triton.jit(
    do_not_specialize=[
        "window", "sink", "num_tokens", "num_seqs", "num_heads", "group", "num_words",
        "num_blocks", "num_pages", "block_size", "tokens_each", "tile_tokens", "num_splits",
        "stride_table", "stride_words",
    ]
)  # fmt: skip
def invariant_attend_kernel(
    q,
    k_cache,
    v_cache,
    out,
    partial,  # [tiles, splits, BM, DV] of parts
    sums,  # [tiles, splits, 2, BM] their sums and maxima
    arrived,  # [tiles], zeros before and after
    q_start,
    position,
    slot,
    cache_len,
    ancestors,  # [Nt, num_words]
    block_table,
    scale,
    window,
    sink,
    num_tokens,
    num_seqs,
    num_heads,
    group,
    num_words,  # 0: keys of a token are all that lie before it
    num_blocks,
    num_pages,
    block_size,
    tokens_each,
    tile_tokens,  # of a tile
    num_splits,  # of which a program has one each; 0: it has all of them
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
    sinks=None,  # [H], or none
    softcap=None,  # of scores, or none
    slopes=None,  # [H] float32, or none
    ROUNDS: tl.constexpr = False,
    CHUNK: tl.constexpr = 0,
):
    i_unit = tl.program_id(0)
    # heads of a tile: all that share a KV head, or BM of them
    tile_heads = tl.minimum(group, BM)
    num_parts = (group + BM - 1) // BM
    num_kv_heads = num_heads // group
    i_part = i_unit % num_parts
    i_kv = i_unit // num_parts % num_kv_heads
    i_b, i_tile = _find_tile(
        q_start, i_unit // num_parts // num_kv_heads, num_seqs, num_tokens, tokens_each,
        tile_tokens, BB,
    )  # fmt: skip
    if i_b < 0:
        return
    first, last, last_row = find_tokens(q_start, i_b, num_tokens, num_seqs, tokens_each)
    length = tl.maximum(tl.load(cache_len + i_b), 0)
    capacity = num_pages * block_size

    o_r = tl.arange(0, BM)
    o_token = o_r // tile_heads
    o_t = first + i_tile * tile_tokens + o_token  # [BM]
    o_own_head = i_part * BM + o_r - o_token * tile_heads
    o_h = i_kv * group + o_own_head
    m_row = (o_token < tile_tokens) & (o_t < last_row) & (o_own_head < group)
    m_token = m_row & (o_t < last)
    m_live = tl.load(slot + o_t, mask=m_token, other=-1) >= 0
    b_position = tl.load(position + o_t, mask=m_token, other=0).to(tl.int32)
    p_words = ancestors + o_t.to(tl.int64) * stride_words
    b_own = b_position
    region = capacity
    num_shared = capacity
    if num_words > 0:
        b_own = length - 1 + nodes_from(p_words, m_live, 0, num_words)
        region = length
        # blocks of which every token has the same keys
        num_shared = length // BN
    b_own = tl.where(m_live, b_own, -1)
    end = tl.minimum(tl.max(b_own, 0) + 1, capacity)
    # the least key that some row sees
    low = tl.min(tl.where(m_live, b_position, capacity), 0) - window + 1
    low = tl.where(sink > 0, 0, tl.minimum(tl.maximum(low, 0), region))
    if CHUNK:
        b_first = tl.minimum(b_own, b_position) - b_position % CHUNK
        low = tl.maximum(low, tl.min(tl.where(m_live, b_first, capacity), 0))
    o_s = tl.arange(0, MOST_SPLITS)
    used = tl.sum((split_start(o_s) < end).to(tl.int32), 0)
    # of rows that are all dead, zeros
    used = tl.maximum(used, 1)
    i_split = tl.program_id(1)
    if i_split >= used:
        return
    num_own = tl.where(num_splits > 0, 1, used)

    p_q = q + o_t.to(tl.int64) * stride_qt + o_h.to(tl.int64) * stride_qh  # [BM]
    o_d = tl.arange(0, BD)
    # queries of dead tokens may be NaN, and stay in their rows
    b_q = tl.load(
        p_q[:, None] + o_d[None, :], mask=m_row[:, None] & (o_d < D)[None, :], other=0.0
    )  # [BM, BD]
    b_slope = None
    if slopes is not None:
        b_slope = tl.load(slopes + o_h, mask=m_row, other=0.0)
    qk_scale = scale * LOG2E
    p_k = k_cache + i_kv.to(tl.int64) * stride_kh
    p_v = v_cache + i_kv.to(tl.int64) * stride_vh
    p_table = block_table + i_b.to(tl.int64) * stride_table  # type: ignore[attr-defined]
    rows = b_q, p_q, m_row, b_own, b_position
    keys = p_k, p_v, p_table, num_blocks, block_size, stride_kb, stride_ks, stride_vb, stride_vs
    seen = window, sink, region
    num_here = tl.minimum(last - first - i_tile * tile_tokens, tile_tokens)

    o_n = tl.arange(0, BN)
    # of the tile's first split; a program that has all splits stores none
    i_first_part = i_unit.to(tl.int64) * num_splits
    o_dv = tl.arange(0, BDV)
    o_part = o_r[:, None] * DV + o_dv[None, :]  # [BM, BDV]
    m_part = m_row[:, None] & (o_dv < DV)[None, :]
    b_total = tl.zeros([BM, BDV], tl.float32)
    b_total_l = tl.zeros([BM], tl.float32)
    b_total_m = tl.full([BM], float("-inf"), tl.float32)
    for i_own in range(0, num_own):
        i = i_split + i_own
        b_m, b_l = start_softmax(sinks, o_h, m_row, i)
        b_acc = tl.zeros([BM, BDV], tl.float32)
        i_last = tl.minimum(split_start(i + 1), end + BN - 1) // BN
        i_first = tl.minimum(tl.maximum(split_start(i), low) // BN, i_last)
        i_shared = tl.minimum(tl.maximum(num_shared, i_first), i_last)
        # from 0 on: of other bounds Triton 3.7 loses what strides are multiples of, and then has no
        # loads on their way beforehand
        for i_visit in range(0, i_shared - i_first):
            o_key = (i_first + i_visit) * BN + o_n
            b_slot = tl.where(o_key < end, o_key, capacity)
            b_acc, b_l, b_m = _take_block(
                b_acc, b_l, b_m, rows, keys, seen, o_key, b_slot, m_live, capacity, qk_scale,
                softcap, b_slope, D, DV, BD, BDV, BC, ROUNDS, CHUNK,
            )  # fmt: skip
        # the last blocks of each token by themselves
        num_last = i_last - i_shared
        for i_visit in tl.range(0, num_last * num_here, num_stages=1):
            i_token = i_visit // num_last
            o_key = (i_shared + i_visit - i_token * num_last) * BN + o_n
            i_t = first + i_tile * tile_tokens + i_token
            p_own = ancestors + i_t.to(tl.int64) * stride_words
            b_slot = _slots_of_path(p_own, num_words, o_key, length, capacity)
            b_acc, b_l, b_m = _take_block(
                b_acc, b_l, b_m, rows, keys, seen, o_key, b_slot, m_live & (o_token == i_token),
                capacity, qk_scale, softcap, b_slope, D, DV, BD, BDV, BC, ROUNDS, CHUNK,
            )  # fmt: skip
        if num_splits > 0:
            i_own_part = i_first_part + i
            tl.store(partial + i_own_part * BM * DV + o_part, b_acc, mask=m_part)
            tl.store(sums + i_own_part * 2 * BM + o_r, b_l)
            tl.store(sums + i_own_part * 2 * BM + BM + o_r, b_m)
        else:
            b_total, b_total_l, b_total_m = _merge(b_total, b_total_l, b_total_m, b_acc, b_l, b_m)

    has_all = num_splits == 0
    if num_splits > 0:
        has_all = is_last(arrived + i_unit, used)
        if has_all:
            for i in tl.range(0, used, MERGED, num_stages=1):
                for j in tl.static_range(MERGED):
                    m_one = (i + j < used) & (o_r < BM)
                    i_own_part = i_first_part + (i + j)
                    p_sum = sums + i_own_part * 2 * BM + o_r
                    b_l = tl.load(p_sum, mask=m_one, other=0.0)
                    b_m = tl.load(p_sum + BM, mask=m_one, other=float("-inf"))
                    p_part = partial + i_own_part * BM * DV + o_part
                    b_acc = tl.load(p_part, mask=m_one[:, None] & m_part, other=0.0)
                    b_total, b_total_l, b_total_m = _merge(
                        b_total, b_total_l, b_total_m, b_acc, b_l, b_m
                    )
    if has_all:
        m_any, b_sum = end_softmax(b_total_l, m_live)
        b_out = tl.where(m_any[:, None], b_total / b_sum[:, None], 0.0)
        p_out = out + (o_t.to(tl.int64) * num_heads + o_h)[:, None] * DV + o_dv[None, :]
        tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_part)
