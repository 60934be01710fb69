"""A quantized checkpoint's own integers in an engine's blocks, while they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from specc.artifact.decoders.decoded_reader import DecodedReader, row_ranges
from specc.artifact.decoders.decoded_weight import DecodedWeight, Integers
from specc.artifact.nonfinite import NonFinite, Report
from specc.artifact.quantized_layout import QuantizedLayout, pack
from specc.artifact.safetensors_io import Buffer, tensor_bytes
from specc.artifact.weight_layout import BLOCK
from specc.errors import WeightError


def integer_stream(
    reader: DecodedReader,
    parts: Sequence[tuple[str, tuple[int, int] | None]],
    layout: QuantizedLayout,
    report: Report,
) -> Iterator[Buffer]:
    """The bytes of one weight in blocks; no more of it is in memory than 16 MB of its values.

    Args:
        reader: of the checkpoint.
        parts: quantized weights by name, and the rows that are taken; one after the other along
            the outputs. A block may have rows of two of them.
        layout: of all of them, and of the result.
        report: called once for each part whose scales are not finite.
    """
    waiting: Integers | None = None
    for name, rows in parts:
        weight = reader.decoded(name)
        assert weight is not None
        is_reported = False
        for first, last in row_ranges(weight, *(rows or (0, weight.shape[0]))):
            item = weight.integers(reader.stored, first, last)
            if not is_reported and not bool(item.scales.isfinite().all()):
                is_reported = True
                report(_nonfinite(reader, weight, item, first))
            if layout.is_float and layout.bits == 8 and bool((item.levels & 127 == 127).any()):
                raise _not_a_number(reader, weight, item, first)
            waiting = item if waiting is None else _joined(waiting, item)
            whole = len(waiting.levels) // BLOCK * BLOCK
            if whole:
                yield _packed(_rows(waiting, 0, whole), layout)
                waiting = _rows(waiting, whole, len(waiting.levels))
    if waiting is not None and len(waiting.levels):
        yield _packed(waiting, layout)


def _packed(item: Integers, layout: QuantizedLayout) -> Buffer:
    # of one group, transposed tensors count as contiguous and cannot be seen as bytes
    scales = item.scales.clone(memory_format=torch.contiguous_format)
    zeros = item.zeros
    if zeros is not None:
        zeros = zeros.clone(memory_format=torch.contiguous_format)
    return tensor_bytes(pack(item.levels, scales, zeros, layout))


def _rows(item: Integers, start: int, stop: int) -> Integers:
    zeros = None if item.zeros is None else item.zeros[start:stop]
    return Integers(item.levels[start:stop], item.scales[start:stop], zeros)


def _joined(one: Integers, other: Integers) -> Integers:
    zeros = None
    if one.zeros is not None and other.zeros is not None:
        zeros = torch.cat([one.zeros, other.zeros])
    levels = torch.cat([one.levels, other.levels])
    return Integers(levels, torch.cat([one.scales, other.scales]), zeros)


def _not_a_number(
    reader: DecodedReader, weight: DecodedWeight, item: Integers, first: int
) -> WeightError:
    row, column = (item.levels & 127 == 127).nonzero()[0].tolist()
    return WeightError(
        f"{weight.tensors[0]} in {reader.location(weight.name)} holds NaN, the first at"
        f" [{first + row}, {column}]",
        "finite weights",
        "download or save the checkpoint again",
    )


def _nonfinite(
    reader: DecodedReader, weight: DecodedWeight, item: Integers, first: int
) -> NonFinite:
    scales, place = item.scales, (~item.scales.isfinite()).nonzero()[0].tolist()
    counts = int(scales.isnan().sum()), int(scales.isinf().sum()), 0
    index = (first + place[0], place[1])
    location = reader.location(weight.name)
    return NonFinite(f"the scales of {weight.name}", location, *counts, index, torch.float32)
