"""Levels of a quantized weight in the order of fragments: as tensor cores take an operand.

The instruction mma.m16n8k16 takes its first operand, 16 rows by 16 columns of 16 bits, from four
registers of each of 32 lanes. Register r + 2 h of lane 4 g + q holds, of row g + 8 r, columns
2 q + 8 h and the next (PTX ISA, matrix fragments for mma.m16n8k16). Here a lane's words are in the
file what it makes those registers of, and its columns lie side by side: of 32 columns, a *span*,
lane q of four has 8 q … 8 q + 7, whichever columns an instruction thinks they are. So

    column 8 q + 4 c + 2 h + e  of a span is, of its instruction c, column e of register r + 2 h

and rows of x are taken as they are, 16 bytes for each lane.

A tile is 16 outputs and 512 bytes, 16 for each lane in their order: two spans of 4 bits, or one of
8 bits. A half of a word has what has one e: in 4 bits all four registers, so a word is an
instruction c; in 8 bits both rows r, and the word is (c, h). Where the bits of a level are in its
half is `_BITS`: as they are, or where few instructions put them in place. One sign of e2m1 is in
the other half of the word, where a rotation of the word moves it to. A weight has whole tiles, four
or more.

A block of 32 outputs has all scales of its columns, all zero points, then its tiles: of each step
of columns both halves of the block. Zero points, which int4 alone has, are what is added, as
bfloat16, to what a level becomes first: -(128 + z) to 128 + u; of a group and half of the block,
rows g and g + 8 side by side.

In e2m1 (mxfp4, nvfp4) a block begins with a factor for each output, and scales are bytes where zero
points would be. Of a tile, half, group of a span (mxfp4 has one, nvfp4 two, each of two lanes) and
g they are a word: of rows g and g + 8 both spans. A byte has bits of a bfloat16, `_SCALES`, that a
level's bits, which are times 2^-126, are multiplied by: the scale times a power of two that factors
make up for, exactly. 0 is scale 0, of levels that are 0.

The second half of a block has the 16 outputs after those of the first, or those a *distance* on:
what is computed of two outputs together then lies in one block, of a gate and what it multiplies,
or of both halves of a head that is rotated. With P = distance / 16, block b has

    outputs b // P · 2 · distance + b % P · 16 … + 15, and these + distance.

At a distance of 1, of gates and what they multiply in turn, the first half has the even ones of
outputs 32 b … 32 b + 31, the second half the odd ones.

Source: Marlin, arXiv:2408.11743 §3.4, for weights in the order of fragments.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from specc.artifact.byte_scales import GROUPS, MXFP4, NVFP4

OUTPUTS, SPAN = 32, 32
# of a half of a block, and between both halves where nothing else is said
HALF = 16
# between those that take turns
BESIDE = 1
# mantissa, exponent and sign: the first as bfloat16 has them, the second and the third at the same
# distances, the last but for its mantissa
_E2M1 = ((6, 7, 8, 15), (0, 1, 2, 9), (12, 13, 14, 5), (10, 3, 4, 11))
# kind → of each level of a half of a word, where its bits are, from the lowest on
_BITS = {
    "int4": tuple(tuple(range(4 * i, 4 * i + 4)) for i in range(4)),
    MXFP4: _E2M1,
    NVFP4: _E2M1,
    "int8": (tuple(range(8)), tuple(range(8, 16))),
    "fp8": ((4, 5, 6, 7, 8, 9, 10, 15), (0, 1, 2, 3, 12, 13, 14, 11)),
}
_BITS_OF = {"int4": 4, MXFP4: 4, NVFP4: 4, "int8": 8, "fp8": 8}
# bit of a half of e2m1 that is of the level in the other half
_SIGN_APART = 1 << 5
# kind → lowest bit of a scale's byte in a bfloat16, and what all of them have besides; what scales
# are times there, and factors
_SCALES = {MXFP4: (7, 0x3700, 2.0**110, 2.0**16), NVFP4: (4, 0x7000, 2.0**116, 2.0**10)}
# zero points: 128 + z is exact in bfloat16 up to this one
MOST_ZERO = 128
# scales of mxfp4 that are factors of bfloat16, with what values of its codes are multiplied by
_LEAST_SCALE, _MOST_SCALE = 2.0**-109, 2.0**17


def holds(columns: int, bits: int, group: int = 0) -> bool:
    """Whether a weight has whole tiles and groups of columns, and four tiles: a warp's step."""
    tile = 256 // bits
    return columns % max(tile, group) == 0 and columns >= 4 * tile


def check_factors(levels: Tensor, scales: Tensor) -> None:
    """Look at scales of mxfp4, each of which is a factor of bfloat16.

    Args:
        levels: [N, K] codes.
        scales: [N, G] float32, powers of two or 0.
    Raises:
        ValueError: some are too large, or too small for groups that are not all 0.
    """
    is_any = (levels & 7).unflatten(1, (scales.shape[1], -1)).amax(2) > 0
    is_small = is_any & (scales != 0) & (scales < _LEAST_SCALE)
    wrong = int((is_small | (scales > _MOST_SCALE)).sum())
    if wrong:
        raise ValueError(f"{wrong} scales of fragments are not from 2^-109 to 2^17")


