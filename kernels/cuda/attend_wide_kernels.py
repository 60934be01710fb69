"""The kernel of `specc::attend` for wide tiles on Hopper: 64 or 128 packed rows of a sequence.

Keys are read as fast as the memory gives them only if a multiprocessor always has some on their
way, and its tensor cores multiply while exponentials are found. One stream of instructions with a
barrier a step does neither. Here four warps of a program copy keys and values into a ring of
shared memory, up to its size ahead, and for each 64 rows four others take them from there: they
wait for the keys that they need and for nobody else, so that one multiplies while the other finds
exponentials. Written in Gluon, as Triton does not divide such a loop among warps on this device.

Source: FlashAttention-3, arXiv:2407.08608 §3.1 (warps that copy, warps that multiply).
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from specc.kernels.cuda.attend_rows import find_tokens
from specc.kernels.cuda.attend_softmax import LOG2E, capped, end_softmax, log_sums, start_softmax
from specc.kernels.cuda.attend_visible import has_bit, node_bits
from specc.kernels.cuda.attend_visits import find_blocks
from specc.kernels.cuda.attend_wide_copies import COPY_WARPS, copy_keys
from specc.kernels.cuda.dependent import load_early

# rows of the four warps that multiply: of a product of tensor cores
ROWS = gl.constexpr(64)


@gluon.jit
def _ask_scores(
    q_tile, k_ring, is_full, turn, BN: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr
):
    """Ask for products of the rows and the keys of a turn, once these are there."""
    stage = turn % STAGES
    mbarrier.wait(is_full.index(stage), turn // STAGES & 1)
    # copies wrote through the one way to shared memory, tensor cores read through another
    fence_async_shared()
    b_s = gl.zeros([ROWS, BN], gl.float32, S)
    return warpgroup_mma(
        q_tile, k_ring.index(stage).permute((1, 0)), b_s, use_acc=False, is_async=True
    )


@gluon.jit
def _mask(
    b_s,
    i_key,
    end,
    length,
    p_words,
    m_live,
    b_position,
    num_words,
    BN: gl.constexpr,
    IS_TREE: gl.constexpr,
    S: gl.constexpr,
):
    """-inf for keys that a row does not see."""
    o_n = gl.arange(0, BN, gl.SliceLayout(0, S))
    o_key = i_key + o_n
    if IS_TREE:
        b_low, b_high = node_bits(p_words, m_live, i_key - length, num_words)
        m_s = has_bit(gl.expand_dims(o_n, 0), gl.expand_dims(b_low, 1), gl.expand_dims(b_high, 1))
        m_s = gl.expand_dims(o_key < length, 0) | m_s
    else:
        m_s = gl.expand_dims(o_key, 0) <= gl.expand_dims(b_position, 1)
    return gl.where(m_s & gl.expand_dims(o_key < end, 0), b_s, float("-inf"))


@gluon.jit
def _exponentials(b_s, b_acc, b_l, b_m, qk_scale, dtype: gl.constexpr, A: gl.constexpr):
    """Take scores into the running softmax."""
    # scaled in the subtraction, as a scale is positive: one instruction for each number
    b_m_new = gl.maximum(b_m, gl.max(b_s, 1) * qk_scale)
    # rows that have seen nothing yet: -inf - -inf is NaN
    b_base = gl.where(b_m_new == float("-inf"), 0.0, b_m_new)
    b_p = gl.exp2(b_s * qk_scale - gl.expand_dims(b_base, 1))
    b_shrink = gl.exp2(b_m - b_base)
    b_l = b_l * b_shrink + gl.sum(b_p, 1)
    b_shrink = gl.convert_layout(b_shrink, gl.SliceLayout(1, A))
    b_acc = b_acc * gl.expand_dims(b_shrink, 1)
    return gl.convert_layout(b_p.to(dtype), gl.DotOperandLayout(0, A, 2)), b_acc, b_l, b_m_new


@gluon.jit
def _attend_rows(
    q_tile,
    rows,  # what all groups of warps have
    sinks,  # [H], or none
    softcap,  # of scores, or none
    D: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    IS_TREE: gl.constexpr,
    W: gl.constexpr,
):
    """Attend with rows 64 · W … of the tile to blocks i_first … i_last - 1 (one at least)."""
    (
        q, k_ring, v_ring, is_full, is_free, partial, lse, ancestors, position, slot, i_first,
        i_rest, i_last, end, length, scale, first, last, last_row, group, num_words, i_kv,
        i_tile, i_split, max_splits, stride_qh, stride_qt, stride_words,
    ) = rows  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    o_r = W * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    o_t = first + o_r // group
    m_row = o_t < last_row
    m_own = o_t < last
    m_live = load_early(slot + o_t, m_own, -1) >= 0
    b_position = o_r
    if not IS_TREE:
        b_position = load_early(position + o_t, m_own, 0).to(gl.int32)
    p_words = ancestors + o_t.to(gl.int64) * stride_words

    o_q = W * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    o_token = o_q // group
    o_head = i_kv * group + o_q - o_token * group
    o_d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, LAYOUT)), 0)
    p_q = q + ((first + o_token).to(gl.int64) * stride_qt + o_head.to(gl.int64) * stride_qh)
    # queries of dead tokens may be NaN, and stay in their rows
    m_q = gl.expand_dims(first + o_token < last_row, 1)
    q_tile.store(gl.load(gl.expand_dims(p_q, 1) + o_d, mask=m_q, other=0.0))
    fence_async_shared()
    tl.debug_barrier()

    b_m, b_l = start_softmax(sinks, i_kv * group + o_r % group, m_row, i_split)
    b_acc = gl.zeros([ROWS, D], gl.float32, A)
    qk_scale = scale * LOG2E
    # asking for products of the next keys before these exponentials is no faster over 32k, and over
    # 128k slower, 160.6 µs for 152.7: the other group multiplies meanwhile
    for i in range(i_first, i_last):
        turn = i - i_first
        stage = turn % STAGES
        b_s = _ask_scores(q_tile, k_ring, is_full, turn, BN, STAGES, S)
        b_s = warpgroup_mma_wait(0, deps=[b_s])
        if softcap is not None:
            b_s = capped(b_s, qk_scale, softcap)
        if i >= i_rest:
            b_s = _mask(
                b_s, i * BN, end, length, p_words, m_live, b_position, num_words, BN, IS_TREE, S
            )
        own_scale = qk_scale if softcap is None else 1.0
        b_p, b_acc, b_l, b_m = _exponentials(b_s, b_acc, b_l, b_m, own_scale, v_ring.dtype, A)
        b_acc = warpgroup_mma(b_p, v_ring.index(stage), b_acc, is_async=True)
        b_acc = warpgroup_mma_wait(0, deps=[b_acc])
        # all four warps have read them
        tl.debug_barrier()
        mbarrier.arrive(is_free.index(stage), count=1)

    m_any, b_total = end_softmax(b_l, m_live)
    b_lse = log_sums(b_m, b_total, m_any)
    gl.store(lse + (i_tile * BM + o_r) * max_splits + i_split, b_lse, mask=m_row)
    b_scale = gl.convert_layout(gl.where(m_any, 1.0 / b_total, 0.0), gl.SliceLayout(1, A))
    o_m = W * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, A))
    o_dv = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, A)), 0)
    o_part = (i_tile * max_splits + i_split).to(gl.int64) * BM + o_m
    p_part = gl.expand_dims(partial + o_part * D, 1) + o_dv
    m_part = gl.expand_dims(first + o_m // group < last_row, 1)
    gl.store(p_part, b_acc * gl.expand_dims(b_scale, 1), mask=m_part)


@gluon.jit
def share(
    cache_len, num_visits, num_shares, max_splits, num_seqs, capacity, tokens_each, BN: gl.constexpr
):
    """Splits of a sequence of `num_visits` blocks: what it is worth of `num_shares` for all."""
    total = 0
    for i in range(0, num_seqs, 128):
        o_b = i + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
        b_length = load_early(cache_len + o_b, o_b < num_seqs, -1)
        b_keys = gl.minimum(gl.minimum(b_length, capacity) + tokens_each, capacity)
        total += gl.sum(gl.where(b_length >= 0, (b_keys + BN - 1) // BN, 0), 0)
    total = gl.maximum(total, 1)
    # to the nearest
    most = (2 * num_visits * num_shares + total) // (2 * total)
    return gl.minimum(gl.maximum(most, 1), max_splits)


@gluon.jit(
    do_not_specialize=[
        "num_tokens", "num_seqs", "num_heads", "group", "num_words", "num_blocks", "num_pages",
        "block_size", "tokens_each", "max_splits", "num_shares", "stride_table", "stride_words",
    ]
)  # fmt: skip
def attend_wide_kernel(
    q,
    k_cache,
    v_cache,
    partial,  # [B, HK, max_splits, BM, D]
    lse,  # [B, HK, BM, max_splits]
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
    group,
    num_words,
    num_blocks,
    num_pages,
    block_size,
    tokens_each,
    max_splits,
    num_shares,
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
    D: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    MIN_BLOCKS: gl.constexpr,
    PAGE: gl.constexpr,
    IS_TREE: gl.constexpr,
    sinks=None,  # [H], or none
    softcap=None,  # of scores, or none
):
    i_kv = gl.program_id(0)
    i_split = gl.program_id(1)
    i_b = gl.program_id(2)
    i_tile = i_b * gl.num_programs(0) + i_kv
    first, last, last_row = find_tokens(q_start, i_b, num_tokens, num_seqs, tokens_each)
    length = gl.maximum(load_early(cache_len + i_b, True, 0), 0)
    capacity = num_pages * block_size
    # a token has a row at least
    o_s = first + gl.arange(0, BM, gl.BlockedLayout([1], [32], [4], [0]))
    b_slot = load_early(slot + o_s, o_s < last, -1)
    end, full, num_visits = find_blocks(
        b_slot, b_slot >= 0, position, o_s, last, length, capacity, BN, IS_TREE
    )
    most = max_splits
    if num_shares > 0:
        most = share(
            cache_len, num_visits, num_shares, max_splits, num_seqs, capacity, tokens_each, BN
        )
    splits = gl.minimum((num_visits + MIN_BLOCKS - 1) // MIN_BLOCKS, most)
    splits = gl.maximum(splits, 1)
    # the last split has blocks that only some rows see: it is one of the shorter ones
    i_first = (num_visits * i_split + splits - 1) // splits
    i_last = (num_visits * (i_split + 1) + splits - 1) // splits
    i_last = gl.where(i_split < splits, i_last, i_first)
    i_rest = gl.minimum(gl.maximum(full, i_first), i_last)
    if i_first >= i_last:
        # no part of the result: its sum is 0
        o_m = gl.arange(0, BM, gl.BlockedLayout([1], [32], [4], [0]))
        m_row = first + o_m // group < last_row
        b_lse = gl.full([BM], float("-inf"), gl.float32, gl.BlockedLayout([1], [32], [4], [0]))
        gl.store(lse + (i_tile * BM + o_m) * max_splits + i_split, b_lse, mask=m_row)
    else:
        CONSUMERS: gl.constexpr = BM // ROWS
        dtype: gl.constexpr = q.dtype.element_ty
        SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], dtype)
        BARS: gl.constexpr = mbarrier.MBarrierLayout()
        q_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, D], SHARED)
        k_ring = gl.allocate_shared_memory(dtype, [STAGES, BN, D], SHARED)
        v_ring = gl.allocate_shared_memory(dtype, [STAGES, BN, D], SHARED)
        is_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARS)
        is_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARS)
        for s in gl.static_range(STAGES):
            mbarrier.init(is_full.index(s), count=32 * COPY_WARPS)
            mbarrier.init(is_free.index(s), count=CONSUMERS)
        tl.debug_barrier()
        p_k = k_cache + i_kv.to(gl.int64) * stride_kh
        p_v = v_cache + i_kv.to(gl.int64) * stride_vh
        p_table = block_table + i_b.to(gl.int64) * stride_table
        rows = (
            q, k_ring, v_ring, is_full, is_free, partial, lse, ancestors, position, slot, i_first,
            i_rest, i_last, end, length, scale, first, last, last_row, group, num_words, i_kv,
            i_tile, i_split, max_splits, stride_qh, stride_qt, stride_words,
        )  # fmt: skip
        copies = (
            k_ring, v_ring, is_full, is_free, p_k, p_v, p_table, ancestors, slot, i_first, i_rest,
            i_last, end, length, first, last, group, num_words, num_blocks, num_pages,
            block_size, stride_kb, stride_ks, stride_vb, stride_vs, stride_words,
        )  # fmt: skip
        if CONSUMERS == 2:
            gl.warp_specialize(
                [
                    (_attend_rows, (
                        q_tiles.index(0), rows, sinks, softcap, D, BM, BN, STAGES, IS_TREE,
                        gl.constexpr(0),
                    )),
                    (_attend_rows, (
                        q_tiles.index(1), rows, sinks, softcap, D, BM, BN, STAGES, IS_TREE,
                        gl.constexpr(1),
                    )),
                    (copy_keys, (copies, D, BM, BN, STAGES, PAGE, IS_TREE)),
                ],
                [4, COPY_WARPS],
                [208, 88],
            )  # fmt: skip
        else:
            gl.warp_specialize(
                [
                    (_attend_rows, (
                        q_tiles.index(0), rows, sinks, softcap, D, BM, BN, STAGES, IS_TREE,
                        gl.constexpr(0),
                    )),
                    (copy_keys, (copies, D, BM, BN, STAGES, PAGE, IS_TREE)),
                ],
                [COPY_WARPS],
                [88],
            )  # fmt: skip
