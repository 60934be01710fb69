"""A rank's weights, as sources in the checkpoint of the whole model.

Nothing is read here: what comes out says which vectors and columns of which tensors a rank's file
is made of, so that each rank's file is streamed and no weight is ever held whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from specc.artifact.safetensors_io import TensorReader
from specc.artifact.tensor_part import Range, TensorPart
from specc.artifact.weight_layout import turned
from specc.artifact.weight_spec import QuantizedPart, Source, WeightSpec
from specc.sharding.shard_plan import Cut, Interval, ShardPlan, WeightCut, joined, pieces_of


def rank_specs(
    specs: Iterable[WeightSpec],
    plan: ShardPlan,
    rank: int,
    reader: TensorReader,
    constant_key: str = "constant.{}",
) -> Iterator[WeightSpec]:
    """What to write for one rank.

    Args:
        specs: of the whole model; those of constants, too.
        rank: whose file it is.
        reader: the checkpoint; shapes alone are read.
        constant_key: keys of constants, from names of inputs.
    """
    own = {constant_key.format(item.name): item.value(rank) for item in plan.constants}
    cuts = plan.by_key
    for spec in specs:
        if spec.key in own:
            yield WeightSpec.from_tensor(spec.key, own[spec.key])
        elif spec.constant is not None:
            yield spec
        else:
            yield piece_of(spec, cuts[spec.key], rank, reader)


def piece_of(spec: WeightSpec, cut: WeightCut, rank: int, reader: TensorReader) -> WeightSpec:
    """A rank's part of one weight; see `WeightCut.take`, which does the same to a tensor."""
    if spec.quantized is not None:
        return _quantized_piece(spec, cut, rank, reader)
    if spec.is_turned:
        # the piece of what sources have
        cut_of_sources = replace(cut, shape=turned(cut.shape), cuts=turned(cut.cuts))
        whole = replace(spec, shape=spec.source_shape, is_turned=False)
        piece = piece_of(whole, cut_of_sources, rank, reader)
        return replace(piece, shape=cut.local_shape, is_turned=True)
    shape = cut.local_shape
    if cut.is_first_only and rank:
        return replace(spec, shape=shape, sources=(Source("", zeros=math.prod(shape)),))
    if not cut.is_cut:
        return spec
    leading, columns = cut.cuts[:-1], pieces_of(cut.cuts[-1], rank)
    vectors = _vector_ranges(leading, cut.shape[:-1], rank)
    sources, done = [], 0
    for segment in spec.sources:
        stored = reader.shape(segment.name)
        count = _num_vectors(segment, stored) if leading else 1
        own = _within(vectors, done, count)
        if leading:
            done += count
            if own:
                sources.append(_part(segment, stored, own, columns))
        else:
            # of a vector, sources follow each other along its only dimension
            first, last = segment.rows or (0, stored[0])
            if taken := _within(columns, done, last - first):
                shifted = tuple((first + a, first + b) for a, b in taken)
                sources.append(Source(segment.name, part=TensorPart(((0, 1),), shifted)))
            done += last - first
    found = sum(_size(source) for source in sources)
    if missing := math.prod(shape) - found:
        # what pads the end: rows that no token has
        sources.append(Source("", zeros=missing))
    return replace(spec, shape=shape, sources=tuple(sources))


def _quantized_piece(
    spec: WeightSpec, cut: WeightCut, rank: int, reader: TensorReader
) -> WeightSpec:
    """Rows are read whole, since all of their columns decide how they are rounded."""
    *_, outputs, width = cut.shape
    columns = tuple(pieces_of(cut.cuts[-1], rank))
    if spec.is_turned:
        # a row lies in all rows of what is stored, so that matrices are read whole
        rows = tuple(pieces_of(cut.cuts[-2], rank))
        return replace(
            spec, shape=cut.local_shape, part=QuantizedPart((outputs, width), rows, columns)
        )
    whole = replace(cut, cuts=(*cut.cuts[:-1], (Interval(0, width),)))
    piece = piece_of(replace(spec, quantized=None), whole, rank, reader)
    part = QuantizedPart((piece.shape[-2], width), (), columns)
    return replace(piece, shape=cut.local_shape, quantized=spec.quantized, part=part)


def _vector_ranges(leading: Sequence[Cut], shape: Sequence[int], rank: int) -> list[Range]:
    """Of all dimensions but the last, as one: which of its indices a rank holds."""
    ranges = [(0, 1)]
    for cut, size in zip(leading, shape, strict=True):
        pieces = pieces_of(cut, rank)
        if pieces == [(0, size)]:
            ranges = [(start * size, stop * size) for start, stop in ranges]
        else:
            ranges = [
                (index * size + first, index * size + last)
                for start, stop in ranges
                for index in range(start, stop)
                for first, last in pieces
            ]
    return joined(ranges)


def _within(ranges: Iterable[Range], first: int, count: int) -> tuple[Range, ...]:
    """What lies in `count` indices from `first` on, counted from there."""
    cut = ((max(start - first, 0), min(stop - first, count)) for start, stop in ranges)
    return tuple((start, stop) for start, stop in cut if start < stop)


def _num_vectors(source: Source, stored: Sequence[int]) -> int:
    """Vectors of the weight that a source holds, whole."""
    first, last = source.rows or (0, stored[0])
    return stored[1] if source.transpose else (last - first) * math.prod(stored[1:-1])


def _part(
    source: Source, stored: Sequence[int], vectors: Iterable[Range], columns: Iterable[Range]
) -> Source:
    """These vectors and columns of what a source holds, in terms of the stored tensor."""
    first = (source.rows or (0, 0))[0]
    if source.transpose:
        rows = tuple((first + a, first + b) for a, b in columns)
        return Source(source.name, transpose=True, part=TensorPart(rows, tuple(vectors)))
    first *= math.prod(stored[1:-1])
    own = tuple((first + a, first + b) for a, b in vectors)
    return Source(source.name, part=TensorPart(own, tuple(columns)))


def _size(source: Source) -> int:
    assert source.part is not None
    return source.part.num_vectors * source.part.num_columns
