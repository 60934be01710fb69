"""`specc::add_norm_gate_up`: the first half of a feed-forward layer, one launch for few rows."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from specc.kernels.cuda.act_and_mul import act_and_mul, activate
from specc.kernels.cuda.add_norm_fragments import by_fragments
from specc.kernels.cuda.dependent import (
    ask_and_wait,
    launch_options,
    let_next_start,
    with_dependent,
)
from specc.kernels.cuda.few_rows import (
    BLOCK_TOTAL,
    check_product,
    in_rows,
    normed_options,
    tile_for,
)
from specc.kernels.cuda.few_rows_loops import normed_pair, store_sum
from specc.kernels.cuda.few_rows_tiles import TILES
from specc.kernels.cuda.rms_norm import add_rms_norm
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.cuda.strided_rows import FLOATS, check
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
        x, size = in_rows(x), weight.shape[0] // 2
        _add_norm_gate_up_kernel[(triton.cdiv(size, tile.block_n),)](
            x, in_rows(residual), gamma, weight, out, total,
            x.shape[0], size, x.shape[1], float(eps), float(unit_offset),
            ACTIVATION=activation,
            BT=BLOCK_TOTAL,
            **normed_options(tile, x.dtype, gamma.dtype),
            **launch_options(x.dtype, tile.starts_early),
        )  # fmt: skip
    return out, total


def shipped(capability: int) -> Iterator[Shipped]:
    """Every tile and activation."""
    rows = ("x", "residual", "gamma", "weight", "out", "total")
    for dtype in FLOATS:
        for tile in TILES[dtype]:
            for activation in ACTIVATIONS:
                item = Shipped.of(
                    f"{TYPE_NAMES[dtype]}-{activation}-{tile.name}",
                    _add_norm_gate_up_kernel, {dtype: rows, float: ("eps", "offset")},
                    ACTIVATION=activation, BT=BLOCK_TOTAL, **normed_options(tile, dtype, dtype),
                )  # fmt: skip
                yield from with_dependent(item, capability, dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm_gate_up_kernel(
    x,
    residual,
    gamma,
    weight,
    out,
    total,
    num_rows,
    size,
    K,
    eps,
    offset,
    ACTIVATION: tl.constexpr,
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
    o_i = i_n * BN + tl.arange(0, BN)
    o_gate = tl.minimum(o_i, size - 1)
    ask_and_wait(weight, o_gate, o_gate + size, K, IS_DEPENDENT)
    o_r = tl.arange(0, BM)
    m_r = o_r < num_rows
    b_gate, b_up = normed_pair(
        x, residual, gamma, weight, o_r, m_r, o_gate, o_gate + size,
        K, eps, offset, BM, BN, BK, COPIES, PRECISION, FORM, STAGES,
    )  # fmt: skip
    let_next_start(IS_DEPENDENT)
    b_out = activate(b_gate, ACTIVATION) * b_up
    o_m = tl.arange(0, BM)[:, None]
    m_out = (o_m < num_rows) & (o_i < size)[None, :]
    tl.store(out + o_m * size + o_i[None, :], b_out.to(out.dtype.element_ty), mask=m_out)
    store_sum(x, residual, total, o_r, m_r, num_rows, K, i_n, tl.num_programs(0), BM, BT)
