"""`specc::skinny_linear`: a product of few rows that nothing stands around, one launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from specc.kernels.cuda.arrivals import counters, is_last
from specc.kernels.cuda.dependent import (
    ask_part_and_wait,
    launch_options,
    let_next_start,
    with_dependent,
)
from specc.kernels.cuda.few_rows import SKINNY, check_linear, in_rows, tile_for
from specc.kernels.cuda.few_rows_loops import plain_part
from specc.kernels.cuda.few_rows_tiles import LINEAR_TILES, Tile
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.cuda.strided_rows import FLOATS


def skinny_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `skinny_linear_reference`."""
    check_linear(SKINNY, input, weight, bias, "input")
    tile = tile_for(SKINNY, input.shape[:-1].numel(), weight)
    if tile is None:
        return functional.linear(input, weight, bias)
    out = input.new_empty(*input.shape[:-1], weight.shape[0])
    if out.numel():
        _launch(in_rows(input), weight, bias, out, tile)
    return out


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: Tile) -> None:
    (num_rows, width), size = x.shape, weight.shape[0]
    blocks, splits = triton.cdiv(size, tile.block_n), tile.splits
    partial = arrived = None
    if splits > 1:
        partial = x.new_empty(splits, num_rows, size, dtype=torch.float32)
        # launches over one weight run one after another, as those over the caches of its model do
        arrived = counters(weight, blocks)
    _skinny_linear_kernel[(blocks, splits)](
        x, weight, bias, out, partial, arrived,
        num_rows, size, width, triton.cdiv(triton.cdiv(width, tile.block_k), splits),
        **tile.sizes,
        **launch_options(x.dtype, tile.starts_early),
        **tile.options,
    )  # fmt: skip


def shipped(capability: int) -> Iterator[Shipped]:
    """Every tile, with and without a bias; numbers of splits share a configuration."""
    parts = {torch.float32: ("partial",), torch.int32: ("arrived",)}
    for dtype in FLOATS:
        tiles = [tile for tile in LINEAR_TILES[dtype] if tile.fits(capability)]
        unlike = {(tile.name, tile.splits > 1): tile for tile in tiles}
        for (tile_name, is_split), tile in unlike.items():
            for has_bias in (False, True):
                absent: tuple[str, ...] = () if is_split else ("partial", "arrived")
                absent += () if has_bias else ("bias",)
                item = Shipped.of(
                    f"{TYPE_NAMES[dtype]}-{tile_name}{'-split' * is_split}{'-bias' * has_bias}",
                    _skinny_linear_kernel, {dtype: ("x", "weight", "bias", "out")}, parts,
                    **dict.fromkeys(absent), **tile.sizes, **tile.options,
                )  # fmt: skip
                yield from with_dependent(item, capability, dtype)


# routers have outputs that are no multiple of 16
@triton.jit(do_not_specialize=["num_rows", "size", "steps"])
def _skinny_linear_kernel(
    x,
    weight,
    bias,
    out,
    partial,
    arrived,
    num_rows,
    size,
    K,
    steps,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FORM: tl.constexpr,
    STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """A program has BN columns of the result, and `steps` blocks of the BK-wide ones of a sum.

    Of several programs with the same columns the last to be done adds up what all have found,
    always in their order, so that replays agree bit for bit.
    """
    i_n, i_k = tl.program_id(0), tl.program_id(1)
    o_n = i_n * BN + tl.arange(0, BN)
    o_w = tl.minimum(o_n, size - 1)
    begin = i_k * steps * BK
    ask_part_and_wait(weight, o_w, begin, K, IS_DEPENDENT)
    end = tl.minimum(begin + steps * BK, K)
    b_out = plain_part(x, weight, o_w, begin, end, num_rows, K, BM, BN, BK, FORM, STAGES)
    let_next_start(IS_DEPENDENT)
    o_m = tl.arange(0, BM)[:, None]
    o_out = o_m * size + o_n[None, :]
    m_out = (o_m < num_rows) & (o_n < size)[None, :]
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


@triton.jit
def store(b_out, bias, out, o_n, o_out, m_out, size):
    """Columns o_n of a product, and the bias."""
    if bias is not None:
        b_out += tl.load(bias + o_n, mask=o_n < size, other=0.0).to(tl.float32)[None, :]
    tl.store(out + o_out, b_out.to(out.dtype.element_ty), mask=m_out)
