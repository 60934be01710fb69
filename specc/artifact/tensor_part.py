"""A part of a stored tensor: vectors along its last dimension, and columns of each.

Every byte of the part is read once, and none besides: a rank of a sharded engine reads its share of
a checkpoint.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

Range = tuple[int, int]


@dataclass(frozen=True)
class TensorPart:
    """What is taken of a tensor, seen as [vectors, columns]; one of one dimension is one vector.

    Args:
        vectors: ranges of them, in order.
        columns: ranges of the last dimension, the same of every vector.
    """

    vectors: tuple[Range, ...]
    columns: tuple[Range, ...]

    @classmethod
    def of_rows(cls, shape: tuple[int, ...], rows: Range | None = None) -> TensorPart:
        """All of a tensor of this shape, or its rows start … stop - 1 along dim 0."""
        if rows is not None and len(shape) == 1:
            return cls(((0, 1),), (rows,))
        first, last = rows or (0, shape[0] if len(shape) > 1 else 1)
        inner = math.prod(shape[1:-1])  # vectors of a row
        return cls(((first * inner, last * inner),), ((0, shape[-1] if shape else 1),))

    @property
    def num_vectors(self) -> int:
        return sum(stop - start for start, stop in self.vectors)

    @property
    def num_columns(self) -> int:
        return sum(stop - start for start, stop in self.columns)


def read_part(
    read: Callable[[int, memoryview], None],
    width: int,
    item_bytes: int,
    part: TensorPart,
    transpose: bool,
    chunk_bytes: int,
) -> Iterator[memoryview]:
    """Yield the bytes of a part in row-major order, in chunks of whole rows.

    Args:
        read: fills a buffer with the tensor's bytes from an offset on.
        width: of a stored vector.
        item_bytes: of an element.
        transpose: in the order of the part's transpose.
        chunk_bytes: of a chunk at most, unless a row is longer. A chunk is valid until the next
            one is asked for.
    """
    if not part.num_vectors or not part.num_columns:
        return
    if transpose:
        yield from _read_transposed(read, width, item_bytes, part, chunk_bytes)
    elif part.columns == ((0, width),):
        yield from _read_runs(read, width * item_bytes, part, chunk_bytes)
    else:
        yield from _read_vectors(read, width, item_bytes, part, chunk_bytes)


def _read_runs(
    read: Callable[[int, memoryview], None], row_bytes: int, part: TensorPart, chunk_bytes: int
) -> Iterator[memoryview]:
    rows = max(1, chunk_bytes // row_bytes)
    buffer = new_buffer(min(rows, part.num_vectors) * row_bytes)
    for start, stop in part.vectors:
        for first in range(start, stop, rows):
            chunk = buffer[: (min(first + rows, stop) - first) * row_bytes]
            read(first * row_bytes, chunk)
            yield chunk


def _read_vectors(
    read: Callable[[int, memoryview], None],
    width: int,
    item_bytes: int,
    part: TensorPart,
    chunk_bytes: int,
) -> Iterator[memoryview]:
    row_bytes = part.num_columns * item_bytes
    buffer = new_buffer(max(1, min(part.num_vectors, chunk_bytes // row_bytes)) * row_bytes)
    filled = 0
    for start, stop in part.vectors:
        for vector in range(start, stop):
            for first, last in part.columns:
                size = (last - first) * item_bytes
                read((vector * width + first) * item_bytes, buffer[filled : filled + size])
                filled += size
            if filled == len(buffer):
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def _read_transposed(
    read: Callable[[int, memoryview], None],
    width: int,
    item_bytes: int,
    part: TensorPart,
    chunk_bytes: int,
) -> Iterator[memoryview]:
    rows = part.num_vectors
    step = max(1, min(part.num_columns, chunk_bytes // (rows * item_bytes)))
    buffer = new_buffer(rows * step * item_bytes)
    output = torch.frombuffer(new_buffer(rows * step * item_bytes), dtype=torch.uint8)
    for start, stop in part.columns:
        for first in range(start, stop, step):
            count = min(step, stop - first)
            size, filled = count * item_bytes, 0
            for begin, end in part.vectors:
                for vector in range(begin, end):
                    offset = (vector * width + first) * item_bytes
                    read(offset, buffer[filled : filled + size])
                    filled += size
            items = torch.frombuffer(buffer[:filled], dtype=torch.uint8)
            turned = output[:filled].view(count, rows, item_bytes)
            turned.copy_(items.view(rows, count, item_bytes).transpose(0, 1))
            yield memoryview(output[:filled].numpy())  # type: ignore[arg-type]


def new_buffer(num_bytes: int) -> memoryview:
    """Allocate a large buffer whose memory goes back to the system when it is freed.

    Allocators keep freed blocks of this size, which add up to 100 MB and more over a checkpoint.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return memoryview(mmap.mmap(-1, num_bytes, flags=flags))
