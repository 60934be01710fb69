"""`specc::add_norm_head`: last residual addition, norm, and logits of the rows that are asked for.

One launch for few rows: it reads the rows of x and of the residual that the indices name, so
nothing has to choose them before. The sum is nobody's input any more and is not stored.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from specc.kernels.cuda.add_norm_linear import store_pair
from specc.kernels.cuda.dependent import (
    ask_and_wait,
    launch_options,
    let_next_start,
)
from specc.kernels.cuda.few_rows import (
    check_product,
    in_rows,
    normed_options,
    shipped_normed,
    tile_for,
)
from specc.kernels.cuda.few_rows_loops import looked_up, normed_pair
from specc.kernels.cuda.few_rows_tiles import TILES
from specc.kernels.cuda.rms_norm import add_rms_norm
from specc.kernels.cuda.shipped import Shipped
from specc.kernels.cuda.strided_rows import check

NAME = "add_norm_head"


def add_norm_head(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
) -> Tensor:
    """See `add_norm_head_reference`."""
    check_product(NAME, x, residual, gamma, weight, bias)
    is_flat = x.dim() > 1 and x.shape[:-1].numel() == x.shape[-2]
    check(is_flat, NAME, f"x {list(x.shape)}", "[1, Nt, K] or [Nt, K]")
    check(
        rows.dim() == 1 and rows.dtype == torch.int64 and rows.is_contiguous(),
        NAME,
        f"rows {rows.dtype} {list(rows.shape)}",
        "contiguous int64 [R]",
    )
    tile = tile_for(NAME, rows.shape[0], weight)
    if tile is None:
        normed, _ = add_rms_norm(x, residual, gamma, eps, unit_offset)
        return functional.linear(normed.index_select(-2, rows), weight, bias)
    size = weight.shape[0]
    out = x.new_empty(*x.shape[:-2], rows.shape[0], size)
    if out.numel():
        x, residual = in_rows(x), in_rows(residual)
        _add_norm_head_kernel[(triton.cdiv(size, 2 * tile.block_n),)](
            x, residual, gamma, weight, bias, rows, out,
            rows.shape[0], x.shape[0], size, x.shape[1], float(eps), float(unit_offset),
            **normed_options(tile, x.dtype, gamma.dtype),
            **launch_options(x.dtype, tile.starts_early),
        )  # fmt: skip
    return out


def shipped(capability: int) -> Iterator[Shipped]:
    """Every tile, with and without a bias."""
    types = {torch.int64: ("rows",)}
    return shipped_normed(_add_norm_head_kernel, capability, TILES, ("residual",), types)


# vocabularies are odd as often as not, and columns of the result are stored one by one anyway
@triton.jit(do_not_specialize=["num_rows", "num_tokens", "size"])
def _add_norm_head_kernel(
    x,
    residual,
    gamma,
    weight,
    bias,
    rows,
    out,
    num_rows,
    num_tokens,
    size,
    K,
    eps,
    offset,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FORM: tl.constexpr,
    STAGES: tl.constexpr,
    COPIES: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    o_a = tl.program_id(0) * 2 * BN + tl.arange(0, BN)
    o_b = o_a + BN
    last = size - 1
    o_wa, o_wb = tl.minimum(o_a, last), tl.minimum(o_b, last)
    ask_and_wait(weight, o_wa, o_wb, K, IS_DEPENDENT)
    o_r, m_r = looked_up(rows, 1, num_rows, num_tokens, BM)
    b_a, b_b = normed_pair(
        x, residual, gamma, weight, o_r, m_r, o_wa, o_wb,
        K, eps, offset, BM, BN, BK, COPIES, PRECISION, FORM, STAGES,
    )  # fmt: skip
    let_next_start(IS_DEPENDENT)
    store_pair(b_a, b_b, bias, out, o_a, o_b, num_rows, size, BM)
