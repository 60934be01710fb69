"""`specc::linear_q` by weights in fragments (`specc.artifact.fragments`): launches.

Up to 32 rows are one launch that reads the weight as it lies; for more it is decoded, see
`linear_q`. Rows are bfloat16. No GPU has run these kernels: they are compiled for all capabilities,
and emulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from specc.artifact.fragments import HALF
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.weight_layout import BLOCK
from specc.kernels.cuda.dependent import launch_options, with_dependent
from specc.kernels.cuda.few_rows_tiles import FRAGMENT_LAYOUTS, Tile, fragment_tiles
from specc.kernels.cuda.linear_q_fragments_kernels import (
    linear_q_fragments_decode_kernel,
    linear_q_fragments_kernel,
)
from specc.kernels.cuda.linear_q_parts import group_of
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped

# of rows of the product
DTYPE = torch.bfloat16
# columns that a program decodes
_DECODED = 32


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, size: int, layout: QuantizedLayout, tile: Tile
) -> Tensor:
    """Rows x [M, K] by a weight of N = `size` outputs: [M, N]; operands as of `linear_q`."""
    out = x.new_empty(x.shape[0], size)
    linear_q_fragments_kernel[(triton.cdiv(size, tile.block_n),)](
        x, weight.view(torch.int32), scales_of(weight, layout), x if bias is None else bias, out,
        x.shape[0], size, 0 if bias is None else size, layout.distance // HALF, x.shape[1],
        **_constexprs(layout, tile),
        num_warps=tile.num_warps,
        **launch_options(x.dtype, tile.starts_early),
    )  # fmt: skip
    return out


def decoded(weight: Tensor, like: Tensor, first: int, size: int, layout: QuantizedLayout) -> Tensor:
    """As `linear_q.decoded`; of outputs that lie apart first halves come before second ones."""
    columns, blocks = like.shape[1], triton.cdiv(size, BLOCK)
    out = like.new_empty(size, columns)
    linear_q_fragments_decode_kernel[(blocks, columns // _DECODED)](
        weight.view(torch.int16), scales_of(weight, layout), weight.view(torch.bfloat16), out,
        first, size, layout.group or columns, min(layout.distance // HALF, blocks), columns,
        **decoding(layout),
        num_warps=4,
    )  # fmt: skip
    return out


def scales_of(weight: Tensor, layout: QuantizedLayout) -> Tensor:
    """A weight as its scales are read."""
    return weight if layout.kind == "mxfp4" else weight.view(torch.float32)


def decoding(layout: QuantizedLayout) -> dict[str, Any]:
    """Constants that say how levels and zero points lie."""
    return {"KIND": layout.kind, "HAS_ZEROS": layout.has_zeros}


def _constexprs(layout: QuantizedLayout, tile: Tile) -> dict[str, Any]:
    return decoding(layout) | {
        "GROUP": group_of(layout),
        "W": tile.num_warps,
        "NB": tile.block_n // 16,
        "BM": tile.block_m,
        "U": tile.block_k * layout.bits // 256,
        "RING": tile.num_stages if tile.num_stages > 2 else 0,
    }


def shipped(capability: int) -> Iterator[Shipped]:
    """Every tile of every layout that has them, and what decodes all layouts."""
    for name in FRAGMENT_LAYOUTS:
        layout = QuantizedLayout.named(name)
        for tile in fragment_tiles(name):
            yield from with_dependent(_product(layout, tile), capability, DTYPE)
    for name in ("int4-g128", "int4-g128-zeros", "mxfp4", "nvfp4", "int8", "fp8"):
        yield _decode(QuantizedLayout.named(name).as_fragments)


def _product(layout: QuantizedLayout, tile: Tile) -> Shipped:
    rows = dict.fromkeys(("x", "bias", "out"), f"*{TYPE_NAMES[DTYPE]}")
    pointers = rows | {"weight": "*i32", "scales": scale_type(layout)}
    return Shipped(
        name=f"{layout.name}-m{tile.block_m}-n{tile.block_n}-k{tile.block_k}-s{tile.num_stages}",
        kernel=linear_q_fragments_kernel,
        signature=pointers | dict.fromkeys(("num_rows", "size", "bias_size", "pairs", "K"), "i32"),
        constexprs=_constexprs(layout, tile),
        num_warps=tile.num_warps,
        num_stages=3,
        divisible=(*pointers, "K"),
    )


def _decode(layout: QuantizedLayout) -> Shipped:
    out = f"*{TYPE_NAMES[DTYPE]}"
    pointers = {"weight": "*i16", "scales": scale_type(layout), "zeros": "*bf16", "out": out}
    return Shipped(
        # groups of other sizes are other numbers, not other binaries
        name=f"{layout.kind}{'-zeros' if layout.has_zeros else ''}-decode",
        kernel=linear_q_fragments_decode_kernel,
        signature=pointers | dict.fromkeys(("first", "size", "group", "pairs", "K"), "i32"),
        constexprs=decoding(layout),
        num_warps=4,
        num_stages=3,
        divisible=(*pointers, "K"),
    )


def scale_type(layout: QuantizedLayout) -> str:
    return "*u8" if layout.kind == "mxfp4" else "*fp32"
