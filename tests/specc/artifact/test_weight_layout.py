"""Blocks of outputs: where each value of a weight lies, and the same from a stream."""

from __future__ import annotations

import pytest
import torch

from specc.artifact import weight_layout
from specc.artifact.safetensors_io import tensor_bytes
from specc.artifact.weight_layout import (
    BLOCK,
    UNITS,
    blocks_of_stream,
    blocks_shape,
    from_blocks,
    to_blocks,
)

SHAPES = [(32, 4), (1, 1), (31, 5), (33, 6), (70, 3), (96, 128), (5, 0)]


@pytest.mark.parametrize("dtype", UNITS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_value_has_its_place_and_the_rest_is_zero(shape, dtype) -> None:
    weight = torch.randn(shape).to(dtype)
    blocks = to_blocks(weight)
    assert blocks.is_contiguous()
    assert blocks.shape == blocks_shape(shape, dtype)
    unit = UNITS[dtype]
    left = blocks.clone()
    for n in range(shape[0]):
        for k in range(shape[1]):
            place = n // BLOCK, k // unit, n % BLOCK, k % unit
            assert blocks[place] == weight[n, k]
            left[place] = 0
    assert not left.any()
    assert torch.equal(from_blocks(blocks, shape), weight)


@pytest.mark.parametrize("dtype", UNITS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_a_stream_that_is_cut_anywhere(shape, dtype, cut, monkeypatch) -> None:
    # a few blocks at a time
    monkeypatch.setattr(weight_layout, "CHUNK_BYTES", 2048)
    weight = torch.randn(shape).to(dtype)
    data = bytes(tensor_bytes(weight))

    def chunks():
        buffer = bytearray(cut)
        for i in range(0, len(data), cut):
            part = data[i : i + cut]
            buffer[: len(part)] = part
            yield memoryview(buffer)[: len(part)]
            buffer[:] = b"\xff" * cut  # a chunk is valid until the next one is asked for

    found = b"".join(bytes(piece) for piece in blocks_of_stream(chunks(), shape, dtype))
    assert found == bytes(tensor_bytes(to_blocks(weight)))
