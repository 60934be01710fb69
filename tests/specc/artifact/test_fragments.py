"""Weights in the order of fragments: each lane of a warp has what its instruction reads."""

from __future__ import annotations

import pytest
import torch

from specc.artifact.quantized_layout import QuantizedLayout, pack, unpack
from tests.specc.artifact.test_quantized_layout import LAYOUTS, random_parts

FRAGMENTS = [layout.as_fragments for layout in LAYOUTS if layout.has_fragments(256)]


@pytest.mark.parametrize("layout", FRAGMENTS, ids=lambda item: item.name)
@pytest.mark.parametrize("shape", [(32, 256), (70, 768), (1, 640)], ids=str)
def test_blocks_hold_what_was_put_in(shape, layout) -> None:
    levels, scales, zeros = random_parts(shape, layout)
    stored = pack(levels, scales, zeros, layout)
    assert (stored.dtype, tuple(stored.shape)) == (torch.uint8, layout.stored_shape(shape))
    found = unpack(stored, shape, layout)
    if zeros is None:
        zeros = torch.full((shape[0], layout.num_groups(shape[1])), layout.middle).short()
    assert all(map(torch.equal, found, (levels, scales, zeros)))
    assert QuantizedLayout.named(layout.name) == layout
    assert layout.name.endswith("-fragments")
    assert (layout.kind, layout.middle) == (
        layout.name.split("-")[0],
        zeros.new_tensor(layout.middle),
    )


