"""`specc::add_norm_linear`: residual addition, norm and product, one launch for few rows.

The kernel is also that of `add_norm_gate_up` and of `add_norm_head`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from specc.kernels.cuda.act_and_mul import activate
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
    shipped_normed,
    tile_for,
)
from specc.kernels.cuda.few_rows_loops import looked_up, normed_pair, store_sum
from specc.kernels.cuda.few_rows_tiles import TILES, Tile
from specc.kernels.cuda.rms_norm import add_rms_norm
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.cuda.strided_rows import FLOATS
from specc.kernels.reference.fused import ACTIVATIONS

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
        launch(tile, x, residual, gamma, eps, unit_offset, weight, out, bias=bias, total=total)
    return out, total


def launch(
    tile: Tile,
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
    total: Tensor | None = None,
    activation: str | None = None,
) -> None:
    """Norm, product and what follows it, of `rows` of x or of all of them."""
    x, size = in_rows(x), out.shape[-1]
    numbers = (x.shape[0], None) if rows is None else (rows.shape[0], x.shape[0])
    blocks = 2 if activation is None else 1
    _add_norm_kernel[(triton.cdiv(size, blocks * tile.block_n),)](
        x, in_rows(residual), gamma, weight, bias, rows, out, total,
        *numbers, *((size, None) if rows is None else (None, size)),
        x.shape[1], float(eps), float(unit_offset),
        ACTIVATION=activation,
        BT=BLOCK_TOTAL,
        **normed_options(tile, x.dtype, gamma.dtype),
        **launch_options(x.dtype, tile.starts_early),
    )  # fmt: skip


def shipped(capability: int) -> Iterator[Shipped]:
    """Every tile, with and without a bias."""
    return shipped_linear(capability, ("residual", "total"), rows=None, num_tokens=None, vocab=None)


def shipped_linear(capability: int, given: Sequence[str], **absent: None) -> Iterator[Shipped]:
    """Configurations without an activation; see `shipped_normed`."""
    return shipped_normed(
        _add_norm_kernel, capability, TILES, given, {torch.int64: ("rows",)},
        ACTIVATION=None, BT=BLOCK_TOTAL, **absent,
    )  # fmt: skip


def shipped_gated(capability: int) -> Iterator[Shipped]:
    """Every tile and activation."""
    rows = ("x", "residual", "gamma", "weight", "out", "total")
    absent = dict.fromkeys(("bias", "rows", "num_tokens", "vocab"))
    for dtype in FLOATS:
        for tile in TILES[dtype]:
            for activation in ACTIVATIONS:
                item = Shipped.of(
                    f"{TYPE_NAMES[dtype]}-{activation}-{tile.name}",
                    _add_norm_kernel, {dtype: rows, float: ("eps", "offset")}, **absent,
                    ACTIVATION=activation, BT=BLOCK_TOTAL, **normed_options(tile, dtype, dtype),
                )  # fmt: skip
                yield from with_dependent(item, capability, dtype)


# vocabularies are odd as often as not, and columns of the result are stored one by one anyway
@triton.jit(do_not_specialize=["num_rows", "num_tokens", "vocab"])
def _add_norm_kernel(
    x,
    residual,
    gamma,
    weight,
    bias,  # [size], or none
    rows,  # [num_rows] numbers of rows of x, or none: all of them
    out,
    total,  # like x, or none
    num_rows,
    num_tokens,  # rows of x; none without `rows`
    size,  # outputs; none where they are
    vocab,
    K,
    eps,
    offset,
    ACTIVATION: tl.constexpr,  # of a gate, or none
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
    if vocab is not None:
        size = vocab
    if ACTIVATION is None:
        o_a = i_n * 2 * BN + tl.arange(0, BN)
        o_b = o_a + BN
        last = size - 1
        o_wa, o_wb = tl.minimum(o_a, last), tl.minimum(o_b, last)
    else:
        # a gate, and what it multiplies: as many rows of the weight further on
        o_a = i_n * BN + tl.arange(0, BN)
        o_wa = tl.minimum(o_a, size - 1)
        o_wb = o_wa + size
    ask_and_wait(weight, o_wa, o_wb, K, IS_DEPENDENT)
    if rows is None:
        o_r = tl.arange(0, BM)
        m_r = o_r < num_rows
    else:
        o_r, m_r = looked_up(rows, 1, num_rows, num_tokens, BM)
    if ACTIVATION is not None:
        # the same, found where it is needed first if nothing was asked for
        o_wb = o_wa + size
    b_a, b_b = normed_pair(
        x, residual, gamma, weight, o_r, m_r, o_wa, o_wb,
        K, eps, offset, BM, BN, BK, COPIES, PRECISION, FORM, STAGES,
    )  # fmt: skip
    let_next_start(IS_DEPENDENT)
    if ACTIVATION is None:
        store_pair(b_a, b_b, bias, out, o_a, o_b, num_rows, size, BM)
    else:
        b_out = activate(b_a, ACTIVATION) * b_b
        o_m = tl.arange(0, BM)[:, None]
        m_out = (o_m < num_rows) & (o_a < size)[None, :]
        tl.store(out + o_m * size + o_a[None, :], b_out.to(out.dtype.element_ty), mask=m_out)
    if total is not None:
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
