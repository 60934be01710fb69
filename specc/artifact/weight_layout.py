"""How a CPU engine stores the weight of a projection: in blocks of outputs, in the order of use.

A step multiplies a few rows with every weight once, so its time is that of reading them. Blocks of
32 outputs, one column after the other, are one stream of memory for a thread, and a register holds
one column of several outputs. A bfloat16 unit is a pair of neighboring columns, which is what the
dot product instructions of processors take.

Sources of the idea: "Anatomy of High-Performance Matrix Multiplication" (Goto, van de Geijn 2008),
section 4, packs for the same reason; here the packed form is what the file holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from specc.artifact.safetensors_io import CHUNK_BYTES, Buffer, tensor_bytes

BLOCK = 32
# columns that lie together for each output
UNITS = {torch.float32: 1, torch.bfloat16: 2}


def blocks_shape(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Shape [blocks, units, 32, columns of a unit] that a weight [N, K] has in blocks."""
    outputs, columns = shape
    unit = UNITS[dtype]
    return -(-outputs // BLOCK), -(-columns // unit), BLOCK, unit


def to_blocks(weight: Tensor) -> Tensor:
    """Put a weight [N, K] into blocks; what they have beyond N and K is zero."""
    blocks, units, _, unit = blocks_shape(weight.shape, weight.dtype)
    outputs, columns = weight.shape
    padding = (0, units * unit - columns, 0, blocks * BLOCK - outputs)
    if any(padding):
        weight = torch.nn.functional.pad(weight, padding)
    return weight.view(blocks, BLOCK, units, unit).transpose(1, 2).contiguous()


def from_blocks(blocks: Tensor, shape: Sequence[int]) -> Tensor:
    """The weight [N, K] that `to_blocks` was given; a copy."""
    outputs, columns = shape
    rows = blocks.transpose(1, 2).reshape(blocks.shape[0] * blocks.shape[2], -1)
    return rows[:outputs, :columns].contiguous()


def blocks_of_stream(
    chunks: Iterable[Buffer], shape: Sequence[int], dtype: torch.dtype
) -> Iterator[Buffer]:
    """Put a weight into blocks while it is read.

    Args:
        chunks: its bytes in rows [N, K]; they may be cut anywhere, and each is valid until the
            next one is asked for.
        shape: [N, K].
        dtype: of the weight.
    Returns:
        its bytes in blocks; as many as fit 16 MB at a time, at least one block.
    """
    row_bytes = shape[1] * dtype.itemsize
    if row_bytes == 0:
        return
    step = max(1, CHUNK_BYTES // (BLOCK * row_bytes)) * BLOCK * row_bytes
    for rows in regroup(chunks, step):
        values = torch.frombuffer(rows, dtype=dtype).view(-1, shape[1])
        yield tensor_bytes(to_blocks(values))


def regroup(chunks: Iterable[Buffer], size: int) -> Iterator[bytearray]:
    """The same bytes in pieces of `size`, the last one shorter."""
    piece = bytearray()
    for chunk in chunks:
        data = memoryview(chunk).cast("B")
        while data:
            taken = data[: size - len(piece)]
            piece += taken
            data = data[len(taken) :]
            if len(piece) == size:
                yield piece
                piece = bytearray()
    if piece:
        yield piece
