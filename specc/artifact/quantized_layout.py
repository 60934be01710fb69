"""How an engine stores a quantized weight: integers, scales and zero points of 32 outputs together.

A weight [N, K] is (u - z) · s of unsigned integers u. int8 has one scale for each output and z =
128; int4 has a scale for each output and group of columns and z = 8, or a zero point of its own
beside each scale. A block of 32 outputs is one stream of bytes, in the order in which
`specc.linear_q` uses them:

- int8: scales, 32 float32; then units of 4 columns [32, 4], a byte each.
- int4: for each group of columns its scales, 32 float32; its zero points where there are any,
  32 int16; then units of 8 columns [32, 4]: byte i has column i in its low and column 4 + i in its
  high four bits.

The last group, and its last unit, may have fewer columns. What blocks have beyond N has scale 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.artifact.safetensors_io import CHUNK_BYTES, Buffer, tensor_bytes
from specc.artifact.weight_layout import BLOCK, regroup

GROUPS = (32, 64, 128)
_SCALES_BYTES, _ZEROS_BYTES, _UNIT_BYTES = 4 * BLOCK, 2 * BLOCK, 4 * BLOCK
_NAME = re.compile(r"int8|int4-g(\d+)(-zeros)?")


@dataclass(frozen=True)
class QuantizedLayout:
    """One way to store weights.

    Args:
        bits: 8 or 4.
        group: columns that share a scale: one of `GROUPS`, or 0 for all of an output (8 bits).
        has_zeros: each group has its own zero point (4 bits).
    Raises:
        ValueError: a combination that no kernel reads.
    """

    bits: int
    group: int = 0
    has_zeros: bool = False

    def __post_init__(self) -> None:
        is_known = self.group in GROUPS if self.bits == 4 else self.bits == 8 and self.group == 0
        if not is_known or (self.has_zeros and self.bits == 8):
            raise ValueError(f"no weights of {self.bits} bits in groups of {self.group}")

    @classmethod
    def named(cls, name: str) -> QuantizedLayout:
        """The layout of this `name`."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise ValueError(f"no layout of weights is called {name}")
        if found[1] is None:
            return cls(8)
        return cls(4, int(found[1]), found[2] is not None)

    @property
    def name(self) -> str:
        """`int8`, `int4-g64` or `int4-g64-zeros`."""
        if self.bits == 8:
            return "int8"
        return f"int4-g{self.group}" + ("-zeros" if self.has_zeros else "")

    @property
    def middle(self) -> int:
        """The zero point of all weights, where they have none of their own."""
        return 1 << (self.bits - 1)

    @property
    def unit(self) -> int:
        """Columns whose integers lie together."""
        return 32 // self.bits

    def num_groups(self, columns: int) -> int:
        return -(-columns // self.group) if self.group else 1

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Shape [blocks, bytes of a block] that a weight [N, K] has in the engine's file."""
        outputs, columns = shape
        header = _SCALES_BYTES + (_ZEROS_BYTES if self.has_zeros else 0)
        units = -(-columns // self.unit)
        return -(-outputs // BLOCK), self.num_groups(columns) * header + units * _UNIT_BYTES


def pack(levels: Tensor, scales: Tensor, zeros: Tensor | None, layout: QuantizedLayout) -> Tensor:
    """Put a quantized weight into blocks.

    Args:
        levels: [N, K] uint8, the integers u.
        scales: [N, G] float32, one for each output and group.
        zeros: [N, G] integers within int16, where the layout has them.
        layout: of the result.
    Returns:
        uint8 [blocks, bytes of a block].
    """
    outputs, columns = levels.shape
    blocks, block_bytes = layout.stored_shape(levels.shape)
    more = blocks * BLOCK - outputs
    levels, scales = _more_rows(levels, more), _more_rows(scales.float(), more)
    out = torch.empty(blocks, block_bytes, dtype=torch.uint8)
    width, place = layout.group or columns, 0
    for group, first in enumerate(range(0, columns, width)):
        parts = [_bytes_of(scales[:, group], torch.float32)]
        if layout.has_zeros:
            assert zeros is not None
            parts.append(_bytes_of(_more_rows(zeros, more)[:, group], torch.int16))
        parts.append(_units(levels[:, first : first + width], layout))
        for part in parts:
            part = part.view(blocks, -1)
            out[:, place : place + part.shape[1]] = part
            place += part.shape[1]
    return out


def unpack(
    stored: Tensor, shape: Sequence[int], layout: QuantizedLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """What `pack` was given: levels [N, K] uint8, scales [N, G] float32, zeros [N, G] int16.

    Args:
        stored: uint8 [blocks, bytes of a block].
        shape: [N, K].
        layout: of the weight.
    """
    outputs, columns = shape
    blocks, width, place = stored.shape[0], layout.group or shape[1], 0
    levels, scales, zeros = [], [], []

    def take(count: int) -> Tensor:
        nonlocal place
        part = stored[:, place : place + count]
        place += count
        return part.contiguous()

    for first in range(0, columns, width):
        own = min(width, columns - first)
        scales.append(take(_SCALES_BYTES).view(torch.float32).reshape(-1, 1))
        if layout.has_zeros:
            zeros.append(take(_ZEROS_BYTES).view(torch.int16).reshape(-1, 1))
        units = -(-own // layout.unit)
        data = take(units * _UNIT_BYTES).view(blocks, units, BLOCK, 4).transpose(1, 2)
        if layout.bits == 4:
            data = torch.cat([data & 15, data >> 4], -1)
        levels.append(data.reshape(blocks * BLOCK, -1)[:outputs, :own])
    all_scales = torch.cat(scales, 1)[:outputs]
    middle = torch.full(all_scales.shape, layout.middle, dtype=torch.int16)
    all_zeros = torch.cat(zeros, 1)[:outputs] if zeros else middle
    return torch.cat(levels, 1), all_scales, all_zeros


def quantize(weight: Tensor, layout: QuantizedLayout) -> Tensor:
    """Round a weight [N, K] to the nearest that the layout holds, and put it into blocks.

    Ends of the range: int8 has scale max |w| / 127. int4 has -8 where |w| is largest, so that all
    16 levels are used, and with zero points the smallest and the largest weight, or 0, at its ends.

    Source: round to nearest as of ggml's Q8_0 and Q4_0, whose scales have the same ends.
    """
    weight = weight.float()
    outputs, columns = weight.shape
    width, groups = layout.group or columns, layout.num_groups(columns)
    padded = torch.nn.functional.pad(weight, (0, groups * width - columns))
    values, zeros = padded.view(outputs, groups, width), None
    if layout.bits == 8:
        scales = values.abs().amax(-1) / 127
    elif layout.has_zeros:
        low, high = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
        scales = (high - low) / 15
        zeros = torch.where(scales > 0, low / -scales, 0).round().clamp(0, 15)
    else:
        places = values.abs().argmax(-1, keepdim=True)
        scales = values.gather(-1, places).squeeze(-1) / -8
    # a group of zeros has scale 0 and lies at its zero point
    steps = (values / torch.where(scales == 0, 1, scales).unsqueeze(-1)).round()
    levels = steps + (layout.middle if zeros is None else zeros.unsqueeze(-1))
    levels = levels.clamp(0, (1 << layout.bits) - 1).view(outputs, -1)[:, :columns]
    return pack(levels.to(torch.uint8), scales, zeros, layout)


def dequantize(stored: Tensor, shape: Sequence[int], layout: QuantizedLayout) -> Tensor:
    """The weight [N, K] float32 that blocks stand for: (u - z) · s."""
    levels, scales, zeros = unpack(stored, shape, layout)
    width = layout.group or shape[1]
    wide = lambda item: item.repeat_interleave(width, 1)[:, : shape[1]]  # noqa: E731
    return (levels.float() - wide(zeros).float()) * wide(scales)


def quantized_stream(
    chunks: Iterable[Buffer], shape: Sequence[int], dtype: torch.dtype, layout: QuantizedLayout
) -> Iterator[Buffer]:
    """Quantize a weight while it is read; no more of it is in memory than a chunk.

    Args:
        chunks: its bytes in rows [N, K]; they may be cut anywhere, and each is valid until the
            next one is asked for.
        shape: [N, K].
        dtype: of the chunks.
        layout: of the result.
    Returns:
        its bytes in blocks; as many as come from 16 MB of rows at a time, at least one block.
    """
    row_bytes = shape[1] * dtype.itemsize
    if math.prod(shape) == 0:
        return
    step = max(1, CHUNK_BYTES // (BLOCK * row_bytes)) * BLOCK * row_bytes
    for rows in regroup(chunks, step):
        values = torch.frombuffer(rows, dtype=dtype).view(-1, shape[1])
        yield tensor_bytes(quantize(values, layout))


def _more_rows(values: Tensor, count: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, 0, 0, count))


def _bytes_of(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).contiguous().view(torch.uint8)


def _units(levels: Tensor, layout: QuantizedLayout) -> Tensor:
    """Integers [blocks · 32, columns] of a group in the order of their units."""
    padded = torch.nn.functional.pad(levels, (0, -levels.shape[1] % layout.unit))
    units = padded.view(-1, BLOCK, padded.shape[1] // layout.unit, layout.unit).transpose(1, 2)
    if layout.bits == 4:
        units = units[..., :4] | units[..., 4:] << 4
    return units.contiguous()
