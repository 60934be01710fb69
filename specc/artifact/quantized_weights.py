"""Quantized weights of an engine's file: what of a checkpoint they are, and their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from specc.artifact.decoders.decoded_reader import row_ranges
from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.kept_integers import KeptIntegers
from specc.artifact.integers import Integers, widened
from specc.artifact.nonfinite import NonFinite, refuse_integers
from specc.artifact.packed_stream import packed_stream, rounded_matrices, rounded_rows, zero_rows
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.safetensors_io import Buffer, TensorReader
from specc.artifact.tensor_part import Range
from specc.artifact.weight_spec import QuantizedPart, Source, WeightSpec
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


def kept_integers(sources: Sequence[Source], reader: TensorReader) -> KeptIntegers | None:
    """How an engine holds a quantized checkpoint's own integers and scales of these sources.

    None where a part is not quantized, or not in rows, or parts are quantized in different ways.
    """
    if not isinstance(reader, IntegerReader):
        return None
    found: set[KeptIntegers | None] = set()
    for source in sources:
        if source.zeros:
            continue
        weight = reader.decoded(source.name)
        found.add(None if weight is None or source.transpose else KeptIntegers.of(weight))
    return found.pop() if len(found) == 1 else None


def quantized_chunks(
    spec: WeightSpec, reader: TensorReader, chunks: Iterable[Buffer]
) -> Iterator[Buffer]:
    """The bytes of a quantized weight in blocks.

    Args:
        reader: the checkpoint, whose own integers are taken where it has them in this layout.
        chunks: the weight's values in its dtype as its sources have them, rows or whole matrices;
            not asked for where integers are taken.
    Raises:
        WeightError: values that are not finite.
    """
    layout, part = spec.quantized, spec.part
    assert layout is not None
    outputs, columns = part.shape if part is not None else spec.shape[-2:]
    kept, plain = kept_integers(spec.sources, reader), layout.as_blocks
    if kept is not None and plain in (kept.layout, kept.layout.widened):
        assert isinstance(reader, IntegerReader)
        rows = _kept_rows(spec.sources, reader, columns, kept.layout)
        if plain != kept.layout:
            own = kept.layout
            rows = (widened(item, own) for item in rows)
    elif spec.is_turned:
        rows = rounded_matrices(chunks, (outputs, columns), spec.dtype, layout)
    else:
        rows = rounded_rows(chunks, columns, spec.dtype, layout)
    if part is not None:
        rows = _parts(rows, part, layout)
    return packed_stream(rows, layout, spec.shape[-2])


def _kept_rows(
    sources: Sequence[Source], reader: IntegerReader, columns: int, layout: QuantizedLayout
) -> Iterator[Integers]:
    for source in sources:
        if source.zeros:
            yield zero_rows(source.zeros // columns, columns, layout)
            continue
        ranges = (source.rows,) if source.part is None else source.part.vectors
        yield from integer_rows(reader, [(source.name, rows) for rows in ranges], layout)


def _parts(
    items: Iterable[Integers], part: QuantizedPart, layout: QuantizedLayout
) -> Iterator[Integers]:
    """A rank's rows and columns of whole matrices, or of rows that are its own."""
    outputs, place = part.shape[0], 0
    for item in items:
        own = item.columns(part.columns, layout)
        if not part.rows:
            yield own
            continue
        count = len(own.levels)
        # of a matrix after the other; an item may hold a part of one, or several
        for base in range(place // outputs * outputs, place + count, outputs):
            for start, stop in part.rows:
                first, last = max(base + start - place, 0), min(base + stop - place, count)
                if first < last:
                    yield own.rows(first, last)
        place += count


def integer_rows(
    reader: IntegerReader, parts: Sequence[tuple[str, Range | None]], layout: QuantizedLayout
) -> Iterator[Integers]:
    """Rows of weights, those of one after those of the other.

    Args:
        parts: quantized weights by name, and the range of their first dimension that is taken;
            None is all of it. Of stacked experts that dimension counts experts.
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
            if not bool((scales := _factors(item, layout)).isfinite().all()):
                refuse_integers(_nonfinite(reader, weight, scales, first))
            if layout.is_float and layout.bits == 8 and bool((item.levels & 127 == 127).any()):
                raise _not_a_number(reader, weight, item, first)
            yield item


def _factors(item: Integers, layout: QuantizedLayout) -> Tensor:
    """Scales [n, G]; where groups have minima, these beside them."""
    if layout.blocks is None:
        return layout.scales(item.scales)
    scales, minima = layout.blocks.factors(item.scales)
    return scales if minima is None else torch.cat([scales, minima], 1)


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
    reader: IntegerReader, weight: DecodedWeight, scales: Tensor, first: int
) -> NonFinite:
    place = (~scales.isfinite()).nonzero()[0].tolist()
    counts = int(scales.isnan().sum()), int(scales.isinf().sum()), 0
    index: tuple[int, ...] = (first + place[0], place[1])
    if len(weight.shape) == 3:
        outputs = weight.outputs
        index = (first + place[0] // outputs, place[0] % outputs, place[1])
    location = reader.location(weight.name)
    return NonFinite(f"the scales of {weight.name}", location, *counts, index, torch.float32)
