"""`specc::linear_q`: rows times a weight of 8 or 4 bits, as the engine's file has it.

Up to MAX_QUANTIZED_ROWS rows one launch reads the integers, once, and nothing else of the weight.
More rows have the weight decoded to their own type and multiplied by the library, DECODED_BYTES of
it at a time: a prompt multiplies for longer than that takes.

What is fixed by the oracle (`specc.kernels.reference.quantized`) are rows as integers; here they
are the floats that they were, and sums are in float32, group by group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

from specc.artifact.backends import facts_of
from specc.artifact.fragments import HALF
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.weight_layout import BLOCK
from specc.kernels.cuda import linear_q_fragments
from specc.kernels.cuda.few_rows import in_rows, quantized_tile_for
from specc.kernels.cuda.few_rows_tiles import (
    MAX_ROWS,
    QUANTIZED,
    Tile,
    fragment_tiles,
    quantized_tiles,
)
from specc.kernels.cuda.linear_q_kernels import linear_q_decode_kernel, linear_q_kernel
from specc.kernels.cuda.linear_q_parts import absent_of, format_of, parts_of, pointers_of, width_of
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.cuda.strided_rows import FLOATS, check

NAME = "linear_q"
# of a weight, as floats, at a time: the memory plan counts them
DECODED_BYTES = facts_of("cuda").decoded_bytes
# columns that a program decodes, and most of them at a time
_DECODED, _DECODE_BLOCK = 128, 32
# columns of a step of the product, where groups are shorter
_STEP = 128


def linear_q(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    bits: int,
    group: int,
    has_zeros: bool,
    is_float: bool = False,
    row_bits: int = 0,
    format: str = "",
) -> Tensor:
    """See `linear_q_reference`; rows in float16, too. What is not finite is as floats have it.

    Rows are not integers here, whatever `row_bits` asks for.
    """
    layout = QuantizedLayout(bits, group, has_zeros, is_float, format)
    check_operands(input, weight, bias, out_features, layout)
    x = in_rows(input)
    tile = quantized_tile_for(x, out_features, layout.unpaired.name)
    if tile is None:
        return _by_library(x, weight, bias, out_features, layout)
    if layout.is_fragments and x.shape[0]:
        return linear_q_fragments.multiply(x, weight, bias, out_features, layout, tile)
    out = x.new_empty(x.shape[0], out_features)
    if x.shape[0]:
        linear_q_kernel[(triton.cdiv(out_features, tile.block_n),)](
            x, *parts_of(weight, layout), x if bias is None else bias, out,
            x.shape[0], out_features, 0 if bias is None else out_features, x.shape[1],
            **_constexprs(layout, tile, _block_rows(x.shape[0])),
            **tile.options,
        )  # fmt: skip
    return out


def invariant_linear_q(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    bits: int,
    group: int,
    has_zeros: bool,
    is_float: bool = False,
    row_bits: int = 0,
    format: str = "",
) -> Tensor:
    """As `linear_q`, by weights in fragments: a row has the same bits however many there are.

    More rows than a program has are others' programs: nothing is decoded to memory.
    """
    layout = QuantizedLayout(bits, group, has_zeros, is_float, format)
    check(layout.is_fragments, "invariant_linear_q", layout.name, "a layout in fragments")
    check_operands(input, weight, bias, out_features, layout)
    x = in_rows(input)
    if not x.shape[0]:
        return x.new_empty(0, out_features)
    *tiles, last = fragment_tiles(layout.unpaired.name)
    tile = next((tile for tile in tiles if x.shape[0] <= tile.block_m), last)
    return linear_q_fragments.multiply(x, weight, bias, out_features, layout, tile)


def grouped_mm_q(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    out_features: int,
    bits: int,
    group: int,
    has_zeros: bool,
    is_float: bool = False,
    row_bits: int = 0,
    format: str = "",
) -> Tensor:
    """See `grouped_mm_q_reference`; reads on the host how many rows each expert has.

    For what `FuseExperts` leaves alone.
    """
    out, first = x.new_zeros(x.shape[0], out_features), 0
    numbers = (out_features, bits, group, has_zeros, is_float, row_bits, format)
    blocks = max(1, weight.shape[0] // max(1, len(ends)))
    for own, last in zip(weight.split(blocks), ends.tolist(), strict=False):
        if last > first:
            out[first:last] = linear_q(x[first:last], own, None, *numbers)
        first = last
    return out


def _by_library(
    x: Tensor, weight: Tensor, bias: Tensor | None, size: int, layout: QuantizedLayout
) -> Tensor:
    """The product with the weight in the type of x, some blocks of it after others."""
    step = max(1, DECODED_BYTES // (BLOCK * x.shape[1] * x.dtype.itemsize))
    if step >= weight.shape[0]:
        return functional.linear(x, decoded(weight, x, 0, size, layout), bias)
    out = x.new_empty(x.shape[0], size)
    for first, outputs in _pieces(weight.shape[0], step, layout.distance // HALF, size):
        part = decoded(weight, x, first, sum(map(len, outputs)), layout)
        own = (
            None if bias is None else torch.cat([bias[item.start : item.stop] for item in outputs])
        )
        done = functional.linear(x, part, own).split([len(item) for item in outputs], 1)
        for item, columns in zip(outputs, done, strict=True):
            out[:, item.start : item.stop] = columns
    return out


def _pieces(blocks: int, step: int, pairs: int, size: int) -> Iterator[tuple[int, list[range]]]:
    """First blocks of pieces of at most `step` blocks, and which outputs such a piece has.

    Args:
        pairs: blocks of which all first halves come before all second ones.
        size: N.
    """
    first = 0
    while first < blocks:
        last = first + (step // pairs * pairs or min(step, pairs - first % pairs))
        if step >= pairs:
            outputs = [range(first * BLOCK, min(size, last * BLOCK))]
        else:
            begin = first // pairs * pairs * BLOCK + first % pairs * HALF
            own = range(begin, begin + (last - first) * HALF)
            outputs = [own, range(own.start + pairs * HALF, own.stop + pairs * HALF)]
        yield first, outputs
        first = last


def decoded(weight: Tensor, like: Tensor, first: int, size: int, layout: QuantizedLayout) -> Tensor:
    """(u - z) · s of `size` outputs from block `first` on: [size, K] in the dtype of `like`.

    Of outputs that lie apart first halves of blocks come before second ones.
    """
    columns, blocks = like.shape[1], triton.cdiv(size, BLOCK)
    out = like.new_empty(size, columns)
    grid = (blocks, triton.cdiv(columns, _DECODED))
    linear_q_decode_kernel[grid](
        *parts_of(weight, layout), out, first, size, width_of(layout) or columns,
        min(layout.distance // HALF, blocks), columns,
        **_decoding(layout),
        num_warps=4,
        num_stages=1,
    )  # fmt: skip
    return out


def _decoding(layout: QuantizedLayout) -> dict[str, Any]:
    columns = min(_DECODE_BLOCK, layout.group or _DECODE_BLOCK)
    return format_of(layout) | {"BK": columns, "PARTS": _DECODED // columns}


def _constexprs(layout: QuantizedLayout, tile: Tile, rows: int) -> dict[str, Any]:
    # of nvfp4 values times scales are exact whatever rows are
    group = 0 if layout.has_factors else layout.group
    columns = min(tile.block_k, group or tile.block_k)
    return format_of(layout) | {
        "WIDTH": width_of(layout),
        "BM": rows,
        "BN": tile.block_n,
        "BK": columns,
        "PARTS": max(1, min(tile.block_k, _STEP) // columns),
    }


def _block_rows(num_rows: int) -> int:
    return MAX_ROWS if num_rows <= MAX_ROWS else 64


def check_operands(
    x: Tensor, weight: Tensor, bias: Tensor | None, size: int, layout: QuantizedLayout
) -> None:
    """Raises ValueError: what the kernels would misread; operands of `linear_q`."""
    dtypes = (linear_q_fragments.DTYPE,) if layout.is_fragments else FLOATS
    is_rows = x.dim() == 2 and x.dtype in dtypes and x.shape[1] > 0
    needed = "[M, K] of floats, of bfloat16 by fragments"
    check(is_rows, NAME, f"input {x.dtype} {list(x.shape)}", needed)
    wanted = layout.stored_shape((size, x.shape[1]))
    check(
        weight.dtype == torch.uint8 and weight.shape == wanted and weight.is_contiguous(),
        NAME,
        f"weight {weight.dtype} {list(weight.shape)}, strides {weight.stride()}",
        f"a contiguous {list(wanted)} of torch.uint8, {layout.name}",
    )
    if bias is not None:
        check(
            bias.shape == (size,) and bias.dtype == x.dtype and bias.is_contiguous(),
            NAME,
            f"bias {bias.dtype} {list(bias.shape)}",
            f"a contiguous [{size}] of {x.dtype}",
        )


def shipped(capability: int) -> Iterator[Shipped]:
    """Every tile of every layout that has them, and what decodes all layouts."""
    for dtype in FLOATS:
        for name in QUANTIZED:
            for rows in (MAX_ROWS, 64):
                for tile in quantized_tiles(name, dtype, rows):
                    yield _product(dtype, QuantizedLayout.named(name), tile, rows)
        for name in ("int8", "int8-zeros", "int4-g32", "int4-g32-zeros", "fp8", "mxfp4", "nvfp4"):
            yield _decode(dtype, QuantizedLayout.named(name))
    for name in ("int4-g32", "int4-g32-zeros", "mxfp4", "nvfp4", "int8", "fp8"):
        yield _decode(linear_q_fragments.DTYPE, QuantizedLayout.named(name).as_fragments)


def _product(dtype: torch.dtype, layout: QuantizedLayout, tile: Tile, rows: int) -> Shipped:
    kind = TYPE_NAMES[dtype]
    given = pointers_of(layout)
    pointers = {"x": f"*{kind}", **given, "bias": f"*{kind}", "out": f"*{kind}"}
    return Shipped(
        name=f"{kind}-{layout.name}-rows{rows}-{tile.name}",
        kernel=linear_q_kernel,
        signature=pointers | dict.fromkeys(("num_rows", "size", "bias_size", "K"), "i32"),
        constexprs=absent_of(layout) | _constexprs(layout, tile, rows),
        **tile.options,
        divisible=(*pointers, "K"),
    )


def _decode(dtype: torch.dtype, layout: QuantizedLayout) -> Shipped:
    kind = TYPE_NAMES[dtype]
    pointers = {**pointers_of(layout), "out": f"*{kind}"}
    # groups of other sizes are other numbers, not other binaries
    name = layout.name.replace("-g32", "")
    return Shipped(
        name=f"{kind}-decode-{name}",
        kernel=linear_q_decode_kernel,
        signature=pointers | dict.fromkeys(("first", "size", "width", "pairs", "K"), "i32"),
        constexprs=absent_of(layout) | _decoding(layout),
        num_warps=4,
        num_stages=1,
        divisible=(*pointers, "K"),
    )