@pytest.mark.parametrize("distance", [1, 32, 48, 96])
@pytest.mark.parametrize("name", ["int4-g64-zeros", "int8", "mxfp4", "nvfp4"])
def test_outputs_so_far_apart_share_a_block(name, distance) -> None:
    """What is stored is as if the weight's outputs had been in that order before."""
    plain = QuantizedLayout.named(f"{name}-fragments")
    layout = plain.paired(distance)
    assert (layout.name, layout.distance) == (f"{plain.name}-{distance}", distance)
    assert QuantizedLayout.named(layout.name) == layout == layout.unpaired.paired(distance)
    assert (layout.unpaired, plain.distance, plain.rows_together) == (plain, 16, 32)
    shape = (2 * layout.rows_together, 256)
    levels, scales, zeros = random_parts(shape, layout)
    order = [
        group * 2 * distance + half * distance + pair * 16 + row
        for group in range(2)
        for pair in range(distance // 16)
        for half in range(2)
        for row in range(16)
    ]
    if distance == 1:
        order = [
            32 * block + 2 * row + half
            for block in range(2)
            for half in range(2)
            for row in range(16)
        ]
    stored = pack(levels, scales, zeros, layout)
    own_zeros = None if zeros is None else zeros[order]
    assert stored.equal(pack(levels[order], scales[order], own_zeros, plain))
    if zeros is None:
        zeros = torch.full((shape[0], layout.num_groups(256)), layout.middle).short()
    assert all(map(torch.equal, unpack(stored, shape, layout), (levels, scales, zeros)))
    if distance == 1:  # in every block
        return
    with pytest.raises(ValueError, match=f"no pairs {distance} apart of"):
        pack(levels.repeat(2, 1)[: 3 * distance], scales.repeat(2, 1)[: 3 * distance],
             None if own_zeros is None else zeros.repeat(2, 1)[: 3 * distance], layout)  # fmt: skip


@pytest.mark.parametrize("order", ["-24", "-16", "-0", "-064", "64", "-", "-64-64", "-p64"])
def test_orders_of_blocks_that_nobody_knows(order) -> None:
    with pytest.raises(ValueError, match=r"apart|no blocks|no layout"):
        QuantizedLayout.named(f"int8-fragments{order}")


def level_of(halves: list[int], kind: str, register: int, which: int) -> int:
    """The level of a register in words of a lane, by the page's formulas and no table.

    Args:
        halves: of 16 bits, of the lane's 16 bytes.
        register: r + 2 h of an instruction.
        which: column e, of instruction c of span s: 4 s + 2 c + e; spans are of 4 bits alone.
    """
    e, c, span = which % 2, which // 2 % 2, which // 4
    r, h = register % 2, register // 2
    if kind == "int4":
        return halves[2 * (2 * span + c) + e] >> 4 * register & 15
    if kind.endswith("fp4"):
        half, other = (halves[2 * (2 * span + c) + x] for x in (e, 1 - e))
        own = [
            (half >> 6 & 7, half >> 15),
            (half & 7, half >> 9 & 1),
            (half >> 12 & 7, other >> 5 & 1),
            (half >> 10 & 1 | half >> 2 & 6, half >> 11 & 1),
        ]
        return own[register][0] | own[register][1] << 3
    half = halves[2 * (2 * c + h) + e]
    if kind == "int8":
        return (half >> 8 * r & 255) ^ 128
    if r == 0:
        return half >> 4 & 127 | half >> 8 & 128
    return half & 15 | half >> 8 & 112 | half >> 4 & 128


@pytest.mark.parametrize("kind", ["int4-g64", "mxfp4", "nvfp4", "int8", "fp8"])
def test_where_levels_lie(kind) -> None:
    """Every level of two blocks of several tiles, from its lane, register and half of a word."""
    layout = QuantizedLayout.named(kind).as_fragments
    levels, scales, _ = random_parts((64, 256), layout)
    stored = pack(levels, scales, None, layout)
    columns = 256 // layout.bits
    tiles = 256 // columns
    words = stored[:, -tiles * 1024 :].contiguous().view(torch.int16)
    words = (words.long() & 0xFFFF).view(2, tiles, 2, 8, 4, 8).tolist()
    seen = torch.zeros_like(levels)
    for block, tile, half, g, q in torch.cartesian_prod(
        *(torch.arange(n) for n in (2, tiles, 2, 8, 4))
    ).tolist():
        halves = words[block][tile][half][g][q]
        for register in range(4):
            r, h = register % 2, register // 2
            for which in range(4 * columns // 32):
                e, c, span = which % 2, which // 2 % 2, which // 4
                row = block * 32 + half * 16 + g + 8 * r
                column = tile * columns + span * 32 + 8 * q + 4 * c + 2 * h + e
                found = level_of(halves, layout.kind, register, which)
                assert found == levels[row, column], (row, column)
                seen[row, column] += 1
    assert bool((seen == 1).all())


def test_where_scales_and_zeros_lie() -> None:
    layout = QuantizedLayout.named("int4-g32-zeros-fragments")
    levels, scales, zeros = random_parts((40, 256), layout)
    stored = pack(levels, scales, zeros, layout)
    assert stored[0, :1024].view(torch.float32).view(8, 32).equal(scales[:32].T)
    added = stored[0, 1024:1536].view(torch.bfloat16).view(8, 2, 8, 2)
    for group, row in ((0, 0), (1, 9), (3, 30)):
        assert added[group, row // 16, row % 8, row % 16 // 8] == -128 - zeros[row, group]


@pytest.mark.parametrize(
    ("kind", "groups", "shift", "common", "times", "factor"),
    [("mxfp4", 1, 7, 0x3700, 2.0**110, 2.0**16), ("nvfp4", 2, 4, 0x7000, 2.0**116, 2.0**10)],
)
def test_where_scales_in_bytes_lie(kind, groups, shift, common, times, factor) -> None:
    """Of every group of two tiles: bits of bfloat16, in the word of its lanes."""
    layout = QuantizedLayout.named(f"{kind}-fragments")
    levels, scales, _ = random_parts((40, 256), layout)
    first = int(kind == "nvfp4")
    scales[3, first + 4] = 0
    stored = pack(levels, scales, None, layout)
    factors = scales[32:, 0] if first else torch.ones(8)
    assert stored[1, :32].view(torch.float32)[:8].equal(factor * factors)
    bytes_ = stored[0, 128 : 128 + 256 * groups].view(4, 2, groups, 8, 2, 2).long()
    for output in range(32):
        half, r, g = output // 16, output // 8 % 2, output % 8
        for group in range(8 * groups):
            tile, span, of_span = group // (2 * groups), group // groups % 2, group % groups
            byte = int(bytes_[tile, half, of_span, g, r, span])
            bits = torch.tensor((byte << shift) + common).to(torch.int16).view(torch.bfloat16)
            want = float(scales[output, first + group])
            assert float(bits) == want * times if want else byte == 0
    # a scale of 0 leaves no level, as no bits of a scale stand for 0
    found = unpack(stored, levels.shape, layout)
    width = 32 // groups
    assert bool((found[0][3, 4 * width : 5 * width] == 0).all())
    assert found[1].equal(scales)


def test_every_zero_point_is_stored() -> None:
    layout = QuantizedLayout.named("int4-g64-zeros-fragments")
    zeros = torch.arange(129, dtype=torch.int16)[:, None].repeat(1, 4)
    levels, ones = torch.zeros(129, 256, dtype=torch.uint8), torch.ones(129, 4)
    stored = pack(levels, ones, zeros, layout)
    assert unpack(stored, levels.shape, layout)[2].equal(zeros)
    with pytest.raises(ValueError, match="zero points from 0 to 129"):
        pack(levels, ones, zeros + zeros // 128, layout)


def test_scales_of_mxfp4_are_factors_of_bfloat16() -> None:
    """What has scale 0 is stored as 0: a kernel multiplies by a power of two all the same."""
    layout = QuantizedLayout.named("mxfp4-fragments")
    levels = torch.full((32, 256), 7, dtype=torch.uint8)
    for least, most in ((-109, 17), (-110, 0), (0, 18)):
        scales = torch.full((32, 8), 2.0**least)
        scales[1, 3], scales[2, 4] = 2.0**most, 0.0
        scales[0, 0] = 2.0**-126
        levels[0, :32] = 8
        if (least, most) == (-109, 17):
            found = unpack(pack(levels, scales, None, layout), levels.shape, layout)
            assert found[1].equal(scales)
            assert (int((found[0] != levels).sum()), int(found[0][2, 128:160].sum())) == (32, 0)
            continue
        with pytest.raises(ValueError, match=r"scales of fragments are not from 2\^-109 to 2\^17"):
            pack(levels, scales, None, layout)


def test_what_has_no_fragments() -> None:
    for name, columns in (("int4-g128", 320), ("int4-g64", 192), ("int8", 96), ("mxfp4", 352)):
        layout = QuantizedLayout.named(name)
        assert not layout.has_fragments(columns)
        assert layout.has_fragments(512)
        levels = torch.zeros(1, columns, dtype=torch.uint8)
        if columns == 320:  # whole tiles, and half a group
            continue
        with pytest.raises(ValueError, match=f"no fragments of {columns} columns"):
            pack(levels, torch.ones(1, layout.num_groups(columns)), None, layout.as_fragments)
    assert not QuantizedLayout.named("q4_k").has_fragments(256)
    assert len(FRAGMENTS) == 11
    for name in ("int8-zeros", "int8-g64", "fp8-g32"):
        assert not QuantizedLayout.named(name).has_fragments(256)
        with pytest.raises(ValueError, match="no fragments of 8 bits"):
            QuantizedLayout.named(f"{name}-fragments")
    with pytest.raises(ValueError, match="no blocks"):
        QuantizedLayout(8, 0, format="pieces")
