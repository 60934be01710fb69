"""Weights of GGUF files that are computed: what the converter added, transposed, or took apart.

Such numbers are floats in an engine. Rows that are only in another order stay in their blocks, see
`gguf_rows`.
Source: llama.cpp, conversion/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.gguf_rows import RowOrder
from specc.artifact.safetensors_io import TensorReader

Make = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class MadeWeight(DecodedWeight):
    """A weight of the values of others.

    Args:
        parts: these, as the file has them.
        make: the weight, of all values of each part in float32.
    """

    parts: tuple[DecodedWeight, ...]
    make: Make = field(compare=False)

    @property
    def is_quantized(self) -> bool:
        return any(part.is_quantized for part in self.parts)

    def values(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        found = self.make([part.values(reader, 0, part.shape[0]) for part in self.parts])
        return found.view(self.shape)[start:stop].contiguous()


@dataclass(frozen=True)
class GivenNumber(DecodedWeight):
    """A parameter of one number, which a field of the file has in place of a tensor.

    Args:
        number: its value.
    """

    number: float

    @property
    def is_quantized(self) -> bool:
        return False

    def values(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        return torch.full(self.shape, self.number)


def less_one(parts: Sequence[Tensor]) -> Tensor:
    """A norm's weight w of a model that multiplies by 1 + w, which the file has as 1 + w."""
    return parts[0] - 1


def logarithm(order: RowOrder | None) -> Make:
    """What -exp was taken of, in an order of its items."""

    def make(parts: Sequence[Tensor]) -> Tensor:
        found = torch.log(-parts[0].flatten())
        return found if order is None else found[order(torch.arange(len(found)))]

    return make


def transpose(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].t()


def as_stored(parts: Sequence[Tensor]) -> Tensor:
    """The same numbers in another shape."""
    return parts[0]


def keys_and_values(parts: Sequence[Tensor]) -> Tensor:
    """What makes keys and values of a latent, head after head.

    Args:
        parts: keys [heads, R, key rows], transposed; values [heads, value rows, R].
    Returns:
        [heads, key rows + value rows, R].
    """
    keys, values = parts
    return torch.cat([keys.transpose(1, 2), values], 1)


def row_of(number: int) -> Make:
    """One row of a matrix."""
    return lambda parts: parts[0][number]


def in_order(order: RowOrder | None, count: int, width: int = 1) -> Make:
    """The first `count` rows of an order of rows of all parts, one part after the other.

    Args:
        order: which of them each row is; None is their own.
        count: rows.
        width: numbers of a row.
    """

    def make(parts: Sequence[Tensor]) -> Tensor:
        rows = torch.cat([part.reshape(-1, width) for part in parts])
        return rows[:count] if order is None else rows[order(torch.arange(count))]

    return make


def transposed_after(make: Make, shape: tuple[int, ...]) -> Make:
    """Stacked matrices of this shape, each transposed."""
    return lambda parts: make(parts).reshape(shape).transpose(1, 2)
