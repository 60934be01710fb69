"""Loops of the products of few rows, in each form that a tile may have (`few_rows_tiles`).

Why there are several, as measured on an H200: `dot` gives the tensor cores 16 rows however few
there are, in two products a step, and adds squares up in each. With `joined` both blocks are one
operand of 2 BN rows, and squares are added up after the last step. `swap` puts the weight first:
from 64 rows of it and 16 of x on that is a wgmma, which reads the weight from shared memory; else
the rows of x, fewer than those of the weight, are the columns that an instruction has 8 of.
`vector` needs no tensor core: a weight that is read once and multiplied by one row gains nothing
from being laid out for one.

A row is the same, bit for bit, whatever other rows a launch with the same tile has.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normed_pair(
    x, residual, gamma, weight, o_r, m_r, o_a, o_b, K, eps, offset,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COPIES: tl.constexpr,
    PRECISION: tl.constexpr, FORM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """norm(x + residual) times rows o_a and o_b of the weight: two [BM, BN] in float32.

    o_r [BM] are rows of x and of residual, where m_r; others are zeros. residual may be None.
    o_a and o_b [BN] are inside the weight.
    """
    if FORM == "dot":
        return _apart(
            x, residual, gamma, weight, o_r, m_r, o_a, o_b, K, eps, offset,
            BM, BN, BK, COPIES, PRECISION,
        )  # fmt: skip
    else:
        return _as_one(
            x, residual, gamma, weight, o_r, m_r, o_a, o_b, K, eps, offset,
            BM, BN, BK, COPIES, FORM, STAGES,
        )  # fmt: skip


@triton.jit
def _apart(
    x, residual, gamma, weight, o_r, m_r, o_a, o_b, K, eps, offset,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COPIES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`normed_pair` in the form `dot`."""
    o_k = tl.arange(0, BK)
    m_m = m_r[:, None]
    p_x = x + o_r[:, None] * K + o_k[None, :]
    if residual is not None:
        p_residual = residual + o_r[:, None] * K + o_k[None, :]
    p_a = weight + o_a.to(tl.int64)[:, None] * K + o_k[None, :]
    p_b = weight + o_b.to(tl.int64)[:, None] * K + o_k[None, :]
    p_gamma = gamma + tl.zeros([COPIES, 1], tl.int32) + o_k[None, :]  # [COPIES, BK]
    b_a = tl.zeros([BM, BN], tl.float32)
    b_b = tl.zeros([BM, BN], tl.float32)
    b_squares = tl.zeros([BM], tl.float32)
    for k in range(0, K, BK):
        m_k = o_k[None, :] < K - k  # [1, BK]
        b_x = tl.load(p_x + k, mask=m_m & m_k, other=0.0).to(tl.float32)
        if residual is not None:
            b_x += tl.load(p_residual + k, mask=m_m & m_k, other=0.0).to(tl.float32)
        # the next layers read the rounded sum: normalize what they see
        b_x = b_x.to(x.dtype.element_ty).to(tl.float32)  # [BM, BK]
        b_squares += tl.sum(b_x * b_x, 1)
        b_gamma = tl.max(tl.load(p_gamma + k, mask=m_k, other=0.0).to(tl.float32), 0) + offset
        b_x = b_x * b_gamma[None, :]
        b_wa = tl.load(p_a + k, mask=m_k, other=0.0)  # [BN, BK]
        b_wb = tl.load(p_b + k, mask=m_k, other=0.0)
        if PRECISION == "half":
            b_y = b_x.to(weight.dtype.element_ty)
            b_a = tl.dot(b_y, tl.trans(b_wa), b_a)
            b_b = tl.dot(b_y, tl.trans(b_wb), b_b)
        else:
            if PRECISION == "tf32":
                b_x = _rounded_to_tf32(b_x)
            b_wa = tl.trans(b_wa.to(tl.float32))
            b_wb = tl.trans(b_wb.to(tl.float32))
            b_a = tl.dot(b_x, b_wa, b_a, input_precision=PRECISION)
            b_b = tl.dot(b_x, b_wb, b_b, input_precision=PRECISION)
    b_scale = tl.rsqrt(b_squares / K + eps)[:, None]
    return b_a * b_scale, b_b * b_scale


