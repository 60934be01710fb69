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
    turned_matrices,
)

SHAPES = [(32, 4), (1, 1), (31, 5), (33, 6), (70, 3), (96, 128), (5, 0)]
# of experts
STACKS = [(3, 33, 6), (2, 5, 3), (2, 64, 4), (1, 70, 3), (0, 4, 4)]


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
@pytest.mark.parametrize("shape", STACKS, ids=str)
def test_each_matrix_of_a_stack_has_blocks_of_its_own(shape, dtype) -> None:
    weight = torch.randn(shape).to(dtype)
    blocks = to_blocks(weight)
    assert blocks.shape == blocks_shape(shape, dtype)
    alone = [to_blocks(matrix) for matrix in weight]
    assert torch.equal(blocks, torch.cat(alone) if alone else blocks)
    assert torch.equal(from_blocks(blocks, shape), weight)


@pytest.mark.parametrize("cut", [1, 7, 1000])
@pytest.mark.parametrize("shape", [(3, 4, 6), (1, 2), (2, 3, 0), (0, 2, 2)], ids=str)
def test_matrices_are_turned_while_they_are_read(shape, cut) -> None:
    weight = torch.randn(shape)
    data = bytes(tensor_bytes(weight.mT.contiguous()))
    chunks = [data[i : i + cut] for i in range(0, len(data), cut)]
    found = b"".join(bytes(piece) for piece in turned_matrices(chunks, shape, torch.float32))
    assert found == bytes(tensor_bytes(weight))


@pytest.mark.parametrize("dtype", UNITS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *STACKS], ids=str)
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


@pytest.mark.parametrize("dtype", list(UNITS))
def test_a_part_of_a_tensor_may_begin_anywhere(dtype):
    """Also within what four bytes hold, and with columns that are apart."""
    values = torch.arange(1, 1 + 33 * 8 * 2).to(dtype)
    shifted = values[1 : 1 + 33 * 8].view(33, 8)
    apart = values.view(33, 16)[:, ::2]
    for weight in (shifted, apart):
        assert torch.equal(from_blocks(to_blocks(weight), weight.shape), weight)
        assert torch.equal(to_blocks(weight), to_blocks(weight.clone()))
