"""`specc::add_norm_head`: last residual addition, norm, and logits of the rows that are asked for.

One launch for few rows: it reads the rows of x and of the residual that the indices name, so
nothing has to choose them before. The sum is nobody's input any more and is not stored.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from specc.kernels.cuda.add_norm_linear import launch, shipped_linear
from specc.kernels.cuda.few_rows import check_product, tile_for
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
    out = x.new_empty(*x.shape[:-2], rows.shape[0], weight.shape[0])
    if out.numel():
        launch(tile, x, residual, gamma, eps, unit_offset, weight, out, bias=bias, rows=rows)
    return out


def shipped(capability: int) -> Iterator[Shipped]:
    """Every tile, with and without a bias."""
    return shipped_linear(capability, ("residual",), size=None, total=None)
