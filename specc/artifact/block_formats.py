"""Weights in ggml's formats of blocks: what a block holds, and how an engine lays blocks out.

A block is of 32 or 256 columns of an output. It has a header, by which each group of 16 or 32
columns has a scale s and, in some formats, a minimum m, and a level u of 2 to 8 bits for each
column:

    w = s · (u - z) - m

z is 0 where there is a minimum. In iq4_nl and iq4_xs, u - z is an integer that a table has for the
code of 4 bits. s and m are rounded to float32 once, from what the header holds:

- q4_0, q5_0, q8_0, iq4_nl: s is fp16, of 32 columns.
- q4_1, q5_1: s and -m are fp16.
- q2_k, q4_k, q5_k: s = d · scale and m = dmin · minimum; d and dmin are fp16, scale and minimum of
  a group have 4 bits in q2_k and 6 in the others.
- q3_k, q6_k, iq4_xs: s = d · scale, scales have 6, 8 and 6 bits and a sign.

Between a file and an engine, a weight [N, K] is its levels [N, K], uint8, in the order of columns,
and its headers [N, blocks, bytes], uint8, whose fields are in the order of `BlockFormat.fields`.

An engine has 256 columns of 32 outputs together, as many bytes as ggml's blocks of them have. First
come their headers, field after field, [blocks, 32 outputs, bytes of the field]. Then come levels in
one or two planes, the first of which has low bits: a plane of b bits is units of 32 / b columns,
[32 outputs, 4 bytes], and byte i has columns i, 4 + i, … from its lowest bits on. What is left of a
row after whole 256 columns, a multiple of 32, lies in the same way.

Source: https://github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h, ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.artifact.weight_layout import BLOCK

# columns that lie together
TOGETHER = 256
Parts = tuple[Tensor, Tensor]
# levels of iq4_nl and iq4_xs by their codes
_TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
_NEGATIVE = tuple(-level for level in _TWICE_E2M1)
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class BlockFormat:
    """A format of blocks.

    Args:
        name: as ggml has it, in small letters.
        columns: of a block, 32 or 256.
        group: columns that share a scale.
        fields: bytes of each field of a header, in the engine's order.
        planes: bits of each plane of levels.
        middle: z; of codes, it makes levels of what the table has.
        has_minimum: groups have one.
        split: takes ggml's blocks [n, bytes] to headers [n, bytes] and levels [n, columns].
        scales: takes headers [n, bytes] to s [n, groups of a block], float32, and m, or None.
        table: u - z of each code.
    """

    name: str
    columns: int
    group: int
    fields: tuple[int, ...]
    planes: tuple[int, ...]
    middle: int
    split: Callable[[Tensor], Parts]
    scales: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    has_minimum: bool = False
    table: tuple[int, ...] = ()

    @property
    def bits(self) -> int:
        return sum(self.planes)

    @property
    def header_bytes(self) -> int:
        return sum(self.fields)

    @property
    def block_bytes(self) -> int:
        return self.header_bytes + self.columns * self.bits // 8

    def row_bytes(self, columns: int) -> int:
        """Of so many columns of an output, in a file as in an engine."""
        return columns // self.columns * self.block_bytes

    def parts(self, rows: Tensor) -> Parts:
        """Levels [n, K] and headers [n, blocks, bytes] of a file's rows [n, bytes], all uint8."""
        count = len(rows)
        headers, levels = self.split(rows.reshape(-1, self.block_bytes))
        return levels.reshape(count, -1), headers.reshape(count, -1, self.header_bytes)

    def numbers(self, levels: Tensor, headers: Tensor) -> Tensor:
        """The weight [n, K], float32, of what `parts` returns."""
        scales, minima = self.factors(headers)
        found = self.steps(levels).view(*scales.shape, self.group) * scales.unsqueeze(-1)
        if minima is not None:
            found -= minima.unsqueeze(-1)
        return found.view(levels.shape)

    def steps(self, levels: Tensor) -> Tensor:
        """Differences u - z [n, K], float32, of levels."""
        if self.table:
            return torch.tensor(self.table, dtype=torch.float32)[levels.long()]
        return levels.float() - self.middle

    def factors(self, headers: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scales [n, groups], float32, and minima, or None, of headers [n, blocks, bytes]."""
        scales, minima = self.scales(headers.reshape(-1, self.header_bytes))
        shape = len(headers), -1
        return scales.reshape(shape), None if minima is None else minima.reshape(shape)

    def pack(self, levels: Tensor, headers: Tensor) -> Tensor:
        """Put a weight into an engine's blocks.

        Args:
            levels: [N, K] uint8.
            headers: [N, blocks, bytes] uint8.
        Returns:
            uint8 [blocks of 32 outputs, bytes]; what they have beyond N is zeros.
        """
        more = -len(levels) % BLOCK
        levels = torch.nn.functional.pad(levels, (0, 0, 0, more))
        headers = torch.nn.functional.pad(headers, (0, 0, 0, 0, 0, more))
        blocks, columns = len(levels) // BLOCK, levels.shape[1]
        out = torch.empty(blocks, BLOCK * self.row_bytes(columns), dtype=torch.uint8)
        place = 0
        for first, last, size in _pieces(columns):
            own = headers[:, first // self.columns : last // self.columns]
            own = own.view(blocks, BLOCK, -1, size // self.columns, self.header_bytes)
            pieces = own.shape[2]
            parts = [
                field.permute(0, 2, 3, 1, 4).reshape(blocks, pieces, -1)
                for field in own.split(self.fields, -1)
            ]
            # four columns as one number: torch shifts and moves these as fast as one
            words = levels[:, first:last].contiguous().view(torch.int32)
            words, shift = words.view(blocks, BLOCK, pieces, size // 4), 0
            for bits in self.planes:
                plane = _plane(words >> shift, bits).permute(0, 2, 3, 1).contiguous()
                parts.append(plane.view(torch.uint8).view(blocks, pieces, -1))
                shift += bits
            together = torch.cat(parts, 2).view(blocks, -1)
            out[:, place : place + together.shape[1]] = together
            place += together.shape[1]
        return out

    def unpack(self, stored: Tensor, columns: int) -> Parts:
        """Levels [blocks · 32, K] and headers [blocks · 32, blocks of a row, bytes] of `pack`.

        Args:
            stored: uint8 [blocks of 32 outputs, bytes].
            columns: K.
        """
        blocks, place = len(stored), 0
        levels, headers = [], []
        for first, last, size in _pieces(columns):
            each, pieces = size // self.columns, (last - first) // size
            taken = BLOCK * self.row_bytes(last - first)
            data = stored[:, place : place + taken].reshape(blocks, pieces, -1)
            place += taken
            sizes = [BLOCK * each * field for field in self.fields]
            sizes += [BLOCK * size * bits // 8 for bits in self.planes]
            parts = data.split(sizes, 2)
            fields = [
                part.reshape(blocks, pieces, each, BLOCK, -1) for part in parts[: len(self.fields)]
            ]
            own = torch.cat(fields, -1).permute(0, 3, 1, 2, 4)
            headers.append(own.reshape(blocks * BLOCK, -1, self.header_bytes))
            found, shift = torch.zeros((), dtype=torch.uint8), 0
            for bits, part in zip(self.planes, parts[len(self.fields) :], strict=True):
                units = part.reshape(blocks, pieces, -1, 1, BLOCK, 4)
                places = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1, 1)
                plane = (units >> places) & ((1 << bits) - 1)
                # [blocks, pieces, units, quads, 32, 4] → [blocks, 32, pieces, columns]
                plane = plane.permute(0, 4, 1, 2, 3, 5).reshape(blocks, BLOCK, pieces, size)
                found = found | plane << shift
                shift += bits
            levels.append(found.reshape(blocks * BLOCK, -1))
        return torch.cat(levels, 1), torch.cat(headers, 1)


def _pieces(columns: int) -> list[tuple[int, int, int]]:
    """First, last and size of pieces of columns that lie together."""
    whole = columns // TOGETHER * TOGETHER
    found = [(0, whole, TOGETHER)] if whole else []
    return found + ([(whole, columns, columns - whole)] if columns > whole else [])


def _plane(words: Tensor, bits: int) -> Tensor:
    """Units [..., units] int32 of the low bits of levels, four of which are a word [..., K / 4]."""
    # 15 is 0x0f0f0f0f; of 8 bits, -1 has all
    mask = ((1 << bits) - 1) * 0x01010101 if bits < 8 else -1
    quads = words.unflatten(-1, (-1, 8 // bits)) & mask
    found = quads[..., 0].clone()
    for i in range(1, 8 // bits):
        found |= quads[..., i] << (i * bits)
    return found


def half(headers: Tensor, place: int) -> Tensor:
    """[n, 1] float32 of a field in fp16."""
    return headers[:, place : place + 2].contiguous().view(torch.float16).float()


def take_bits(data: Tensor, width: int, bits: int) -> Tensor:
    """Numbers [n, …] of bytes [n, bytes]: of each `width` bytes the lowest bits, then the next."""
    places = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1)
    found = (data.reshape(len(data), -1, 1, width) >> places) & ((1 << bits) - 1)
    return found.flatten(1)


def _cat(*parts: Tensor) -> Tensor:
    return torch.cat(parts, 1)


def _nibbles(header: int) -> Callable[[Tensor], Parts]:
    """Headers, then 32 or 256 nibbles, low ones of 16 bytes first."""
    return lambda blocks: (blocks[:, :header], take_bits(blocks[:, header:], 16, 4))


def _split_5(header: int) -> Callable[[Tensor], Parts]:
    def split(blocks: Tensor) -> Parts:
        high, low = blocks[:, header : header + 4], blocks[:, header + 4 :]
        return blocks[:, :header], take_bits(low, 16, 4) | take_bits(high, 1, 1) << 4

    return split


def _split_8(blocks: Tensor) -> Parts:
    return blocks[:, :2], blocks[:, 2:] ^ 128


def _split_2_k(blocks: Tensor) -> Parts:
    return _cat(blocks[:, 80:], blocks[:, :16]), take_bits(blocks[:, 16:80], 32, 2)


def _split_3_k(blocks: Tensor) -> Parts:
    levels = take_bits(blocks[:, 32:96], 32, 2) | take_bits(blocks[:, :32], 32, 1) << 2
    return _cat(blocks[:, 108:], blocks[:, 96:108]), levels


def _split_4_k(blocks: Tensor) -> Parts:
    return blocks[:, :16], take_bits(blocks[:, 16:], 32, 4)


def _split_5_k(blocks: Tensor) -> Parts:
    levels = take_bits(blocks[:, 48:], 32, 4) | take_bits(blocks[:, 16:48], 32, 1) << 4
    return blocks[:, :16], levels


def _split_6_k(blocks: Tensor) -> Parts:
    levels = take_bits(blocks[:, :128], 64, 4) | take_bits(blocks[:, 128:192], 32, 2) << 4
    return _cat(blocks[:, 208:], blocks[:, 192:208]), levels


def _split_iq4_xs(blocks: Tensor) -> Parts:
    return blocks[:, :8], take_bits(blocks[:, 8:], 16, 4)


def _of_halves(headers: Tensor) -> tuple[Tensor, Tensor | None]:
    return half(headers, 0), -half(headers, 2) if headers.shape[1] > 2 else None


def _of_2_k(headers: Tensor) -> tuple[Tensor, Tensor | None]:
    packed = headers[:, 4:]
    return half(headers, 0) * (packed & 15).float(), half(headers, 2) * (packed >> 4).float()


def _of_3_k(headers: Tensor) -> tuple[Tensor, Tensor | None]:
    scales = take_bits(headers[:, 2:10], 8, 4) | take_bits(headers[:, 10:], 4, 2) << 4
    return half(headers, 0) * (scales.float() - 32), None


def _of_4_k(headers: Tensor) -> tuple[Tensor, Tensor | None]:
    scale, least, both = headers[:, 4:8], headers[:, 8:12], headers[:, 12:]
    scales = _cat(scale & 63, (both & 15) | (scale >> 6) << 4)
    minima = _cat(least & 63, (both >> 4) | (least >> 6) << 4)
    return half(headers, 0) * scales.float(), half(headers, 2) * minima.float()


def _of_6_k(headers: Tensor) -> tuple[Tensor, Tensor | None]:
    scales = headers[:, 2:].contiguous().view(torch.int8)
    return half(headers, 0) * scales.float(), None


def _of_iq4_xs(headers: Tensor) -> tuple[Tensor, Tensor | None]:
    # 16 bits of high parts, 8 nibbles of low ones
    scales = take_bits(headers[:, 4:], 1, 4) | take_bits(headers[:, 2:4], 1, 2) << 4
    return half(headers, 0) * (scales.float() - 32), None


def _of_mxfp4(headers: Tensor) -> tuple[Tensor, Tensor | None]:
    # half of 2^(e - 127), since levels are twice those of e2m1; the first two are subnormal
    exponents = headers.int()
    bits = torch.where(exponents < 2, 1 << 21 << exponents, (exponents - 1) << 23)
    return bits.view(torch.float32), None


_BYTE = (1,)
_ALL = (
    BlockFormat("q4_0", 32, 32, (2,), (4,), 8, _nibbles(2), _of_halves),
    BlockFormat("q4_1", 32, 32, (2, 2), (4,), 0, _nibbles(4), _of_halves, True),
    BlockFormat("q5_0", 32, 32, (2,), (4, 1), 16, _split_5(2), _of_halves),
    BlockFormat("q5_1", 32, 32, (2, 2), (4, 1), 0, _split_5(4), _of_halves, True),
    BlockFormat("q8_0", 32, 32, (2,), (8,), 128, _split_8, _of_halves),
    BlockFormat("q2_k", 256, 16, (2, 2, *_BYTE * 16), (2,), 0, _split_2_k, _of_2_k, True),
    BlockFormat("q3_k", 256, 16, (2, *_BYTE * 12), (2, 1), 4, _split_3_k, _of_3_k),
    BlockFormat("q4_k", 256, 32, (2, 2, *_BYTE * 12), (4,), 0, _split_4_k, _of_4_k, True),
    BlockFormat("q5_k", 256, 32, (2, 2, *_BYTE * 12), (4, 1), 0, _split_5_k, _of_4_k, True),
    BlockFormat("q6_k", 256, 16, (2, *_BYTE * 16), (4, 2), 32, _split_6_k, _of_6_k),
    BlockFormat("iq4_nl", 32, 32, (2,), (4,), 127, _nibbles(2), _of_halves, False, IQ4),
    BlockFormat("iq4_xs", 256, 32, (2, 2, *_BYTE * 4), (4,), 127, _split_iq4_xs, _of_iq4_xs,
                False, IQ4),
)  # fmt: skip
FORMATS = {item.name: item for item in _ALL}
# of files alone: engines have a layout of their own for it, of the same size
MXFP4 = BlockFormat(
    "mxfp4", 32, 32, (1,), (4,), 12, _nibbles(1), _of_mxfp4, False, (*_TWICE_E2M1, *_NEGATIVE)
)
