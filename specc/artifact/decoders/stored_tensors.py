"""Rows and columns of a checkpoint's tensors in memory, integers of words, and what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from specc.artifact.safetensors_io import TensorReader
from specc.artifact.tensor_part import TensorPart
from specc.errors import WeightError

_WORD = 32


def read_tensor(reader: TensorReader, key: str) -> Tensor:
    """A whole tensor: of small ones, such as column numbers and shapes."""
    return _tensor(reader.read_chunks(key), reader.dtype(key)).view(reader.shape(key))


def read_rows(reader: TensorReader, key: str, start: int, stop: int) -> Tensor:
    """Rows start … stop - 1 along dim 0."""
    values = _tensor(reader.read_chunks(key, rows=(start, stop)), reader.dtype(key))
    return values.view(stop - start, *reader.shape(key)[1:])


def read_vectors(reader: TensorReader, key: str, numbers: Tensor) -> Tensor:
    """Vectors along the last dimension, [n, width].

    Args:
        numbers: [n], of the vectors in row-major order; they rise.
    """
    width = reader.shape(key)[-1]
    ends = (numbers.diff() != 1).nonzero().flatten() + 1
    firsts = numbers[torch.cat([ends.new_zeros(1), ends])].tolist()
    lasts = numbers[torch.cat([ends - 1, ends.new_tensor([len(numbers) - 1])])].tolist()
    runs = tuple((first, last + 1) for first, last in zip(firsts, lasts, strict=True))
    part = TensorPart(runs, ((0, width),))
    return _tensor(reader.read_part(key, part), reader.dtype(key)).view(len(numbers), width)


def read_columns(reader: TensorReader, key: str, start: int, stop: int) -> Tensor:
    """Columns start … stop - 1 of a matrix [M, N]: [M, stop - start]."""
    count = reader.shape(key)[0]
    part = TensorPart(((0, count),), ((start, stop),))
    values = _tensor(reader.read_part(key, part), reader.dtype(key))
    return values.view(count, stop - start)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Integers of `bits` bits in int32 words along the last dimension, the lowest bits first.

    Args:
        words: [..., W] int32.
        bits: 4 or 8.
    Returns:
        uint8 [..., W · 32 / bits].
    """
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    fields = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return fields.to(torch.uint8).flatten(-2)


def num_words(count: int, bits: int) -> int:
    """Words that so many integers take; the last one may be part empty."""
    return -(-count * bits // _WORD)


def word_range(start: int, stop: int, bits: int) -> tuple[int, int]:
    """Words that integers start … stop - 1 lie in."""
    each = _WORD // bits
    return start // each, -(-stop // each)


def require(
    reader: TensorReader,
    key: str,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Iterable[torch.dtype],
    scheme: str,
) -> tuple[int, ...]:
    """Check a tensor that a quantized weight consists of; returns its shape.

    Args:
        shapes: of which it has one.
    Raises:
        WeightError: it is absent, or has another shape or type.
    """
    if key not in reader.keys():  # noqa: SIM118 - a reader is no mapping
        raise WeightError(
            f"{reader.location()} holds no tensor {key}",
            f"a tensor {key}, which weights have that are quantized as {scheme}",
            "download or save the checkpoint again; a layer that is not quantized has a tensor"
            " .weight of floating-point numbers",
        )
    shape, dtype, dtypes = reader.shape(key), reader.dtype(key), tuple(dtypes)
    if shape not in shapes or dtype not in dtypes:
        kinds = " or ".join(str(kind).removeprefix("torch.") for kind in dtypes)
        sizes = " or ".join(str(list(item)) for item in shapes)
        raise WeightError(
            f"{key} in {reader.location(key)} is {list(shape)} of"
            f" {str(dtype).removeprefix('torch.')}",
            f"{sizes} of {kinds}, for weights that are quantized as {scheme}",
            "pass the config.json of this checkpoint, or save the checkpoint again",
        )
    return shape


def _tensor(chunks: Iterable[bytes | bytearray | memoryview], dtype: torch.dtype) -> Tensor:
    data = bytearray()
    for chunk in chunks:
        data += memoryview(chunk).cast("B")
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype)
