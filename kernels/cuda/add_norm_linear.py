"""`specc::add_norm_linear`: residual addition, norm and product, one launch for few rows."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from specc.kernels.cuda.add_norm_fragments import by_fragments
from specc.kernels.cuda.dependent import (
    ask_and_wait,
    launch_options,
    let_next_start,
)
from specc.kernels.cuda.few_rows import (
    BLOCK_TOTAL,
    check_product,
    in_rows,
    normed_options,
    shipped_normed,
    tile_for,
)
from specc.kernels.cuda.few_rows_loops import normed_pair, store_sum
from specc.kernels.cuda.few_rows_tiles import TILES
from specc.kernels.cuda.rms_norm import add_rms_norm
from specc.kernels.cuda.shipped import Shipped

NAME = "add_norm_linear"


def add_norm_linear(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    bias: Tensor | None,
    layout: str = "",
) -> tuple[Tensor, Tensor]:
    """See `add_norm_linear_reference`."""
    operands = x, residual, gamma, eps, unit_offset, weight
    if layout:
        return by_fragments(NAME, *operands, bias, layout)
    check_product(NAME, x, residual, gamma, weight, bias)
    tile = tile_for(NAME, x.shape[:-1].numel(), weight)
    if tile is None:
        normed, total = add_rms_norm(x, residual, gamma, eps, unit_offset)
        return functional.linear(normed, weight, bias), total
    out, total = x.new_empty(*x.shape[:-1], weight.shape[0]), x.new_empty(x.shape)
    if x.numel():
        x, size = in_rows(x), weight.shape[0]
        _add_norm_linear_kernel[(triton.cdiv(size, 2 * tile.block_n),)](
            x, in_rows(residual), gamma, weight, bias, out, total,
            x.shape[0], size, x.shape[1], float(eps), float(unit_offset),
            BT=BLOCK_TOTAL,
            **normed_options(tile, x.dtype, gamma.dtype),
            **launch_options(x.dtype, tile.starts_early),
        )  # fmt: skip
    return out, total


def shipped(capability: int) -> Iterator[Shipped]:
    """Every tile, with and without a bias."""
    rows = ("residual", "total")
    return shipped_normed(_add_norm_linear_kernel, capability, TILES, rows, {}, BT=BLOCK_TOTAL)


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm_linear_kernel(
    x,
    residual,
    gamma,
    weight,
    bias,
    out,
    total,
    num_rows,
    size,
    K,
    eps,
    offset,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FORM: tl.constexpr,
    STAGES: tl.constexpr,
    BT: tl.constexpr,
    COPIES: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    i_n = tl.program_id(0)
    o_a = i_n * 2 * BN + tl.arange(0, BN)
    o_b = o_a + BN
    last = size - 1
    o_wa, o_wb = tl.minimum(o_a, last), tl.minimum(o_b, last)
    ask_and_wait(weight, o_wa, o_wb, K, IS_DEPENDENT)
    o_r = tl.arange(0, BM)
    m_r = o_r < num_rows
    b_a, b_b = normed_pair(
        x, residual, gamma, weight, o_r, m_r, o_wa, o_wb,
        K, eps, offset, BM, BN, BK, COPIES, PRECISION, FORM, STAGES,
    )  # fmt: skip
    let_next_start(IS_DEPENDENT)
    store_pair(b_a, b_b, bias, out, o_a, o_b, num_rows, size, BM)
    store_sum(x, residual, total, o_r, m_r, num_rows, K, i_n, tl.num_programs(0), BM, BT)


@triton.jit
def store_pair(b_a, b_b, bias, out, o_a, o_b, num_rows, size, BM: tl.constexpr):
    """Columns o_a and o_b of a product [num_rows, size]."""
    if bias is not None:
        b_a += tl.load(bias + o_a, mask=o_a < size, other=0.0).to(tl.float32)[None, :]
        b_b += tl.load(bias + o_b, mask=o_b < size, other=0.0).to(tl.float32)[None, :]
    o_m = tl.arange(0, BM)[:, None]
    m_a = (o_m < num_rows) & (o_a < size)[None, :]
    m_b = (o_m < num_rows) & (o_b < size)[None, :]
    p_out = out + o_m * size
    tl.store(p_out + o_a[None, :], b_a.to(out.dtype.element_ty), mask=m_a)
    tl.store(p_out + o_b[None, :], b_b.to(out.dtype.element_ty), mask=m_b)
