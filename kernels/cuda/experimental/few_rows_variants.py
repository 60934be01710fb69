"""Other ways to multiply few rows than `few_rows` has; `tests.gpu.sweep_tiles` compares them.

Both blocks of a program are one here, of 2 BN rows, and squares are summed up after the last step.

- `swap`: the weight is the first operand, its transposed result the product. From 64 rows of it and
  16 of x on that is a wgmma, which reads the weight from shared memory; else the rows of x, fewer
  than those of the weight, are the columns that an instruction has 8 of.
- `lean`: rows of x are the first operand, as there.
- `vector`: one row, multiplied without tensor cores, so that the weight is not laid out for them.

Operands are bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.act_and_mul import activate
from specc.kernels.cuda.add_norm_linear import store_pair
from specc.kernels.cuda.add_norm_rope_write import COUNTS, head_columns, rotate_and_write
from specc.kernels.cuda.arrivals import is_last
from specc.kernels.cuda.dependent import ask_and_wait, ask_part_and_wait
from specc.kernels.cuda.few_rows import looked_up, store_sum
from specc.kernels.cuda.skinny_linear import store


@triton.jit
def _columns(o_k, k, K, IS_EVEN: tl.constexpr):
    """Which columns of a step there are [1, BK]; all where every step is whole."""
    if IS_EVEN:
        return (o_k >= 0)[None, :]
    else:
        return (o_k < K - k)[None, :]


@triton.jit
def _weight_block(p_w, o_k, k, K, IS_EVEN: tl.constexpr, EVICT: tl.constexpr):
    """Columns of a weight, which no other program reads."""
    if IS_EVEN:
        return tl.load(p_w + k, eviction_policy=EVICT)
    else:
        m_k = _columns(o_k, k, K, IS_EVEN)
        return tl.load(p_w + k, mask=m_k, other=0.0, eviction_policy=EVICT)


@triton.jit
def _normed_block(
    x, residual, gamma, o_r, m_r, o_k, k, K, offset, IS_EVEN: tl.constexpr, COPIES: tl.constexpr
):
    """Columns of x + residual, rounded, and the same times gamma, both [BM, BK] in float32."""
    m_k = _columns(o_k, k, K, IS_EVEN)
    o_x = o_r[:, None] * K + o_k[None, :] + k
    m_x = m_r[:, None] & m_k
    b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
    if residual is not None:
        b_x += tl.load(residual + o_x, mask=m_x, other=0.0).to(tl.float32)
    # the next layers read the rounded sum: normalize what they see
    b_x = b_x.to(x.dtype.element_ty).to(tl.float32)
    if COPIES == 1:
        b_gamma = tl.load(gamma + o_k[None, :] + k, mask=m_k, other=0.0)
    else:
        # less than 4 bytes a thread are not prefetched: every row has its own
        o_gamma = tl.zeros_like(o_r)[:, None] + o_k[None, :] + k
        b_gamma = tl.load(gamma + o_gamma, mask=m_x, other=0.0)
    return b_x, b_x * (b_gamma.to(tl.float32) + offset)


@triton.jit
def normed_rows(
    x, residual, gamma, weight, o_r, m_r, o_a, o_b, K, eps, offset,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    COPIES: tl.constexpr, MODE: tl.constexpr, IS_EVEN: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """As `normed_pair`; BM is 1 for a `vector`."""
    o_k = tl.arange(0, BK)
    o_w = tl.interleave(o_a, o_b).to(tl.int64)  # [2 BN]
    p_w = weight + o_w[:, None] * K + o_k[None, :]
    b_squares = tl.zeros([BM, BK], tl.float32)
    if MODE == "swap":
        b_t = tl.zeros([2 * BN, BM], tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            b_x, b_y = _normed_block(
                x, residual, gamma, o_r, m_r, o_k, k, K, offset, IS_EVEN, COPIES
            )
            b_squares += b_x * b_x
            b_w = _weight_block(p_w, o_k, k, K, IS_EVEN, EVICT)  # [2 BN, BK]
            b_t = tl.dot(b_w, tl.trans(b_y.to(weight.dtype.element_ty)), b_t)
        b_out = tl.trans(b_t)
    elif MODE == "lean":
        b_out = tl.zeros([BM, 2 * BN], tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            b_x, b_y = _normed_block(
                x, residual, gamma, o_r, m_r, o_k, k, K, offset, IS_EVEN, COPIES
            )
            b_squares += b_x * b_x
            b_w = _weight_block(p_w, o_k, k, K, IS_EVEN, EVICT)
            b_out = tl.dot(b_y.to(weight.dtype.element_ty), tl.trans(b_w), b_out)
    else:
        b_sums = tl.zeros([2 * BN, BK], tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            b_w = _weight_block(p_w, o_k, k, K, IS_EVEN, EVICT)
            b_x, b_y = _normed_block(
                x, residual, gamma, o_r, m_r, o_k, k, K, offset, IS_EVEN, COPIES
            )
            b_squares += b_x * b_x
            b_sums += b_w.to(tl.float32) * b_y.to(weight.dtype.element_ty).to(tl.float32)
        b_out = tl.sum(b_sums, 1)[None, :]
    b_out = b_out * tl.rsqrt(tl.sum(b_squares, 1) / K + eps)[:, None]
    return tl.split(tl.reshape(b_out, [BM, BN, 2]))


@triton.jit(do_not_specialize=["num_rows"])
def gate_up_kernel(
    x, residual, gamma, weight, out, total, num_rows, size, K, eps, offset,
    ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, COPIES: tl.constexpr, MODE: tl.constexpr, IS_EVEN: tl.constexpr,
    EVICT: tl.constexpr,
    BT: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`add_norm_gate_up`, of as many rows as BM."""
    i_n = tl.program_id(0)
    o_i = i_n * BN + tl.arange(0, BN)
    o_gate = tl.minimum(o_i, size - 1)
    ask_and_wait(weight, o_gate, o_gate + size, K, IS_DEPENDENT)
    o_r = tl.arange(0, BM)
    m_r = o_r < num_rows
    b_gate, b_up = normed_rows(
        x, residual, gamma, weight, o_r, m_r, o_gate, o_gate + size,
        K, eps, offset, BM, BN, BK, STAGES, COPIES, MODE, IS_EVEN, EVICT,
    )  # fmt: skip
    b_out = activate(b_gate, ACTIVATION) * b_up
    o_m = tl.arange(0, BM)[:, None]
    m_out = (o_m < num_rows) & (o_i < size)[None, :]
    tl.store(out + o_m * size + o_i[None, :], b_out.to(out.dtype.element_ty), mask=m_out)
    store_sum(x, residual, total, o_r, m_r, num_rows, K, i_n, tl.num_programs(0), BM, BT)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "size"])
