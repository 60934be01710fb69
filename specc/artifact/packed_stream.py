"""Quantized weights in an engine's blocks while they are read, a part of them at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from specc.artifact.integers import Integers
from specc.artifact.quantized_layout import QuantizedLayout, pack
from specc.artifact.rounding import round_weight
from specc.artifact.safetensors_io import CHUNK_BYTES, Buffer, tensor_bytes
from specc.artifact.weight_layout import BLOCK, regroup


def packed_stream(
    items: Iterable[Integers], layout: QuantizedLayout, outputs: int
) -> Iterator[Buffer]:
    """The bytes of matrices [outputs, K] in blocks, one matrix after the other.

    Args:
        items: their rows in order, cut anywhere; not more of them is kept than is stored together.
        layout: of all of them, and of the result.
        outputs: rows of a matrix, whose last block may have fewer than 32.
    """
    unit, place = layout.rows_together, 0
    waiting: list[Integers] = []
    for item in items:
        waiting.append(item)
        count = sum(len(part.levels) for part in waiting)
        while taken := _whole_rows(count, outputs - place, outputs, unit):
            joined = waiting[0] if len(waiting) == 1 else Integers.joined(waiting)
            yield _packed(joined.rows(0, taken), layout)
            waiting, count = [joined.rows(taken, count)], count - taken
            place = (place + taken) % outputs
    if any(len(part.levels) for part in waiting):
        yield _packed(Integers.joined(waiting), layout)


def _whole_rows(count: int, left: int, outputs: int, unit: int) -> int:
    """How many of `count` rows are whole units, where a matrix has `left` of its `outputs`."""
    if outputs % unit and count >= left:
        return left
    return count // unit * unit


def zero_rows(rows: int, columns: int, layout: QuantizedLayout) -> Integers:
    """What zeros are rounded to: [rows, columns] levels at their zero points, and scales of 0."""
    if (own := layout.blocks) is not None:
        headers = torch.zeros(rows, columns // own.columns, own.header_bytes, dtype=torch.uint8)
        return Integers(torch.zeros(rows, columns, dtype=torch.uint8), headers)
    groups = layout.num_groups(columns)
    levels = torch.full((rows, columns), 0 if layout.has_zeros else layout.middle)
    zeros = torch.zeros(rows, groups) if layout.has_zeros else None
    scales = torch.zeros(rows, groups + layout.has_factors)
    return Integers(levels.to(torch.uint8), scales, zeros)


def rounded_rows(
    chunks: Iterable[Buffer], columns: int, dtype: torch.dtype, layout: QuantizedLayout
) -> Iterator[Integers]:
    """Round rows [n, K] while they are read; no more of them is in memory than 16 MB.

    Args:
        chunks: bytes of rows, cut anywhere; each is valid until the next one is asked for.
        columns: K.
    """
    row_bytes = columns * dtype.itemsize
    if row_bytes == 0:
        return
    step = max(1, CHUNK_BYTES // (BLOCK * row_bytes)) * BLOCK * row_bytes
    for rows in regroup(chunks, step):
        yield round_weight(torch.frombuffer(rows, dtype=dtype).view(-1, columns), layout)


def rounded_matrices(
    chunks: Iterable[Buffer], shape: Sequence[int], dtype: torch.dtype, layout: QuantizedLayout
) -> Iterator[Integers]:
    """Round matrices that are stored as [K, N], one at a time: a column lies in all of its rows.

    Args:
        chunks: bytes of the matrices, one after the other.
        shape: [N, K].
    """
    outputs, columns = shape
    if not outputs * columns:
        return
    for matrix in regroup(chunks, outputs * columns * dtype.itemsize):
        values = torch.frombuffer(matrix, dtype=dtype).view(columns, outputs)
        yield round_weight(values.t().contiguous(), layout)


def quantized_stream(
    chunks: Iterable[Buffer], shape: Sequence[int], dtype: torch.dtype, layout: QuantizedLayout
) -> Iterator[Buffer]:
    """Quantize a weight while it is read; no more of it is in memory than a chunk.

    Args:
        chunks: its bytes in rows [..., N, K]; see `rounded_rows`.
        shape: [..., N, K].
    Returns:
        its bytes in blocks; as many as come from 16 MB of rows at a time, at least one block.
    """
    if math.prod(shape) == 0:
        return
    yield from packed_stream(rounded_rows(chunks, shape[-1], dtype, layout), layout, shape[-2])


def _packed(item: Integers, layout: QuantizedLayout) -> Buffer:
    # of one group, transposed tensors count as contiguous and cannot be seen as bytes
    scales = item.scales.clone(memory_format=torch.contiguous_format)
    zeros = item.zeros
    if zeros is not None:
        zeros = zeros.clone(memory_format=torch.contiguous_format)
    return tensor_bytes(pack(item.levels, scales, zeros, layout))
