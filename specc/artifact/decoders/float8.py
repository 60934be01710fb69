"""Weights of 8-bit floating-point numbers, e4m3: times one scale, one an output, or one a block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specc.artifact.decoders.decoded_weight import (
    DecodedWeight,
    check_group,
    group_owners,
    layout_of,
)
from specc.artifact.decoders.stored_tensors import read_rows, read_tensor, require
from specc.artifact.integers import Integers
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.safetensors_io import TensorReader

_SCALES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Float8Weight(DecodedWeight):
    """A matrix of e4m3 with scales.

    Args:
        blocks: rows and columns that share a scale; the last ones may be short. [N, K] has one.
    """

    blocks: tuple[int, int]

    @property
    def layout(self) -> QuantizedLayout | None:
        return layout_of(8, self.blocks[1], False, self.shape[1], is_float=True)

    def scales(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        """[rows, blocks of columns] float32 of rows start … stop - 1."""
        key, (height, width) = self.tensors[1], self.blocks
        count = -(-self.shape[1] // width)
        if len(reader.shape(key)) < 2 or reader.shape(key)[0] == 1:
            return read_tensor(reader, key).float().reshape(1, count).expand(stop - start, count)
        first, last = start // height, -(-stop // height)
        found = read_rows(reader, key, first, last).float().repeat_interleave(height, 0)
        return found[start - first * height :][: stop - start]

    def values(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        codes = read_rows(reader, self.tensors[0], start, stop).float()
        wide = self.scales(reader, start, stop).repeat_interleave(self.blocks[1], 1)
        return codes * wide[:, : self.shape[1]]

    def integers(self, reader: TensorReader, start: int, stop: int) -> Integers:
        layout, scales = self.layout, self.scales(reader, start, stop)
        assert layout is not None
        codes = read_rows(reader, self.tensors[0], start, stop).view(torch.uint8)
        if layout.group:
            scales = scales[:, group_owners(layout, self.blocks[1], self.shape[1])]
        return Integers(codes, scales)


def decode_float8(
    reader: TensorReader,
    weight: str,
    scale: str,
    scheme: str,
    blocks: tuple[int, int] | None,
    is_by_output: bool = False,
    scale_dtypes: tuple[torch.dtype, ...] = _SCALES,
) -> Float8Weight:
    """Check the tensors of a weight.

    Args:
        weight: name of the float8 tensor [N, K], and of the parameter.
        blocks: rows and columns that share a scale; None where there are no blocks.
        is_by_output: without blocks, whether each output has a scale or all have one.
        scale_dtypes: that scales may have.
    Raises:
        WeightError: a tensor is missing, or has another shape or type.
    """
    shape = reader.shape(weight)
    require(reader, weight, [shape] if len(shape) == 2 else [(0, 0)], (FLOAT8,), scheme)
    outputs, columns = shape
    wanted: list[tuple[int, ...]]
    if blocks is not None:
        wanted = [(-(-outputs // blocks[0]), -(-columns // blocks[1]))]
    elif is_by_output:
        wanted, blocks = [(outputs, 1)], (1, columns)
    else:
        wanted, blocks = [(1,), (), (1, 1)], (outputs, columns)
    require(reader, scale, wanted, scale_dtypes, scheme)
    check_group(blocks[1], columns, weight, reader.location(weight))
    return Float8Weight(weight, shape, (weight, scale), scheme, blocks)


FLOAT8 = torch.float8_e4m3fn
