"""How an engine stores a quantized weight: levels, scales and zero points of 32 outputs together.

A weight [N, K] has a level of 8 or 4 bits for each value, and a scale s for each output and group
of columns, or for each output:

- int8, int4: an unsigned integer u stands for (u - z) · s; z is 128 and 8, or a zero point of its
  own beside each scale.
- fp8: the bits of e4m3, v · s, without NaN.
- mxfp4: the code of e2m1, v · s; groups are of 32 columns, and each s is a power of two, e8m0.
- nvfp4: likewise, groups are of 16 columns, and each s is e4m3 times a factor of the output.
- q4_k, q8_0, …: a format of ggml's blocks, of which `block_formats.py` tells all that follows.

A block of 32 outputs is one stream of bytes, in the order in which `specc.linear_q` uses them: a
header of scales, and the levels that it is for. There is a header for each group, one for all
columns where an output has one scale, and in mxfp4 and nvfp4 one for 128 columns. It has, of each
group, 32 scales in float32, then 32 zero points in int16 where there are any; in mxfp4 4 · 32 bytes
and in nvfp4 8 · 32 (`byte_scales.py`). In nvfp4 a block begins with its 32 factors in float32.
Levels follow in units, [32 outputs, bytes]:

- 8 bits: units of 4 columns, a byte each; of fp8 they are of 2 columns.
- 4 bits: units of 8 columns in 4 bytes: byte i has column i in its low and column 4 + i in its high
  four bits.

The last group, and its last unit, may have fewer columns. What blocks have beyond N has scale 0.

For GPUs a block may have the same parts in another order, *fragments*: all scales, all zero points,
and levels as tensor cores take them (`fragments.py`); K is of whole tiles and groups. A layout's
name says which outputs a block has, if they do not follow each other: `int4-g128-fragments-14336`.
Source: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats (MX) 1.0, §5.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specc.artifact import byte_scales, fragments
from specc.artifact.block_formats import FORMATS, BlockFormat
from specc.artifact.fragments import BESIDE, HALF
from specc.artifact.weight_layout import BLOCK

GROUPS = (32, 64, 128)
# kind of all layouts that are ggml's
GGML = "ggml"
# format of blocks that lie as tensor cores take them
FRAGMENTS = "fragments"
# the largest values of e4m3 and e2m1
FP8_MOST, FP4_MOST = 448.0, 6.0
_NAMES = {(8, False): "int8", (4, False): "int4", (8, True): "fp8"}
# columns of a scale → kind of layouts in e2m1
_OF_E2M1 = {group: kind for kind, group in byte_scales.GROUPS.items()}
_NAME = re.compile(r"(int8|int4|fp8)(?:-g(\d+))?(-zeros)?")
_ORDER = re.compile(rf"{FRAGMENTS}(?:-({BESIDE}|(?!{HALF}$)[1-9]\d{{1,8}}))?")
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@dataclass(frozen=True)
class QuantizedLayout:
    """One way to store weights.

    Args:
        bits: 8 or 4, of a level.
        group: columns that share a scale: one of `GROUPS`, or 0 for all of an output (8 bits), or
            16 of nvfp4.
        has_zeros: each group has its own zero point (integers).
        is_float: levels are e4m3 (8 bits) or e2m1 (4 bits): mxfp4 in groups of 32, nvfp4 of 16.
        format: of ggml's blocks, which bits and group are those of; empty for a layout of specc, or
            `FRAGMENTS` for the same in that order, with `-` and the distance of the halves of its
            blocks where that is not 16.
    Raises:
        ValueError: a combination that no kernel reads.
    """

    bits: int
    group: int = 0
    has_zeros: bool = False
    is_float: bool = False
    format: str = ""

    def __post_init__(self) -> None:
        order = _ORDER.fullmatch(self.format)
        if order is not None and self.distance % HALF and self.distance != BESIDE:
            raise ValueError(f"no pairs of outputs {order[1]} apart")
        if self.format and order is None:
            own = FORMATS.get(self.format)
            wanted = None if own is None else (own.bits, own.group, False, False)
            if wanted != (self.bits, self.group, self.has_zeros, self.is_float):
                raise ValueError(f"no blocks {self.format} of {self.bits} bits")
            return
        if self.format and not self._may_be_fragments:
            raise ValueError(f"no fragments of {self.bits} bits in groups of {self.group}")
        groups = {8: (0, *GROUPS), 4: tuple(_OF_E2M1) if self.is_float else GROUPS}
        is_known = self.group in groups.get(self.bits, ())
        if not is_known or (self.has_zeros and self.is_float):
            kind = "float weights" if self.is_float else "weights"
            raise ValueError(f"no {kind} of {self.bits} bits in groups of {self.group}")

    @classmethod
    def named(cls, name: str) -> QuantizedLayout:
        """The layout of this `name`."""
        if name in FORMATS:
            return cls(FORMATS[name].bits, FORMATS[name].group, format=name)
        plain, _, order = name.partition(f"-{FRAGMENTS}")
        if plain != name:
            return replace(cls.named(plain), format=FRAGMENTS + order)
        if (own := byte_scales.GROUPS.get(name)) is not None:
            return cls(4, own, is_float=True)
        found = _NAME.fullmatch(name)
        if found is None:
            raise ValueError(f"no layout of weights is called {name}")
        kind = found[1]
        return cls(4 if kind == "int4" else 8, int(found[2] or 0), bool(found[3]), kind == "fp8")

    @property
    def name(self) -> str:
        """`int8-g32`, `int4-g64-zeros`, `fp8`, `mxfp4`, `int4-g32-fragments`, `…-64`, `q4_k`, …"""
        if self.kind == GGML:
            return self.format
        group = f"-g{self.group}" if self.group and not self.has_byte_scales else ""
        order = f"-{self.format}" if self.format else ""
        return self.kind + group + ("-zeros" if self.has_zeros else "") + order

    @property
    def kind(self) -> str:
        """What its levels are: `int8`, `int4`, `fp8`, `mxfp4`, `nvfp4`, or `ggml`, its blocks."""
        if self.blocks is not None:
            return GGML
        if self.has_byte_scales:
            return _OF_E2M1[self.group]
        return _NAMES[self.bits, self.is_float]

    @property
    def blocks(self) -> BlockFormat | None:
        return FORMATS.get(self.format)

    @property
    def is_fragments(self) -> bool:
        return self.format.startswith(FRAGMENTS)

    @property
    def as_fragments(self) -> QuantizedLayout:
        """The same in the order of fragments, blocks of outputs that follow each other."""
        return replace(self, format=FRAGMENTS)

    def paired(self, distance: int) -> QuantizedLayout:
        """Fragments with outputs so far apart in the halves of a block."""
        return replace(self, format=f"{FRAGMENTS}-{distance}") if distance != HALF else self

    @property
    def distance(self) -> int:
        """Of both halves of a block, in outputs."""
        order = _ORDER.fullmatch(self.format)
        return int(order[1]) if order is not None and order[1] else HALF

    @property
    def unpaired(self) -> QuantizedLayout:
        """Fragments of outputs that follow each other, where it is fragments."""
        return self.as_fragments if self.is_fragments else self

    @property
    def rows_together(self) -> int:
        """Outputs that are stored together: those of a block, or of all blocks that share some."""
        return max(BLOCK, 2 * self.distance)

    @property
    def as_blocks(self) -> QuantizedLayout:
        """The same in the order of blocks."""
        return replace(self, format="") if self.is_fragments else self

    def has_fragments(self, columns: int) -> bool:
        """Whether a weight of K = `columns` may lie so: whole tiles, of a kind with a kernel."""
        is_known = self.blocks is None and self._may_be_fragments
        return is_known and fragments.holds(columns, self.bits, self.group)

    @property
    def _may_be_fragments(self) -> bool:
        if self.bits == 4:
            return True
        return not self.has_zeros and self.group in ((0, 128) if self.is_float else (0,))

    @property
    def facts(self) -> tuple[object, ...]:
        """What operators are told of it, in their order."""
        own = self.bits, self.group, self.has_zeros, self.is_float
        # between them is how many bits rows have
        return (*own, 0, self.format) if self.format else own

    @classmethod
    def of_facts(cls, facts: Sequence[Any]) -> QuantizedLayout:
        """The layout that an operator was told of, after the number of outputs."""
        bits, group, has_zeros, is_float = facts[:4]
        return cls(bits, group, has_zeros, is_float, format="".join(facts[5:6]))

    @property
    def apart(self) -> int:
        """Columns of which none is stored without the others; 0 where that is one."""
        return self.group if self.blocks is None else self.blocks.columns

    @property
    def widened(self) -> QuantizedLayout | None:
        """The layout of specc that holds what ggml's blocks hold, with scales in float32.

        None where their groups have minima, or fewer columns.
        """
        own = self.blocks
        if own is None or own.has_minimum or own.group not in GROUPS:
            return None
        # the levels of q4_0 are those of int4
        return QuantizedLayout(own.bits if own.planes == (4,) and not own.table else 8, own.group)

    @property
    def middle(self) -> int:
        """The zero point of all weights, where they have none of their own."""
        return 0 if self.is_float else 1 << (self.bits - 1)

    @property
    def unit(self) -> int:
        """Columns whose levels lie together."""
        return 2 if self.is_float and self.bits == 8 else 32 // self.bits

    @property
    def header_columns(self) -> int:
        """Columns with one header, the last of which may have fewer; 0 for all of an output."""
        return byte_scales.TOGETHER if self.has_byte_scales else self.group

    @property
    def header_bytes(self) -> int:
        scales = byte_scales.TOGETHER // self.group if self.has_byte_scales else 4
        return (scales + (2 if self.has_zeros else 0)) * BLOCK

    @property
    def has_byte_scales(self) -> bool:
        return self.is_float and self.bits == 4

    @property
    def has_factors(self) -> bool:
        """Whether an output has a factor of its scales, which is the first of them."""
        return self.kind == byte_scales.NVFP4

    @property
    def front_bytes(self) -> int:
        """Of factors, with which a block begins; of mxfp4 in fragments alone."""
        is_any = self.has_byte_scales and self.is_fragments
        return 4 * BLOCK if self.has_factors or is_any else 0

    def scales(self, parts: Tensor) -> Tensor:
        """What levels of each group are multiplied with, [N, G], of scales as `pack` has them."""
        return parts[:, 1:] * parts[:, :1] if self.has_factors else parts

    def num_groups(self, columns: int) -> int:
        return -(-columns // self.group) if self.group else 1

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Shape [blocks, bytes of a block] that a weight [N, K] has in the engine's file.

        Of a stack of weights [E, N, K] the blocks of one follow those of the other.
        """
        *stack, outputs, columns = shape
        blocks = math.prod(stack) * -(-outputs // BLOCK)
        if self.blocks is not None:
            return blocks, BLOCK * self.blocks.row_bytes(columns)
        headers = -(-columns // self.header_columns) if self.header_columns else 1
        units = -(-columns // self.unit)
        unit_bytes = BLOCK * self.unit * self.bits // 8
        head = headers * self.header_bytes
        if self.is_fragments and self.has_byte_scales:
            head = BLOCK * self.num_groups(columns)  # no scales beyond the last group
        return blocks, self.front_bytes + head + units * unit_bytes

    def numbers(self, levels: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """The weight [N, K], float32, of parts as `pack` has them."""
        if self.blocks is not None:
            return self.blocks.numbers(levels, scales)
        columns, scales = levels.shape[1], self.scales(scales)
        zeros = torch.full_like(scales, self.middle) if zeros is None else zeros.float()
        width = self.group or columns
        zeros, scales = (x.repeat_interleave(width, 1)[:, :columns] for x in (zeros, scales))
        return (self.values(levels) - zeros) * scales

    def values(self, levels: Tensor) -> Tensor:
        """What levels are before zero points and scales, float32."""
        if not self.is_float:
            return levels.float()
        if self.bits == 8:
            return levels.contiguous().view(torch.float8_e4m3fn).float()
        return torch.cat([E2M1, -E2M1])[levels.long()]


def is_order(text: str) -> bool:
    """Whether a layout may have this `format`, and be of specc."""
    return _ORDER.fullmatch(text) is not None


def pack(levels: Tensor, scales: Tensor, zeros: Tensor | None, layout: QuantizedLayout) -> Tensor:
    """Put a quantized weight into blocks.

    Args:
        levels: [N, K] uint8: the integers u, the bits of e4m3, or codes of e2m1 (sign in bit 3).
        scales: [N, G] float32, one for each output and group, as `byte_scales.check` has them in
            e2m1; of nvfp4 [N, 1 + G], after the output's factor.
        zeros: [N, G] integers from 0 to 256, where the layout has them.
        layout: of the result. Of ggml's blocks, levels and scales are as `Integers` has them.
    Returns:
        uint8 [blocks, bytes of a block].
    Raises:
        ValueError: a level that is NaN, or a scale or a zero point that the layout does not hold.
    """
    if layout.blocks is not None:
        return layout.blocks.pack(levels, scales)
    outputs, columns = levels.shape
    check_parts(levels, scales, zeros, layout)
    blocks, block_bytes = layout.stored_shape(levels.shape)
    pad, more = torch.nn.functional.pad, (0, 0, 0, blocks * BLOCK - outputs)
    levels, scales = pad(levels, more), pad(scales.float(), more)
    zeros = None if zeros is None else pad(zeros, more)
    if layout.is_fragments:
        return fragments.pack(levels, scales, zeros, layout.kind, layout.distance)
    out = torch.empty(blocks, block_bytes, dtype=torch.uint8)
    width, place = layout.header_columns or columns, layout.front_bytes
    if layout.has_factors:
        out[:, :place] = _bytes_of(scales[:, :1], torch.float32).view(blocks, -1)
        scales = scales[:, 1:]
    per_header, units = layout.num_groups(width), _units(levels, layout)
    for header, first in enumerate(range(0, columns, width)):
        own = slice(header * per_header, (header + 1) * per_header)
        if layout.has_byte_scales:
            parts = [byte_scales.header(scales[:, own], layout.kind)]
        else:
            parts = [_bytes_of(scales[:, own], torch.float32)]
        if layout.has_zeros:
            assert zeros is not None
            parts.append(_bytes_of(zeros[:, own], torch.int16))
        last = -(-min(first + width, columns) // layout.unit)
        parts.append(units[:, first // layout.unit : last])
        for part in parts:
            part = part.reshape(blocks, -1).view(torch.uint8)
            out[:, place : place + part.shape[1]] = part
            place += part.shape[1]
    return out


def unpack(
    stored: Tensor, shape: Sequence[int], layout: QuantizedLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """What `pack` was given: levels [N, K] uint8, scales float32, zeros [N, G] int16.

    Of ggml's blocks these are levels, headers and nothing.

    Args:
        stored: uint8 [blocks, bytes of a block].
        shape: [N, K].
    """
    outputs, columns = shape
    if layout.blocks is not None:
        codes, headers = layout.blocks.unpack(stored, columns)
        return codes[:outputs], headers[:outputs], headers.new_empty(0, dtype=torch.int16)
    if layout.is_fragments:
        order = layout.kind, layout.has_zeros, layout.distance
        groups = layout.num_groups(columns)
        item = fragments.unpack(stored, columns, groups, *order)
        middle = torch.full((len(item[0]), groups), layout.middle, dtype=torch.int16)
        points = middle if item[2] is None else item[2]
        return item[0][:outputs], item[1][:outputs], points[:outputs]
    blocks, width, place = stored.shape[0], layout.header_columns or shape[1], 0
    levels, scales, zeros = [], [], []

    def take(count: int) -> Tensor:
        nonlocal place
        part = stored[:, place : place + count]
        place += count
        return part.contiguous()

    if layout.has_factors:
        scales.append(take(layout.front_bytes).view(torch.float32).reshape(-1, 1))
    for first in range(0, columns, width):
        own = min(width, columns - first)
        head = take(layout.header_bytes - (2 * BLOCK if layout.has_zeros else 0))
        if layout.has_byte_scales:
            scales.append(byte_scales.of_header(head, layout.kind)[:, : layout.num_groups(own)])
        else:
            scales.append(head.view(torch.float32).reshape(-1, 1))
        if layout.has_zeros:
            zeros.append(take(2 * BLOCK).view(torch.int16).reshape(-1, 1))
        units = -(-own // layout.unit)
        unit_bytes = layout.unit * layout.bits // 8
        data = take(units * BLOCK * unit_bytes).view(blocks, units, BLOCK, unit_bytes)
        data = data.transpose(1, 2)
        if layout.bits == 4:
            data = torch.cat([data & 15, data >> 4], -1)
        levels.append(data.reshape(blocks * BLOCK, -1)[:outputs, :own])
    all_scales = torch.cat(scales, 1)[:outputs]
    middle = torch.full((outputs, layout.num_groups(columns)), layout.middle, dtype=torch.int16)
    all_zeros = torch.cat(zeros, 1)[:outputs] if zeros else middle
    return torch.cat(levels, 1), all_scales, all_zeros


def dequantize(stored: Tensor, shape: Sequence[int], layout: QuantizedLayout) -> Tensor:
    """The weight [N, K], or [E, N, K], float32 that blocks stand for."""
    if len(shape) == 3:
        each = stored.split(max(1, len(stored) // max(1, shape[0])))
        return torch.stack([dequantize(item, shape[1:], layout) for item in each])
    return layout.numbers(*unpack(stored, shape, layout))


def check_parts(
    levels: Tensor, scales: Tensor, zeros: Tensor | None, layout: QuantizedLayout
) -> None:
    """Raises ValueError: see `pack`."""
    if layout.is_float and layout.bits == 8:
        wrong = int((levels & 127 == 127).sum())
        if wrong:
            raise ValueError(f"{wrong} values of e4m3 are NaN")
    if layout.has_byte_scales:
        own = scales[:, 1:] if layout.has_factors else scales
        byte_scales.check(own, layout.kind)
        if layout.is_fragments and layout.kind == byte_scales.MXFP4:
            fragments.check_factors(levels, own)
    if zeros is not None and zeros.numel():
        least, most = int(zeros.min()), int(zeros.max())
        # sums of 32 bits hold so much, and bfloat16
        limit = fragments.MOST_ZERO if layout.is_fragments else 256
        if least < 0 or most > limit:
            raise ValueError(f"zero points from {least} to {most}")


def _bytes_of(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).contiguous().view(torch.uint8)


def _units(levels: Tensor, layout: QuantizedLayout) -> Tensor:
    """Levels [blocks · 32, columns] as units [blocks, units, 32], each a number of its bytes."""
    padded = torch.nn.functional.pad(levels, (0, -levels.shape[1] % layout.unit)).contiguous()
    if layout.bits == 4:
        # of 8 columns, which are two numbers of 4 bytes
        pairs = padded.view(torch.int32).view(len(padded), -1, 2)
        units = pairs[..., 0] | pairs[..., 1] << 4
    else:
        units = padded.view(torch.int32 if layout.unit == 4 else torch.int16)
    return units.view(-1, BLOCK, units.shape[1]).transpose(1, 2).contiguous()