def as_stored(rows: Tensor, distance: int) -> Tensor:
    """Rows of outputs [N, …] in the order of blocks; N is a multiple of twice the distance."""
    if distance == HALF:
        return rows
    if distance == BESIDE:
        return rows.unflatten(0, (-1, HALF, 2)).transpose(1, 2).reshape(rows.shape)
    return rows.unflatten(0, (-1, 2, distance // HALF, HALF)).transpose(1, 2).reshape(rows.shape)


def of_stored(rows: Tensor, distance: int) -> Tensor:
    """What `as_stored` was given."""
    if distance == HALF:
        return rows
    if distance == BESIDE:
        return rows.unflatten(0, (-1, 2, HALF)).transpose(1, 2).reshape(rows.shape)
    return rows.unflatten(0, (-1, distance // HALF, 2, HALF)).transpose(1, 2).reshape(rows.shape)


def pack(
    levels: Tensor, scales: Tensor, zeros: Tensor | None, kind: str, distance: int = HALF
) -> Tensor:
    """Put a quantized weight into such blocks.

    Args:
        levels: [blocks · 32, K] uint8.
        scales: [blocks · 32, G] float32, which are bytes in mxfp4 and nvfp4 (`byte_scales.py`), in
            nvfp4 after a factor. What has scale 0 there is 0, and stored so.
        zeros: [blocks · 32, G] integers, or None.
        kind: of `_BITS`.
        distance: of the halves of a block.
    Returns:
        uint8 [blocks, bytes of a block].
    Raises:
        ValueError: K is not of whole tiles, or N no multiple of twice the distance.
    """
    if not holds(levels.shape[1], _BITS_OF[kind]):
        raise ValueError(f"no fragments of {levels.shape[1]} columns of {kind}")
    blocks = len(levels) // OUTPUTS
    if distance != HALF:
        if len(levels) % (2 * distance):
            raise ValueError(f"no pairs {distance} apart of {len(levels)} outputs")
        levels, scales = as_stored(levels, distance), as_stored(scales, distance)
        zeros = None if zeros is None else as_stored(zeros, distance)
    in_bytes = None
    if kind in _SCALES:
        scales, in_bytes = _factors_and_scales(scales, kind)
        is_any = (in_bytes != 0).repeat_interleave(GROUPS[kind], 1)
        levels = levels * is_any
    scales = scales.contiguous()
    parts = [scales.view(blocks, OUTPUTS, -1).transpose(1, 2).contiguous().view(torch.uint8)]
    if zeros is not None:
        parts.append(_pack_zeros(zeros))
    if in_bytes is not None:
        parts.append(_pack_scales(in_bytes, kind))
    parts.append(_pack_levels(levels, kind))
    return torch.cat([part.reshape(blocks, -1) for part in parts], 1)


def unpack(
    stored: Tensor, columns: int, groups: int, kind: str, has_zeros: bool, distance: int = HALF
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What `pack` was given: levels, scales and zero points.

    Args:
        stored: uint8 [blocks, bytes of a block].
        columns: K.
        groups: G.
        kind: of `_BITS`.
        distance: of the halves of a block.
    """
    blocks = len(stored)
    in_bytes = kind in _SCALES
    scale_bytes = OUTPUTS * 4 * (1 if in_bytes else groups)
    zero_bytes = OUTPUTS * groups * (2 * has_zeros + in_bytes)
    level_bytes = OUTPUTS * columns * _BITS_OF[kind] // 8
    head, zeros, words = stored.split([scale_bytes, zero_bytes, level_bytes], 1)
    scales = head.contiguous().view(torch.float32)
    scales = scales.view(blocks, -1, OUTPUTS).transpose(1, 2).reshape(blocks * OUTPUTS, -1)
    if in_bytes:
        own = _unpack_scales(zeros, kind)
        scales = torch.cat([scales / _SCALES[kind][3], own], 1) if kind == NVFP4 else own
    levels, scales = (of_stored(x, distance) for x in (_unpack_levels(words, kind), scales))
    return levels, scales, of_stored(_unpack_zeros(zeros), distance) if has_zeros else None


def _pack_levels(levels: Tensor, kind: str) -> Tensor:
    """Levels [blocks · 32, K] uint8 as bytes [blocks, tiles · 1024]."""
    tables = _placed(kind)
    if kind == "int8":
        levels = levels ^ 128
    blocks = len(levels) // OUTPUTS
    if len(tables) == 4:
        # block, half, r, g, tile, span, q, c, h, e → block, tile, half, g, q, span, c, e, h, r
        parts = levels.view(blocks, 2, 2, 8, -1, 2, 4, 2, 2, 2)
        parts = parts.permute(0, 4, 1, 3, 6, 5, 7, 9, 8, 2)
    else:
        # block, half, r, g, tile, q, c, h, e → block, tile, half, g, q, c, h, e, r
        parts = levels.view(blocks, 2, 2, 8, -1, 4, 2, 2, 2)
        parts = parts.permute(0, 4, 1, 3, 5, 6, 7, 8, 2)
    parts = parts.reshape(-1, len(tables)).long()
    halves = tables[0][parts[:, 0]]
    for i, table in enumerate(tables[1:], 1):
        halves = halves | table[parts[:, i]]
    if kind in _SCALES:
        halves = _signs_exchanged(halves)
    return halves.view(torch.uint8)


def _signs_exchanged(halves: Tensor) -> Tensor:
    """Both halves of words with that bit of the other one; any integers, an even number of them."""
    pairs = halves.reshape(-1, 2)
    differ = (pairs[:, :1] ^ pairs[:, 1:]) & _SIGN_APART
    return (pairs ^ differ).view(halves.shape)


def _unpack_levels(stored: Tensor, kind: str) -> Tensor:
    """The levels [blocks · 32, K] uint8 that `_pack_levels` was given."""
    blocks = len(stored)
    halves = stored.contiguous().view(torch.int16).long() & 0xFFFF
    if kind in _SCALES:
        halves = _signs_exchanged(halves)
    levels = _taken(kind)[halves]
    if levels.shape[-1] == 4:
        levels = levels.view(blocks, -1, 2, 8, 4, 2, 2, 2, 2, 2)
        levels = levels.permute(0, 2, 9, 3, 1, 5, 4, 6, 8, 7)
    else:
        levels = levels.view(blocks, -1, 2, 8, 4, 2, 2, 2, 2)
        levels = levels.permute(0, 2, 8, 3, 1, 4, 5, 6, 7)
    levels = levels.reshape(blocks * OUTPUTS, -1)
    return levels ^ 128 if kind == "int8" else levels


def _pack_zeros(zeros: Tensor) -> Tensor:
    """Zero points [blocks · 32, G] as what is added for them, bfloat16 [blocks, G, half, g, r]."""
    added = (-128 - zeros.int()).bfloat16().view(-1, 2, 2, 8, zeros.shape[1]).permute(0, 4, 1, 3, 2)
    return added.contiguous().view(torch.uint8)


def _unpack_zeros(stored: Tensor) -> Tensor:
    """The zero points [blocks · 32, G] int16 that `_pack_zeros` was given."""
    added = stored.contiguous().view(torch.bfloat16).view(len(stored), -1, 2, 8, 2)
    added = added.permute(0, 2, 4, 3, 1).reshape(len(stored) * OUTPUTS, -1).to(torch.int16)
    return -128 - added


def _factors_and_scales(scales: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Factors [n, 1] float32 and bytes [n, G] of scales as `pack` has them, of e2m1."""
    shift, common, times, factor = _SCALES[kind]
    if kind == NVFP4:
        factors, scales = scales[:, :1] * factor, scales[:, 1:]
    else:
        factors = torch.full((len(scales), 1), factor)
    bits = (scales * times).bfloat16().view(torch.int16).int() - common
    return factors, torch.where(scales == 0, 0, bits >> shift).to(torch.uint8)


def _pack_scales(in_bytes: Tensor, kind: str) -> Tensor:
    """Bytes [blocks · 32, G] as [blocks, tile, half, group of a span, g, r, span]."""
    groups = SPAN // GROUPS[kind]
    # block, half, r, g, tile, span, group
    parts = in_bytes.view(-1, 2, 2, 8, in_bytes.shape[1] // (2 * groups), 2, groups)
    return parts.permute(0, 4, 1, 6, 3, 2, 5).contiguous()


def _unpack_scales(stored: Tensor, kind: str) -> Tensor:
    """The scales [blocks · 32, G] float32 that bytes of `_pack_scales` stand for."""
    shift, common, times, _ = _SCALES[kind]
    parts = stored.view(len(stored), -1, 2, SPAN // GROUPS[kind], 8, 2, 2)
    bits = parts.permute(0, 2, 5, 4, 1, 6, 3).reshape(len(stored) * OUTPUTS, -1).int()
    found = ((bits << shift) + common).to(torch.int16).view(torch.bfloat16).float()
    return torch.where(bits == 0, 0, found / times)


@functools.cache
def _placed(kind: str) -> tuple[Tensor, ...]:
    """Of each level of a half: level → its bits in place, int16."""
    tables = []
    for places in _BITS[kind]:
        levels = torch.arange(1 << len(places))
        bits = sum((levels >> j & 1) << place for j, place in enumerate(places))
        tables.append(torch.as_tensor(bits).to(torch.int16))
    return tuple(tables)


@functools.cache
def _taken(kind: str) -> Tensor:
    """Half of a word [65536] → its levels, uint8 [65536, 4 or 2]."""
    halves = torch.arange(1 << 16)
    levels = [
        torch.as_tensor(sum((halves >> place & 1) << j for j, place in enumerate(places)))
        for places in _BITS[kind]
    ]
    return torch.stack(levels, -1).to(torch.uint8)
