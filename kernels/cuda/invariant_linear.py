"""`specc::invariant_linear`: products of which a row has the same bits however many rows there are.

A program adds up all columns of its outputs, in their order, with the one instruction that both
tiles have: how many rows and outputs a program takes changes no sum. Tiles of 64 rows of two warps
keep to it: from 64 rows and four warps on Triton takes others, which have an order of their own
(wgmma, tcgen05).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.few_rows import check_linear, in_rows
from specc.kernels.cuda.few_rows_loops import plain_part
from specc.kernels.cuda.few_rows_tiles import Tile
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.cuda.skinny_linear import store
from specc.kernels.cuda.strided_rows import FLOATS

NAME = "invariant_linear"
# of up to 16 rows, and of more
_HALF = (Tile(32, 128, 4, 5), Tile(64, 64, 2, 3, block_m=64))
TILES = {
    torch.bfloat16: _HALF,
    torch.float16: _HALF,
    torch.float32: (Tile(32, 32, 4, 3), Tile(32, 32, 4, 3, block_m=64)),
}


def invariant_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `skinny_linear_reference`."""
    check_linear(NAME, input, weight, bias, "input")
    out = input.new_empty(*input.shape[:-1], weight.shape[0])
    if out.numel():
        _launch(in_rows(input), weight, bias, out)
    return out


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    (num_rows, width), size = x.shape, weight.shape[0]
    few, many = TILES[x.dtype]
    tile = few if num_rows <= few.block_m else many
    # blocks of rows side by side: they read one block of the weight
    grid = (triton.cdiv(num_rows, tile.block_m), triton.cdiv(size, tile.block_n))
    _invariant_linear_kernel[grid](
        x, weight, bias, out, num_rows, size, width,
        **tile.sizes, **tile.options, enable_fp_fusion=False,
    )  # fmt: skip


def shipped(capability: int) -> Iterator[Shipped]:
    """Both tiles of each dtype, with and without a bias; the same for all capabilities."""
    for dtype in FLOATS:
        types = {dtype: ("x", "weight", "bias", "out")}
        for tile in TILES[dtype]:
            for suffix, absent in (("", {"bias": None}), ("-bias", {})):
                yield Shipped.of(
                    f"{TYPE_NAMES[dtype]}-{tile.name}{suffix}",
                    _invariant_linear_kernel, types,
                    **tile.sizes, **tile.options, **absent, enable_fp_fusion=False,
                )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "size"])
def _invariant_linear_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    size,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FORM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program has BM rows and BN columns of the result."""
    i_m = tl.program_id(0)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    o_w = tl.minimum(o_n, size - 1)
    first = i_m.to(tl.int64) * BM
    num_left = num_rows - i_m * BM
    b_out = plain_part(x + first * K, weight, o_w, 0, K, num_left, K, BM, BN, BK, FORM, STAGES)
    o_m = tl.arange(0, BM)[:, None]
    m_out = (o_m < num_left) & (o_n < size)[None, :]
    store(b_out, bias, out + first * size, o_n, o_m * size + o_n[None, :], m_out, size)
