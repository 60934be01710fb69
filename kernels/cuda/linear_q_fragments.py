"""`specc::linear_q` by weights in fragments (`specc.artifact.fragments`): launches.

Up to 32 rows are one launch that reads the weight as it lies; for more it is decoded, see
`linear_q`, or other programs have them, see `invariant_linear_q`. Rows are bfloat16. No GPU has run
these kernels: they are compiled for all capabilities, and emulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from specc.artifact.fragments import HALF
from specc.artifact.quantized_layout import QuantizedLayout
from specc.kernels.cuda.dependent import launch_options, with_dependent
from specc.kernels.cuda.few_rows_tiles import FRAGMENT_LAYOUTS, Tile, fragment_tiles
from specc.kernels.cuda.linear_q_fragments_kernels import linear_q_fragments_kernel
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped

# of rows of the product
DTYPE = torch.bfloat16


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, size: int, layout: QuantizedLayout, tile: Tile
) -> Tensor:
    """Rows x [M, K] by a weight of N = `size` outputs: [M, N]; operands as of `linear_q`."""
    out = x.new_empty(x.shape[0], size)
    # blocks of rows side by side: they read one block of the weight
    grid = (triton.cdiv(x.shape[0], tile.block_m), triton.cdiv(size, tile.block_n))
    linear_q_fragments_kernel[grid](
        x, weight.view(torch.int32), weight.view(torch.float32), x if bias is None else bias, out,
        x.shape[0], size, 0 if bias is None else size, layout.distance // HALF, x.shape[1],
        **_constexprs(layout, tile),
        num_warps=tile.num_warps,
        **({} if tile.registers is None else {"maxnreg": tile.registers}),
        **launch_options(x.dtype, tile.starts_early),
    )  # fmt: skip
    return out


def decoding(layout: QuantizedLayout) -> dict[str, Any]:
    """Constants that say how levels, scales and zero points lie; of scales in bytes no group."""
    group = 0 if layout.has_byte_scales else layout.group
    return {"KIND": layout.kind, "GROUP": group, "HAS_ZEROS": layout.has_zeros}


def _constexprs(layout: QuantizedLayout, tile: Tile) -> dict[str, Any]:
    return decoding(layout) | {
        "W": tile.num_warps,
        "NB": tile.block_n // 16,
        "BM": tile.block_m,
        "U": tile.block_k * layout.bits // 256,
        "RING": tile.num_stages if tile.num_stages > 2 else 0,
    }


def shipped(capability: int) -> Iterator[Shipped]:
    """Every tile of every layout that has them."""
    for name in FRAGMENT_LAYOUTS:
        layout = QuantizedLayout.named(name)
        for tile in fragment_tiles(name):
            yield from with_dependent(_product(layout, tile), capability, DTYPE)


def _product(layout: QuantizedLayout, tile: Tile) -> Shipped:
    rows = dict.fromkeys(("x", "bias", "out"), f"*{TYPE_NAMES[DTYPE]}")
    pointers = rows | {"weight": "*i32", "scales": "*fp32"}
    return Shipped(
        name=f"{layout.name}-m{tile.block_m}-n{tile.block_n}-k{tile.block_k}-s{tile.num_stages}",
        kernel=linear_q_fragments_kernel,
        signature=pointers | dict.fromkeys(("num_rows", "size", "bias_size", "pairs", "K"), "i32"),
        constexprs=_constexprs(layout, tile),
        num_warps=tile.num_warps,
        num_stages=3,
        max_registers=tile.registers,
        divisible=(*pointers, "K"),
    )
