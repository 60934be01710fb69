"""Warps of wide tiles that copy keys and values into a ring, and which of them any row sees."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from specc.kernels.cuda.attend_visible import either, has_bit, node_bits
from specc.kernels.cuda.dependent import load_early

# warps that copy
COPY_WARPS = gl.constexpr(4)


@gluon.jit
def load_pages(p_table, i_block, o_n, num_pages, block_size, BN: gl.constexpr, PAGE: gl.constexpr):
    """Pages of the keys of a block; those after the end of the table are 0."""
    # the whole block may lie in one page
    o_page = i_block * BN // block_size + o_n * 0 if PAGE == 0 else (i_block * BN + o_n) // PAGE
    return gl.load(p_table + o_page, mask=o_page < num_pages, other=0)


@gluon.jit
def copy_keys(
    copies,  # what `attend_wide_kernel` gives these warps
    D: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE: gl.constexpr,
    IS_TREE: gl.constexpr,
):
    """Copy blocks i_first … i_last - 1 into the ring; those from i_rest on not every row sees."""
    (
        k_ring, v_ring, is_full, is_free, p_k, p_v, p_table, ancestors, slot, i_first, i_rest,
        i_last, end, length, first, last, group, num_words, num_blocks, num_pages,
        block_size, stride_kb, stride_ks, stride_vb, stride_vs, stride_words,
    ) = copies  # fmt: skip
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // (D // 8), D // 8], [COPY_WARPS, 1], [1, 0]
    )
    o_n = gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))
    o_d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, LAYOUT)), 0)
    o_r = gl.arange(0, BM, gl.BlockedLayout([1], [32], [COPY_WARPS], [0]))
    o_t = first + o_r // group
    b_page = load_pages(p_table, i_first, o_n, num_pages, block_size, BN, PAGE)
    for i in range(i_first, i_last):
        # the table's entries of the next block, before they are needed
        b_next = load_pages(p_table, i + 1, o_n, num_pages, block_size, BN, PAGE)
        # what a broken table names stays inside the cache
        b_row = gl.minimum(gl.maximum(b_page, 0), num_blocks - 1).to(gl.int64)
        if PAGE == 0:
            o_s = (i * BN % block_size + o_n).to(gl.int64)
        else:
            o_s = ((i * BN + o_n) % PAGE).to(gl.int64)
        o_key = i * BN + o_n
        m_key = o_key < end
        m_value = m_key
        if IS_TREE:  # noqa: SIM102 (which of the two is there is known to the compiler)
            if i >= i_rest:
                # values that no row sees may be NaN, and 0 · NaN is NaN: they are never read
                m_own = o_t < last
                m_live = load_early(slot + o_t, m_own, -1) >= 0
                b_low, b_high = node_bits(
                    ancestors + o_t.to(gl.int64) * stride_words, m_live, i * BN - length, num_words
                )
                any_low = gl.reduce(b_low, 0, either)
                any_high = gl.reduce(b_high, 0, either)
                m_value = m_key & ((o_key < length) | has_bit(o_n, any_low, any_high))
        turn = i - i_first
        stage = turn % STAGES
        mbarrier.wait(is_free.index(stage), (turn // STAGES & 1) ^ 1)
        p_row = p_k + (b_row * stride_kb + o_s * stride_ks)
        async_copy.async_copy_global_to_shared(
            k_ring.index(stage), gl.expand_dims(p_row, 1) + o_d, mask=gl.expand_dims(m_key, 1)
        )
        p_row = p_v + (b_row * stride_vb + o_s * stride_vs)
        async_copy.async_copy_global_to_shared(
            v_ring.index(stage), gl.expand_dims(p_row, 1) + o_d, mask=gl.expand_dims(m_value, 1)
        )
        # the barrier hears of it when the copies of a thread have come
        async_copy.mbarrier_arrive(is_full.index(stage), increment_count=False)
        b_page = b_next
