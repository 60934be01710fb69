"""Weights as integers in blocks: where each one lies, what rounding costs, and streams of rows."""

from __future__ import annotations

import pytest
import torch

from specc.artifact.quantized_layout import (
    QuantizedLayout,
    dequantize,
    pack,
    quantize,
    quantized_stream,
    unpack,
)

LAYOUTS = [
    QuantizedLayout(8),
    *(QuantizedLayout(4, group, zeros) for group in (32, 64, 128) for zeros in (False, True)),
]
SHAPES = [(32, 128), (70, 300), (1, 1), (33, 36)]


def random_parts(shape, layout):
    groups = layout.num_groups(shape[1])
    levels = torch.randint(0, 1 << layout.bits, shape, dtype=torch.uint8)
    scales = torch.randn(shape[0], groups)
    zeros = torch.randint(0, 16, (shape[0], groups), dtype=torch.int16)
    return levels, scales, zeros if layout.has_zeros else None


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda item: item.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_hold_what_was_put_in(shape, layout) -> None:
    levels, scales, zeros = random_parts(shape, layout)
    stored = pack(levels, scales, zeros, layout)
    assert (stored.dtype, tuple(stored.shape)) == (torch.uint8, layout.stored_shape(shape))
    found = unpack(stored, shape, layout)
    if zeros is None:
        zeros = torch.full_like(scales, 128 if layout.bits == 8 else 8, dtype=torch.int16)
    assert all(map(torch.equal, found, (levels, scales, zeros)))
    assert QuantizedLayout.named(layout.name) == layout


def test_where_bytes_lie() -> None:
    """Written out: a mistake that packing and unpacking share is seen here."""
    levels = torch.arange(33 * 40).remainder(16).view(33, 40).to(torch.uint8)
    layout = QuantizedLayout(4, 32, True)
    zeros = torch.arange(66, dtype=torch.int16).view(33, 2)
    stored = pack(levels, torch.arange(66.0).view(33, 2), zeros, layout)
    first, second = 128 + 64, 128 + 64 + 4 * 128  # headers of both groups
    assert stored.shape == (2, second + 128 + 64 + 128)
    assert stored[0, :128].view(torch.float32).tolist() == [2.0 * n for n in range(32)]
    assert stored[0, second : second + 128].view(torch.float32).tolist()[:2] == [1.0, 3.0]
    assert stored[0, 128:192].view(torch.int16).tolist() == [2 * n for n in range(32)]
    second_zeros = stored[0, second + 128 : second + 192].view(torch.int16)
    assert second_zeros.tolist() == [2 * n + 1 for n in range(32)]
    for output, column in ((0, 0), (0, 3), (5, 4), (31, 15), (7, 31)):
        unit, place = column // 8, column % 8
        byte = int(stored[0, first + 128 * unit + 4 * output + place % 4])
        assert (byte >> 4 if place >= 4 else byte & 15) == levels[output, column]
    assert stored[1, first] & 15 == levels[32, 0]
    bytes_ = pack(levels, torch.ones(33, 1), None, QuantizedLayout(8))
    assert bytes_.shape == (2, 128 + 10 * 128)
    assert bytes_[0, 128 + 128 * 3 + 4 * 6 + 2] == levels[6, 14]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda item: item.name)
def test_rounding_is_to_the_nearest_level(layout) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 200)
    weight[3] = 0
    found = dequantize(quantize(weight, layout), weight.shape, layout)
    width = layout.group or 200
    for first in range(0, 200, width):
        part, near = (item[:, first : first + width] for item in (weight, found))
        reach = part.abs().amax(1, keepdim=True)
        if layout.has_zeros:
            spread = part.amax(1, keepdim=True).clamp(min=0) - part.amin(1, keepdim=True).clamp(
                max=0
            )
            step = spread / 15
        else:
            step = reach / (127 if layout.bits == 8 else 8)
        error = (near - part).abs()
        # symmetric int4 has no +8: what is as large as the largest, of the other sign, is cut
        worst = 1.0 if layout.bits == 4 and not layout.has_zeros else 0.5
        assert (error <= step * (worst + 1e-5)).all()
        assert error.mean() <= 0.27 * step.mean()
    assert (found[3] == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=lambda item: item.name)
def test_a_stream_gives_the_bytes_of_the_whole(layout) -> None:
    weight = torch.randn(101, 70).to(torch.bfloat16)
    data = weight.view(torch.uint8).numpy().tobytes()
    chunks = [data[i : i + 997] for i in range(0, len(data), 997)]
    found = b"".join(
        bytes(piece) for piece in quantized_stream(chunks, (101, 70), torch.bfloat16, layout)
    )
    assert found == quantize(weight, layout).numpy().tobytes()


@pytest.mark.parametrize(("bits", "group", "zeros"), [(8, 32, False), (4, 0, False), (4, 48, True),
                                                      (8, 0, True), (3, 32, False)])  # fmt: skip
def test_layouts_that_no_kernel_reads(bits, group, zeros) -> None:
    with pytest.raises(ValueError, match="no weights of"):
        QuantizedLayout(bits, group, zeros)
