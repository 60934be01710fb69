"""Random quantized weights, drawn in the blocks that programs read: they never exist as floats.

Levels are uniform over those that rounding gives, and scales such that (u - z) · s has a given
standard deviation. The mean is zero, too: a mean would add up over the columns of a product, and
from layer to layer. Levels of int8 and fp8 lie evenly around zero; those of int4 do not, -8 … 7,
but their scales have either sign, as the rounded ones do (`QuantizedLayout`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specc.artifact.fragments import as_stored
from specc.artifact.quantized_layout import QuantizedLayout, pack
from specc.artifact.weight_layout import BLOCK

# levels that rounding gives: int8 reaches -127, and two codes of e4m3 are NaN
_NAN = 127
_LEVELS = {
    "int8": range(1, 256),
    "int4": range(16),
    "fp8": [code for code in range(256) if code & _NAN != _NAN],
}
# what is compared at a time, which takes as much memory again
_CHUNK_BYTES = 64 << 20
# of a weight in fragments whose levels are drawn
_PACKED_BLOCKS = 16


def draw_blocks(out: Tensor, columns: int, layout: QuantizedLayout, spread: Tensor) -> None:
    """Draw a quantized weight, or a stack of them, from torch's generator of its device.

    Args:
        out: uint8 [blocks, bytes of a block], see `specc.artifact.quantized_layout`; is written.
        columns: of the weight.
        layout: int8, int4 or fp8.
        spread: [blocks · 32] float32 on the same device: standard deviation of each output's
            weights, 0 for what blocks have beyond the last output.
    """
    assert layout.kind in _LEVELS, "nobody asks --quantize for scales that are powers of two"
    if layout.is_fragments:
        _draw_fragments(out, columns, layout, spread)
        return
    for part in out.split(max(1, _CHUNK_BYTES // out.shape[1])):
        _draw_levels(part, layout)
    blocks, groups = out.shape[0], layout.num_groups(columns)
    # one header for all columns, or one before the levels of each group
    step = layout.header_bytes + BLOCK * layout.group * layout.bits // 8
    headers = out.as_strided((blocks, groups, layout.header_bytes), (out.stride(0), step, 1))
    scales = _scales(spread, groups, layout)
    num_bytes = BLOCK * torch.float32.itemsize
    headers[..., :num_bytes] = scales.contiguous().view(torch.uint8)
    if layout.has_zeros:
        zeros = torch.full((BLOCK,), layout.middle, dtype=torch.int16, device=out.device)
        headers[..., num_bytes:] = zeros.view(torch.uint8)


def _draw_fragments(out: Tensor, columns: int, layout: QuantizedLayout, spread: Tensor) -> None:
    """Blocks in fragments: some are drawn and packed, others repeat their levels.

    Packing billions of levels takes longer than what is timed with them.
    """
    blocks, groups = len(out), layout.num_groups(columns)
    count = min(blocks, _PACKED_BLOCKS)
    rows = count * BLOCK
    levels = torch.empty(rows, columns * layout.bits // 8, dtype=torch.uint8)
    _draw_levels(levels, layout)
    if layout.bits == 4:
        levels = torch.cat([levels & 15, levels >> 4], 1)
    zeros = torch.full((rows, groups), layout.middle) if layout.has_zeros else None
    packed = pack(levels, torch.ones(rows, groups), zeros, layout.unpaired).to(out.device)
    for first in range(0, blocks, count):
        part = out[first : first + count]
        part.copy_(packed[: len(part)])
    scales = _scales(as_stored(spread, layout.distance), groups, layout)
    num_bytes = BLOCK * groups * torch.float32.itemsize
    out[:, :num_bytes] = scales.contiguous().view(blocks, -1).view(torch.uint8)


def _scales(spread: Tensor, groups: int, layout: QuantizedLayout) -> Tensor:
    """[blocks, groups, 32] float32; those of int4 have signs, as its levels are not symmetric."""
    scales = (spread / _deviation(layout)).view(-1, 1, BLOCK).expand(-1, groups, -1)
    if layout.kind == "int4":
        is_negative = torch.randint(0, 2, scales.shape, dtype=torch.int8, device=spread.device)
        scales = scales * (1 - 2 * is_negative)
    return scales


def _draw_levels(out: Tensor, layout: QuantizedLayout) -> None:
    """Fill all bytes; headers are written after that."""
    if layout.bits == 4:
        # two levels in a byte, each uniform
        out.random_(0, 256)
    elif layout.is_float:
        out.random_(0, 254)
        # 0 … 126 and 128 … 254
        out.add_(out >= _NAN)
    else:
        out.random_(1, 256)


def _deviation(layout: QuantizedLayout) -> float:
    """Root mean square of u - z over the levels that are drawn."""
    levels = torch.tensor(_LEVELS[layout.kind], dtype=torch.uint8)
    values = layout.values(levels).double() - layout.middle
    return float(values.square().mean().sqrt())
