"""Where an engine has the bytes of ggml's blocks, and parts of rows that are cut and joined."""

from __future__ import annotations

import pytest
import torch

from specc.artifact.block_formats import FORMATS
from specc.artifact.decoders.kept_integers import KeptIntegers
from specc.artifact.integers import Integers
from specc.artifact.packed_stream import packed_stream, zero_rows
from specc.artifact.quantized_layout import QuantizedLayout, dequantize, unpack


def draw(name: str, rows: int, columns: int) -> Integers:
    own = FORMATS[name]
    data = torch.randint(0, 256, (rows, own.row_bytes(columns)), dtype=torch.uint8)
    return Integers(*own.parts(data))


@pytest.mark.parametrize("name", FORMATS)
def test_places_of_an_output(name) -> None:
    """By the words of the module: fields of all outputs first, then planes of levels."""
    own, columns, output = FORMATS[name], 512 if FORMATS[name].columns == 256 else 416, 21
    item = draw(name, 32, columns)
    (stored,) = own.pack(item.levels, item.scales).tolist()
    place = 0
    for first in range(0, columns, 256):
        size = min(256, columns - first)
        count = size // own.columns
        headers = item.scales[output, first // own.columns :][:count].tolist()
        byte = 0
        for width in own.fields:
            for block in range(count):
                begin = place + (block * 32 + output) * width
                assert stored[begin : begin + width] == headers[block][byte : byte + width]
            place, byte = place + count * 32 * width, byte + width
        levels, shift = item.levels[output, first : first + size].tolist(), 0
        for bits in own.planes:
            for column in range(size):
                unit, rest = divmod(column, 32 // bits)
                value = stored[place + (unit * 32 + output) * 4 + rest % 4] >> (rest // 4 * bits)
                mask = (1 << bits) - 1
                assert value & mask == levels[column] >> shift & mask, (bits, column)
            place, shift = place + size * bits // 8 * 32, shift + bits
    assert place == len(stored)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_come_back_from_blocks(name) -> None:
    """Rows that are cut anywhere, columns of whole blocks, and what pads a weight."""
    torch.manual_seed(1)
    layout, own = QuantizedLayout.named(name), FORMATS[name]
    shape = 70, 3 * 256
    item = draw(name, *shape)
    chunks = packed_stream((item.rows(a, b) for a, b in ((0, 7), (7, 64), (64, 70))), layout, 70)
    data = bytearray(b"".join(map(bytes, chunks)))
    stored = torch.frombuffer(data, dtype=torch.uint8).view(layout.stored_shape(shape))
    levels, headers, _ = unpack(stored, shape, layout)
    assert torch.equal(levels, item.levels)
    assert torch.equal(headers, item.scales)
    cut = item.columns(((512, 768), (0, own.columns)), layout)
    want = own.numbers(item.levels, item.scales)
    found = own.numbers(cut.levels, cut.scales)
    assert torch.equal(
        found.nan_to_num(3), torch.cat([want[:, 512:], want[:, : own.columns]], 1).nan_to_num(3)
    )
    (padding,) = packed_stream([zero_rows(5, 256, layout)], layout, 5)
    zeros = torch.frombuffer(bytearray(padding), dtype=torch.uint8)
    assert (dequantize(zeros.view(1, -1), (5, 256), layout) == 0).all()


def test_layouts_of_names() -> None:
    assert QuantizedLayout.named("q6_k") == QuantizedLayout(6, 16, format="q6_k")
    assert QuantizedLayout.named("q6_k").facts == (6, 16, False, False, 0, "q6_k")
    assert QuantizedLayout.named("int4-g64").facts == (4, 64, False, False)
    for wrong in ({"bits": 4, "group": 32, "format": "q6_k"}, {"bits": 4, "format": "q9_k"}):
        with pytest.raises(ValueError, match="no blocks q"):
            QuantizedLayout(**wrong)


@pytest.mark.parametrize(
    ("name", "kinds", "held"),
    [
        ("q4_0", ("int8", "int4"), "int4-g32"),
        ("q4_0", ("int8",), None),
        ("iq4_xs", ("int8", "int4"), "int8-g32"),
        ("q4_k", ("int8", "int4"), None),
        ("q6_k", ("int8", "int4"), None),
        ("q6_k", ("int8", "ggml"), "q6_k"),
        ("int4-g64", (), "int4-g64"),
    ],
)
def test_what_backends_hold(name, kinds, held) -> None:
    found = KeptIntegers(QuantizedLayout.named(name), b"order").held_as(kinds)
    assert (None if found is None else found.layout.name) == held
    assert found is None or found.order == b"order"