def head_kernel(
    x, residual, gamma, weight, bias, rows, out, num_rows, num_tokens, size, K, eps, offset,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, COPIES: tl.constexpr, MODE: tl.constexpr, IS_EVEN: tl.constexpr,
    EVICT: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`add_norm_head`, of as many rows as BM."""
    o_a = tl.program_id(0) * 2 * BN + tl.arange(0, BN)
    o_b = o_a + BN
    last = size - 1
    o_wa, o_wb = tl.minimum(o_a, last), tl.minimum(o_b, last)
    ask_and_wait(weight, o_wa, o_wb, K, IS_DEPENDENT)
    o_r, m_r = looked_up(rows, 1, num_rows, num_tokens, BM)
    b_a, b_b = normed_rows(
        x, residual, gamma, weight, o_r, m_r, o_wa, o_wb,
        K, eps, offset, BM, BN, BK, STAGES, COPIES, MODE, IS_EVEN, EVICT,
    )  # fmt: skip
    store_pair(b_a, b_b, bias, out, o_a, o_b, num_rows, size, BM)


@triton.jit(do_not_specialize=COUNTS)
def rope_write_kernel(
    x, residual, gamma, weight, bias, cos, sin, k_cache, v_cache, q_start, slot, block_table,
    out, total, num_rows, num_seqs, num_heads, num_kv_heads, num_blocks, num_pages, block_size,
    stride_table, D, K, eps, offset, stride_cos, stride_sin,
    stride_kcb, stride_kcs, stride_kch, stride_vcb, stride_vcs, stride_vch,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, COPIES: tl.constexpr, MODE: tl.constexpr, IS_EVEN: tl.constexpr,
    EVICT: tl.constexpr,
    BT: tl.constexpr, BB: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`add_norm_rope_write`, of as many rows as BM."""
    i_n = tl.program_id(0)
    i_h, o_d, o_a = head_columns(i_n, D, BN)
    ask_and_wait(weight, o_a, o_a + D // 2, K, IS_DEPENDENT)
    o_r = tl.arange(0, BM)
    m_r = o_r < num_rows
    b_a, b_b = normed_rows(
        x, residual, gamma, weight, o_r, m_r, o_a, o_a + D // 2,
        K, eps, offset, BM, BN, BK, STAGES, COPIES, MODE, IS_EVEN, EVICT,
    )  # fmt: skip
    rotate_and_write(
        b_a, b_b, bias, cos, sin, k_cache, v_cache, q_start, slot, block_table, out,
        i_h, o_d, o_a, num_rows, num_seqs, num_heads, num_kv_heads, num_blocks, num_pages,
        block_size, stride_table, D, stride_cos, stride_sin,
        stride_kcb, stride_kcs, stride_kch, stride_vcb, stride_vcs, stride_vch, BM, BB,
    )  # fmt: skip
    store_sum(x, residual, total, o_r, m_r, num_rows, K, i_n, tl.num_programs(0), BM, BT)


@triton.jit(do_not_specialize=["num_rows", "size", "steps"])
def linear_kernel(
    x, weight, bias, out, partial, arrived, num_rows, size, K, steps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, MODE: tl.constexpr, IS_EVEN: tl.constexpr, EVICT: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`skinny_linear`, of as many rows as BM; its blocks have BN rows of the weight."""
    i_n, i_k = tl.program_id(0), tl.program_id(1)
    o_n = i_n * BN + tl.arange(0, BN)
    o_w = tl.minimum(o_n, size - 1)
    begin = i_k * steps * BK
    end = tl.minimum(begin + steps * BK, K)
    ask_part_and_wait(weight, o_w, begin, K, IS_DEPENDENT)
    o_m, o_k = tl.arange(0, BM)[:, None], tl.arange(0, BK)
    p_x = x + o_m * K + o_k[None, :]
    p_w = weight + o_w.to(tl.int64)[:, None] * K + o_k[None, :]
    m_m = o_m < num_rows
    if MODE == "swap":
        b_t = tl.zeros([BN, BM], tl.float32)
        for k in tl.range(begin, end, BK, num_stages=STAGES):
            b_x = tl.load(p_x + k, mask=m_m & _columns(o_k, k, K, IS_EVEN), other=0.0)
            b_w = _weight_block(p_w, o_k, k, K, IS_EVEN, EVICT)
            b_t = tl.dot(b_w, tl.trans(b_x), b_t)
        b_out = tl.trans(b_t)
    else:
        b_sums = tl.zeros([BN, BK], tl.float32)
        for k in tl.range(begin, end, BK, num_stages=STAGES):
            b_w = _weight_block(p_w, o_k, k, K, IS_EVEN, EVICT)
            b_x = tl.load(p_x + k, mask=m_m & _columns(o_k, k, K, IS_EVEN), other=0.0)
            b_sums += b_w.to(tl.float32) * b_x.to(tl.float32)
        b_out = tl.sum(b_sums, 1)[None, :]
    o_out = o_m * size + o_n[None, :]
    m_out = m_m & (o_n < size)[None, :]
    if partial is None:
        store(b_out, bias, out, o_n, o_out, m_out, size)
    else:
        part = num_rows * size
        tl.store(partial + i_k * part + o_out, b_out, mask=m_out)
        splits = tl.num_programs(1)
        if is_last(arrived + i_n, splits):
            b_out = tl.zeros([BM, BN], tl.float32)
            for i in range(splits):
                b_out += tl.load(partial + i * part + o_out, mask=m_out, other=0.0)
            store(b_out, bias, out, o_n, o_out, m_out, size)