@triton.jit
def _rounded_to_tf32(b_x):
    """The nearest numbers with ten bits after the first."""
    b_bits = (b_x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    # of a NaN no bits may be left, or those of a number
    return tl.where(b_x == b_x, b_bits.to(tl.float32, bitcast=True), b_x)


@triton.jit
def _as_one(
    x, residual, gamma, weight, o_r, m_r, o_a, o_b, K, eps, offset,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COPIES: tl.constexpr,
    FORM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`normed_pair` in the other forms: both blocks are one; K is a multiple of BK."""
    o_k = tl.arange(0, BK)
    o_w = tl.interleave(o_a, o_b).to(tl.int64)  # [2 BN]
    p_w = weight + o_w[:, None] * K + o_k[None, :]
    b_squares = tl.zeros([BM, BK], tl.float32)
    if FORM == "swap":
        b_t = tl.zeros([2 * BN, BM], tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            b_x, b_y = _normed_block(x, residual, gamma, o_r, m_r, o_k, k, K, offset, COPIES)
            b_squares += b_x * b_x
            b_w = tl.load(p_w + k)  # [2 BN, BK]
            b_t = tl.dot(b_w, tl.trans(b_y.to(weight.dtype.element_ty)), b_t)
        b_out = tl.trans(b_t)
    elif FORM == "joined":
        b_out = tl.zeros([BM, 2 * BN], tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            b_x, b_y = _normed_block(x, residual, gamma, o_r, m_r, o_k, k, K, offset, COPIES)
            b_squares += b_x * b_x
            b_w = tl.load(p_w + k)
            b_out = tl.dot(b_y.to(weight.dtype.element_ty), tl.trans(b_w), b_out)
    else:
        b_sums = tl.zeros([2 * BN, BK], tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            b_x, b_y = _normed_block(x, residual, gamma, o_r, m_r, o_k, k, K, offset, COPIES)
            b_squares += b_x * b_x
            # after x: the other way round ptxas of Triton 3.7.1 crashes for 8.0, 10.0 and 12.0
            b_w = tl.load(p_w + k)
            # rounded as tensor cores have it
            b_sums += b_w.to(tl.float32) * b_y.to(weight.dtype.element_ty).to(tl.float32)
        b_out = tl.sum(b_sums, 1)[None, :]
    b_out = b_out * tl.rsqrt(tl.sum(b_squares, 1) / K + eps)[:, None]
    return tl.split(tl.reshape(b_out, [BM, BN, 2]))


@triton.jit
def _normed_block(x, residual, gamma, o_r, m_r, o_k, k, K, offset, COPIES: tl.constexpr):
    """Columns of x + residual, rounded, and the same times gamma, both [BM, BK] in float32."""
    m_m = m_r[:, None]
    o_x = o_r[:, None] * K + o_k[None, :] + k
    b_x = tl.load(x + o_x, mask=m_m, other=0.0).to(tl.float32)
    if residual is not None:
        b_x += tl.load(residual + o_x, mask=m_m, other=0.0).to(tl.float32)
    # the next layers read the rounded sum: normalize what they see
    b_x = b_x.to(x.dtype.element_ty).to(tl.float32)
    if COPIES == 1:
        b_gamma = tl.load(gamma + o_k[None, :] + k)
    else:
        # less than 4 bytes a thread are not prefetched: every row has its own
        o_gamma = tl.zeros_like(o_r)[:, None] + o_k[None, :] + k
        b_gamma = tl.load(gamma + o_gamma, mask=m_m, other=0.0)
    return b_x, b_x * (b_gamma.to(tl.float32) + offset)


@triton.jit
def plain_part(
    x, weight, o_w, begin, end, num_rows, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FORM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Columns from begin to end of the rows of x times rows o_w of the weight: [BM, BN], float32.

    o_w [BN] are inside the weight. In all forms but `dot` begin, end and K are multiples of BK.
    """
    o_m, o_k = tl.arange(0, BM)[:, None], tl.arange(0, BK)[None, :]
    m_m = o_m < num_rows
    p_x = x + o_m * K + o_k
    p_w = weight + o_w.to(tl.int64)[:, None] * K + o_k
    if FORM == "dot":
        b_out = tl.zeros([BM, BN], tl.float32)
        for k in range(begin, end, BK):
            m_k = o_k < K - k
            b_x = tl.load(p_x + k, mask=m_m & m_k, other=0.0)
            b_w = tl.load(p_w + k, mask=m_k, other=0.0)  # [BN, BK]
            b_out = tl.dot(b_x, tl.trans(b_w), b_out, input_precision="ieee")
    elif FORM == "swap":
        b_t = tl.zeros([BN, BM], tl.float32)
        for k in tl.range(begin, end, BK, num_stages=STAGES):
            b_x = tl.load(p_x + k, mask=m_m, other=0.0)
            b_t = tl.dot(tl.load(p_w + k), tl.trans(b_x), b_t)
        b_out = tl.trans(b_t)
    else:
        b_sums = tl.zeros([BN, BK], tl.float32)
        for k in tl.range(begin, end, BK, num_stages=STAGES):
            b_w = tl.load(p_w + k)
            b_x = tl.load(p_x + k, mask=m_m, other=0.0)
            b_sums += b_w.to(tl.float32) * b_x.to(tl.float32)
        b_out = tl.sum(b_sums, 1)[None, :]
    return b_out


@triton.jit
def store_sum(
    x, residual, total, o_r, m_r, num_rows, K, i_n, num_programs,
    BM: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Columns of rows o_r of x + residual, each of one program; zeros where not m_r."""
    o_m = tl.arange(0, BM)[:, None]
    o_r = o_r[:, None]
    for i in range(i_n * BT, K, num_programs * BT):
        o_k = i + tl.arange(0, BT)[None, :]
        m_k = m_r[:, None] & (o_k < K)
        b_x = tl.load(x + o_r * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        if residual is not None:
            b_x += tl.load(residual + o_r * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        m_out = (o_m < num_rows) & (o_k < K)
        tl.store(total + o_m * K + o_k, b_x.to(total.dtype.element_ty), mask=m_out)


@triton.jit
def looked_up(indices, stride, num_rows, num_entries, BM: tl.constexpr):
    """Rows of a table [BM] that the first `num_rows` indices name, and which of them exist."""
    o_m = tl.arange(0, BM)
    b_row = tl.load(indices + o_m * stride, mask=o_m < num_rows, other=-1)
    m_r = (b_row >= 0) & (b_row < num_entries)
    return tl.where(m_r, b_row, 0), m_r
