"""`specc::add_norm_gate_up`: the first half of a feed-forward layer, one launch for few rows."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn import functional

from specc.kernels.cuda.act_and_mul import act_and_mul
from specc.kernels.cuda.add_norm_fragments import by_fragments
from specc.kernels.cuda.add_norm_linear import launch, shipped_gated
from specc.kernels.cuda.few_rows import check_product, tile_for
from specc.kernels.cuda.rms_norm import add_rms_norm
from specc.kernels.cuda.shipped import Shipped
from specc.kernels.cuda.strided_rows import check
from specc.kernels.reference.fused import ACTIVATIONS

NAME = "add_norm_gate_up"


def add_norm_gate_up(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    activation: str,
    layout: str = "",
) -> tuple[Tensor, Tensor]:
    """See `add_norm_gate_up_reference`."""
    check(activation in ACTIVATIONS, NAME, activation, f"one of {', '.join(ACTIVATIONS)}")
    operands = x, residual, gamma, eps, unit_offset, weight
    if layout:
        return by_fragments(NAME, *operands, None, layout, activation)
    check_product(NAME, x, residual, gamma, weight, None)
    check(
        weight.shape[0] % 2 == 0,
        NAME,
        f"weight {list(weight.shape)}",
        "[2 I, K], a gate before as many rows to multiply",
    )
    tile = tile_for(NAME, x.shape[:-1].numel(), weight)
    if tile is None:
        normed, total = add_rms_norm(x, residual, gamma, eps, unit_offset)
        return act_and_mul(functional.linear(normed, weight), activation), total
    out, total = x.new_empty(*x.shape[:-1], weight.shape[0] // 2), x.new_empty(x.shape)
    if x.numel():
        launch(tile, *operands, out, total=total, activation=activation)
    return out, total


def shipped(capability: int) -> Iterator[Shipped]:
    """Every tile and activation."""
    return shipped_gated(capability)
