"""`specc::add_norm_linear` and `specc::add_norm_gate_up` by weights in fragments: launches.

Few rows are one launch; more are the norm, `linear_q`, and the gate. No GPU has run these kernels:
they are compiled for all capabilities, and emulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.weight_layout import BLOCK
from specc.kernels.cuda.act_and_mul import act_and_mul
from specc.kernels.cuda.add_norm_fragments_kernels import add_norm_fragments_kernel
from specc.kernels.cuda.attend_config import machine
from specc.kernels.cuda.dependent import launch_options, with_dependent
from specc.kernels.cuda.few_rows import check_norm, in_rows, normed_tile_for, unforced
from specc.kernels.cuda.few_rows_tiles import (
    FRAGMENT_LAYOUTS,
    NORMED_COLUMNS,
    Tile,
    all_normed_tiles,
    resident,
)
from specc.kernels.cuda.linear_q import check_operands, linear_q
from specc.kernels.cuda.linear_q_fragments import DTYPE, decoding
from specc.kernels.cuda.rms_norm import add_rms_norm
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.cuda.strided_rows import check
from specc.kernels.reference.fused import ACTIVATIONS

# rows that an instruction has columns for
_ROWS = 8


def by_fragments(
    operator: str,
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    bias: Tensor | None,
    name: str,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """See `add_norm_linear_reference`; with an activation, `add_norm_gate_up_reference`.

    Args:
        operator: which of both.
        weight: uint8 [blocks, bytes of a block]; its outputs are whole blocks.
        name: of its layout.
    """
    size = weight.shape[0] * BLOCK
    distance = None if activation is None else size // 2
    layout = checked_layout(operator, x, residual, gamma, weight, bias, name, distance)
    tile = normed_tile_for(operator, x, size, layout.unpaired.name)
    if tile is None:
        y, total = unfused(x, residual, gamma, eps, unit_offset, weight, bias, layout)
        return y if activation is None else act_and_mul(y, activation), total
    total = x.new_empty(x.shape)
    out = x.new_empty(*x.shape[:-1], size if activation is None else size // 2)
    if x.numel():
        rows = in_rows(x)
        add_norm_fragments_kernel[(num_programs(tile, size, x.device),)](
            rows, in_rows(residual), gamma, weight.view(torch.int32), weight.view(torch.float32),
            rows if bias is None else bias, out, total,
            rows.shape[0], size, 0 if bias is None else size, _number(activation),
            rows.shape[1], float(eps), float(unit_offset),
            **constexprs_of(layout, tile), IS_GATED=activation is not None,
            num_warps=tile.num_warps,
            maxnreg=tile.registers,
            **launch_options(x.dtype, tile.starts_early),
        )  # fmt: skip
    return out, total


def unfused(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    bias: Tensor | None,
    layout: QuantizedLayout,
) -> tuple[Tensor, Tensor]:
    """The product [..., N] of separate kernels, and the sum; see `by_fragments`."""
    normed, total = add_rms_norm(x, residual, gamma, eps, unit_offset)
    size = weight.shape[0] * BLOCK
    with unforced():
        y = linear_q(in_rows(normed), weight, bias, size, *layout.facts)  # type: ignore[arg-type]
    return y.view(*x.shape[:-1], size), total


def checked_layout(
    operator: str,
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    name: str,
    distance: int | None,
) -> QuantizedLayout:
    """The layout of this name.

    Args:
        distance: of outputs that share a block; None is that of outputs that follow each other.
    Raises:
        ValueError: what the kernels would misread.
    """
    layout, size = QuantizedLayout.named(name), weight.shape[0] * BLOCK
    wanted = layout.unpaired if distance is None else layout.as_fragments.paired(distance)
    check(
        layout.is_fragments and layout == wanted,
        operator,
        f"a weight {name} of {size} outputs",
        wanted.name if layout.is_fragments else "fragments",
    )
    check_norm(operator, x, residual, gamma)
    check_operands(x.view(-1, x.shape[-1]), weight, bias, size, layout)
    return layout


def num_programs(tile: Tile, size: int, device: torch.device) -> int:
    """As many as a device holds at a time, or blocks."""
    capability, num_sms = machine(device)
    return min(size // BLOCK, resident(tile, capability) * num_sms)


def constexprs_of(layout: QuantizedLayout, tile: Tile) -> dict[str, Any]:
    return decoding(layout) | {
        "W": tile.num_warps,
        "BM": _ROWS,
        "BS": tile.block_m,
        "CHUNKS": tile.columns // NORMED_COLUMNS,
        "U": tile.block_k * layout.bits // 256,
        "RING": tile.num_stages if tile.num_stages > 2 else 0,
    }


def _number(activation: str | None) -> int:
    """Of an activation among all, as the kernel has them."""
    return 0 if activation is None else [*ACTIVATIONS].index(activation)


def shipped(capability: int) -> Iterator[Shipped]:
    """Every tile of every layout that has them, plain and gated."""
    for name in FRAGMENT_LAYOUTS:
        layout = QuantizedLayout.named(name)
        for tile in all_normed_tiles(layout.name, capability):
            for is_gated in (False, True):
                item = _shipped(layout, tile, is_gated)
                yield from with_dependent(item, capability, DTYPE)


def _shipped(layout: QuantizedLayout, tile: Tile, is_gated: bool) -> Shipped:
    names = ("x", "residual", "gamma", "bias", "out", "total")
    pointers = dict.fromkeys(names, f"*{TYPE_NAMES[DTYPE]}")
    pointers |= {"weight": "*i32", "scales": "*fp32"}
    integers = ("num_rows", "size", "bias_size", "activation", "K")
    return Shipped(
        name=f"{layout.name}-{tile_name(tile)}{'-gated' if is_gated else ''}",
        kernel=add_norm_fragments_kernel,
        signature=pointers | dict.fromkeys(integers, "i32") | {"eps": "fp32", "offset": "fp32"},
        constexprs=constexprs_of(layout, tile) | {"IS_GATED": is_gated},
        num_warps=tile.num_warps,
        num_stages=3,
        max_registers=tile.registers,
        divisible=(*pointers, "K"),
    )


def tile_name(tile: Tile) -> str:
    return f"m{tile.block_m}-c{tile.columns}-s{tile.num_stages}"
