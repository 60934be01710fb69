"""The kernel of `specc::add_norm_rope_write` for weights in fragments: one to eight rows.

A block has 16 outputs of both halves of one head, which a rotation turns into each other; products
are those of `add_norm_fragments_kernels`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from specc.kernels.cuda.add_norm_fragments_kernels import (
    block_sums,
    first_words,
    normed_rows,
)
from specc.kernels.cuda.dependent import let_next_start, wait_alone
from specc.kernels.cuda.linear_q_fragments_loop import PAIR, parts_of_block, spans_of_tile


@gluon.jit
def _cache_rows(
    q_start, slot, block_table, o_t, m_t, num_seqs, num_blocks, num_pages, block_size, stride_table
):
    """As `write_kv.cache_rows`, of few tokens: of each its block, row in it, and if it has one."""
    b_seq = o_t * 0 - 1
    for i in range(0, num_seqs):
        b_seq += (gl.load(q_start + i) <= o_t).to(gl.int32)
    m_t = m_t & (b_seq >= 0) & (o_t < gl.load(q_start + num_seqs))
    b_slot = gl.load(slot + o_t, mask=m_t, other=-1)
    m_t = m_t & (b_slot >= 0) & (b_slot < num_pages * block_size)
    b_slot = gl.where(m_t, b_slot, 0)
    p_table = block_table + (b_seq.to(gl.int64) * stride_table + b_slot // block_size)
    b_block = gl.load(p_table, mask=m_t, other=-1)
    m_t = m_t & (b_block >= 0) & (b_block < num_blocks)
    return gl.where(m_t, b_block, 0).to(gl.int64), (b_slot % block_size).to(gl.int64), m_t


@gluon.jit(
    do_not_specialize=[
        "num_rows", "num_seqs", "num_heads", "num_kv_heads", "num_blocks", "num_pages",
        "block_size", "stride_table", "bias_size",
    ]
)  # fmt: skip
def add_norm_rope_fragments_kernel(
    x,
    residual,
    gamma,
    weight,
    scales,
    bias,
    cos,
    sin,
    k_cache,
    v_cache,
    q_start,
    slot,
    block_table,
    out,
    total,
    num_rows,
    num_seqs,
    num_heads,
    num_kv_heads,
    num_blocks,
    num_pages,
    block_size,
    stride_table,
    bias_size,
    D,
    K,
    eps,
    offset,
    stride_cos,
    stride_sin,
    stride_kcb,
    stride_kcs,
    stride_kch,
    stride_vcb,
    stride_vcs,
    stride_vch,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    W: gl.constexpr,
    BM: gl.constexpr,
    BS: gl.constexpr,
    CHUNKS: gl.constexpr,
    U: gl.constexpr,
    RING: gl.constexpr,
    IS_DEPENDENT: gl.constexpr,
):
    """norm(x + residual) times a weight of heads of D: of q to out, of k and v to their caches.

    The halves of a block are D / 2 outputs apart. Other operands are those of
    `add_norm_rope_write` and of `add_norm_fragments_kernel`.
    """
    A: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    SPANS: gl.constexpr = spans_of_tile(KIND)
    zeros, head, tiles = parts_of_block(K, KIND, GROUP, HAS_ZEROS)
    i_n, block_words, half = gl.program_id(0), head + tiles * PAIR, D // 2
    per_head = half // 16
    blocks = (num_heads + 2 * num_kv_heads) * per_head
    p_words = weight + head
    held, i_ahead, first_ahead = first_words(
        p_words, i_n, blocks, block_words, tiles, W, U, RING
    )  # fmt: skip
    wait_alone(IS_DEPENDENT)

    rows, b_scale = normed_rows(
        x, residual, gamma, total, num_rows, K, eps, offset, W, BM, BS, CHUNKS, U * SPANS, A
    )
    o_row = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(0, A))), 1)
    o_col = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(0, A))), 0)
    m_out = o_col < num_rows
    turn = 0
    for i_b in range(i_n, blocks, gl.num_programs(0)):
        b_first, b_second, held, turn, i_ahead, first_ahead = block_sums(
            p_words, scales, weight + zeros, rows, held, turn, i_b, i_ahead, first_ahead,
            blocks, block_words, tiles,
            KIND, GROUP, HAS_ZEROS, W, BM, BS, U, RING, A,
        )  # fmt: skip
        i_h = i_b // per_head
        o_d = i_b % per_head * 16 + o_row
        o_n = i_h * D + o_d
        b_bias = gl.load(bias + o_n, mask=o_n < bias_size, other=0.0).to(gl.float32)
        b_first = b_first * b_scale + b_bias
        b_bias = gl.load(bias + o_n + half, mask=o_n < bias_size, other=0.0).to(gl.float32)
        b_second = b_second * b_scale + b_bias
        if i_h < num_heads + num_kv_heads:
            p_cos = cos + (o_col.to(gl.int64) * stride_cos + o_d)
            p_sin = sin + (o_col.to(gl.int64) * stride_sin + o_d)
            b_cos = gl.load(p_cos, mask=m_out, other=0.0).to(gl.float32)
            b_sin = gl.load(p_sin, mask=m_out, other=0.0).to(gl.float32)
            b_turned = b_first * b_cos - b_second * b_sin
            b_cos = gl.load(p_cos + half, mask=m_out, other=0.0).to(gl.float32)
            b_sin = gl.load(p_sin + half, mask=m_out, other=0.0).to(gl.float32)
            b_second = b_second * b_cos + b_first * b_sin
            b_first = b_turned
        # rounded to the dtype of the activations first, whatever the cache has
        b_one, b_other = b_first.to(gl.bfloat16), b_second.to(gl.bfloat16)
        if i_h < num_heads:
            p_out = out + ((o_col * num_heads + i_h) * D + o_d)
            gl.store(p_out, b_one, mask=m_out)
            gl.store(p_out + half, b_other, mask=m_out)
        else:
            b_block, b_row, m_kv = _cache_rows(
                q_start, slot, block_table, o_col, m_out, num_seqs, num_blocks, num_pages,
                block_size, stride_table,
            )  # fmt: skip
            m_kv = m_kv & (o_d < half)
            if i_h < num_heads + num_kv_heads:
                i_kv = (i_h - num_heads).to(gl.int64)
                o_kv = b_block * stride_kcb + b_row * stride_kcs + i_kv * stride_kch
                p_kv = k_cache + (o_kv + o_d)
                gl.store(p_kv, b_one.to(k_cache.dtype.element_ty), mask=m_kv)
                gl.store(p_kv + half, b_other.to(k_cache.dtype.element_ty), mask=m_kv)
            else:
                i_kv = (i_h - num_heads - num_kv_heads).to(gl.int64)
                o_kv = b_block * stride_vcb + b_row * stride_vcs + i_kv * stride_vch
                p_kv = v_cache + (o_kv + o_d)
                gl.store(p_kv, b_one.to(v_cache.dtype.element_ty), mask=m_kv)
                gl.store(p_kv + half, b_other.to(v_cache.dtype.element_ty), mask=m_kv)
    if RING != 0:
        async_copy.wait_group(0)
    let_next_start(IS_DEPENDENT)
