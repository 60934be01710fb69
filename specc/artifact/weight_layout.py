"""How a CPU engine stores the weight of a projection: in blocks of outputs, in the order of use.

A step multiplies a few rows with every weight once, so its time is that of reading them. Blocks of
32 outputs, one column after the other, are one stream of memory for a thread, and a register holds
one column of several outputs. A bfloat16 unit is a pair of neighboring columns, which is what the
dot product instructions of processors take.

The matrices of a mixture's experts are one weight [E, N, K]: the blocks of one expert follow those
of the one before, and each begins with a block of its own.

Sources of the idea: "Anatomy of High-Performance Matrix Multiplication" (Goto, van de Geijn 2008),
section 4, packs for the same reason; here the packed form is what the file holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from specc.artifact.safetensors_io import CHUNK_BYTES, Buffer, new_buffer, tensor_bytes

BLOCK = 32
# columns that lie together for each output
UNITS = {torch.float32: 1, torch.bfloat16: 2}


def blocks_shape(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Shape [blocks, units, 32, columns of a unit] that a weight [..., N, K] has in blocks."""
    *stack, outputs, columns = shape
    unit = UNITS[dtype]
    return math.prod(stack) * -(-outputs // BLOCK), -(-columns // unit), BLOCK, unit


def turned(sizes: tuple) -> tuple:
    """Sizes [..., N, K] of the transpose of matrices [..., K, N]; also what is cut along them."""
    return (*sizes[:-2], sizes[-1], sizes[-2])


def to_blocks(weight: Tensor) -> Tensor:
    """Put a weight [..., N, K] into blocks; what they have beyond N and K is zero."""
    blocks, units, _, unit = blocks_shape(weight.shape, weight.dtype)
    outputs, columns = weight.shape[-2:]
    padding = (0, units * unit - columns, 0, -outputs % BLOCK)
    if any(padding):
        weight = torch.nn.functional.pad(weight, padding)
    if not weight.numel():
        return weight.new_empty(blocks, units, BLOCK, unit)
    if weight.storage_offset() % unit:
        weight = weight.clone()
    # a unit of either type is four bytes; as one number, torch moves it several times faster
    words = weight.contiguous().view(-1, units * unit).view(torch.int32)
    moved = words.view(blocks, BLOCK, units).transpose(1, 2).contiguous()
    return moved.view(weight.dtype).view(blocks, units, BLOCK, unit)


def from_blocks(blocks: Tensor, shape: Sequence[int]) -> Tensor:
    """The weight [..., N, K] that `to_blocks` was given; a copy."""
    *stack, outputs, columns = shape
    _, units, _, unit = blocks.shape
    rows = blocks.transpose(1, 2).reshape(*stack, -(-outputs // BLOCK) * BLOCK, units * unit)
    return rows[..., :outputs, :columns].contiguous()


def blocks_of_stream(
    chunks: Iterable[Buffer], shape: Sequence[int], dtype: torch.dtype
) -> Iterator[Buffer]:
    """Put a weight into blocks while it is read.

    Args:
        chunks: its bytes in rows [..., N, K]; they may be cut anywhere, and each is valid until
            the next one is asked for.
        shape: [..., N, K].
    Returns:
        its bytes in blocks; as many as fit 16 MB at a time, at least one block, and of one matrix.
    """
    outputs, columns = shape[-2:]
    row_bytes = columns * dtype.itemsize
    if row_bytes == 0:
        return
    step = max(1, CHUNK_BYTES // (BLOCK * row_bytes)) * BLOCK
    of_matrix = [min(step, outputs - first) * row_bytes for first in range(0, outputs, step)]
    for rows in regroup(chunks, itertools.cycle(of_matrix)):
        values = torch.frombuffer(rows, dtype=dtype).view(-1, columns)
        yield tensor_bytes(to_blocks(values))


def turned_matrices(
    chunks: Iterable[Buffer], shape: Sequence[int], dtype: torch.dtype
) -> Iterator[Buffer]:
    """Transpose matrices while they are read; each of them is held whole.

    Args:
        chunks: bytes of matrices [..., K, N]; they may be cut anywhere.
        shape: [..., N, K].
    Returns:
        bytes of matrices [..., N, K].
    """
    outputs, columns = shape[-2:]
    for matrix in regroup(chunks, outputs * columns * dtype.itemsize):
        values = torch.frombuffer(matrix, dtype=dtype).view(columns, outputs)
        yield tensor_bytes(values.t().contiguous())


def regroup(chunks: Iterable[Buffer], sizes: int | Iterable[int]) -> Iterator[memoryview]:
    """The same bytes in pieces of these sizes (endless), or all of one size.

    The last may be shorter. A piece is valid until the next one is asked for: it is a chunk, where
    one has its size, and lies in one buffer otherwise.
    """
    sizes = itertools.repeat(sizes) if isinstance(sizes, int) else iter(sizes)
    size, filled = next(sizes, 0), 0
    buffer = memoryview(b"")
    for chunk in chunks:
        data = memoryview(chunk).cast("B")
        while data:
            if not filled and len(data) >= size and not data.readonly:
                yield data[:size]
                data, size = data[size:], next(sizes)
                continue
            if len(buffer) < size:
                larger = new_buffer(size)
                larger[:filled] = buffer[:filled]
                buffer = larger
            taken = data[: size - filled]
            buffer[filled : filled + len(taken)] = taken
            data, filled = data[len(taken) :], filled + len(taken)
            if filled == size:
                yield buffer[:size]
                size, filled = next(sizes), 0
    if filled:
        yield buffer[:filled]
