"""A quantized checkpoint's own integers, row by row while they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch

from specc.artifact.decoders.decoded_reader import row_ranges
from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.integers import Integers
from specc.artifact.nonfinite import NonFinite, refuse_integers
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.safetensors_io import TensorReader
from specc.artifact.tensor_part import Range
from specc.errors import WeightError


@runtime_checkable
class IntegerReader(Protocol):
    """What reads weights that are integers where they are stored: a checkpoint, or an engine."""

    @property
    def stored(self) -> TensorReader:
        """What `DecodedWeight.integers` reads them with."""

    def decoded(self, key: str) -> DecodedWeight | None:
        """The quantized weight of this name; None where there is a plain tensor."""

    def location(self, key: str | None = None) -> str:
        """Where it lies, for people."""


def integer_rows(
    reader: IntegerReader, parts: Sequence[tuple[str, Range | None]], layout: QuantizedLayout
) -> Iterator[Integers]:
    """Rows of weights, those of one after those of the other.

    Args:
        reader: of the checkpoint, or of an engine.
        parts: quantized weights by name, and the range of their first dimension that is taken;
            None is all of it. Of stacked experts that dimension counts experts.
        layout: of all of them.
    Returns:
        not more at a time than 16 MB of values, or one expert.
    Raises:
        WeightError: scales that are not finite, or NaN among the numbers.
    """
    for name, rows in parts:
        weight = reader.decoded(name)
        assert weight is not None
        for first, last in row_ranges(weight, *(rows or (0, weight.shape[0]))):
            item = weight.integers(reader.stored, first, last)
            if not bool(item.scales.isfinite().all()):
                refuse_integers(_nonfinite(reader, weight, item, first))
            if layout.is_float and layout.bits == 8 and bool((item.levels & 127 == 127).any()):
                raise _not_a_number(reader, weight, item, first)
            yield item


def _not_a_number(
    reader: IntegerReader, weight: DecodedWeight, item: Integers, first: int
) -> WeightError:
    row, column = (item.levels & 127 == 127).nonzero()[0].tolist()
    return WeightError(
        f"{weight.tensors[0]} in {reader.location(weight.name)} holds NaN, the first at"
        f" [{first + row}, {column}]",
        "finite weights",
        "download or save the checkpoint again",
    )


def _nonfinite(
    reader: IntegerReader, weight: DecodedWeight, item: Integers, first: int
) -> NonFinite:
    scales, place = item.scales, (~item.scales.isfinite()).nonzero()[0].tolist()
    counts = int(scales.isnan().sum()), int(scales.isinf().sum()), 0
    index: tuple[int, ...] = (first + place[0], place[1])
    if len(weight.shape) == 3:
        outputs = weight.outputs
        index = (first + place[0] // outputs, place[0] % outputs, place[1])
    location = reader.location(weight.name)
    return NonFinite(f"the scales of {weight.name}", location, *counts, index, torch.float32)
