"""Weights of an engine: where each one comes from, and the file they are streamed into."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from specc.artifact.manifest_entries import FileEntry
from specc.artifact.nonfinite import (
    NonFinite,
    Report,
    find_nonfinite,
    refuse,
    refuse_integers,
    watch,
)
from specc.artifact.quantized_weights import quantized_chunks
from specc.artifact.safetensors_io import (
    CHUNK_BYTES,
    Buffer,
    Progress,
    TensorReader,
    missing_tensor,
    tensor_bytes,
)
from specc.artifact.safetensors_writer import OutputTensor, convert_chunks, write_safetensors
from specc.artifact.tensor_part import TensorPart
from specc.artifact.weight_layout import blocks_of_stream, turned_matrices
from specc.artifact.weight_spec import Source, WeightSpec
from specc.errors import WeightError


class MemoryReader:
    """Tensors in memory (of an `nn.Module`, on any device) as a `TensorReader`.

    Args:
        tensors: name → tensor. Chunks are copied to the CPU as they are read.
        name: what to call this collection in error messages.
    """

    def __init__(self, tensors: Mapping[str, Tensor], name: str = "the model in memory") -> None:
        self._tensors = tensors
        self._name = name

    @classmethod
    def from_module(cls, module: nn.Module) -> MemoryReader:
        """All parameters and buffers, tied ones under each of their names."""
        tensors: dict[str, Tensor] = dict(module.named_buffers(remove_duplicate=False))
        tensors |= dict(module.named_parameters(remove_duplicate=False))
        return cls(tensors, f"{type(module).__name__} in memory")

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def dtype(self, key: str) -> torch.dtype:
        return self._tensor(key).dtype

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._tensor(key).shape)

    def location(self, key: str | None = None) -> str:
        return self._name

    def read_chunks(
        self,
        key: str,
        chunk_bytes: int = CHUNK_BYTES,
        rows: tuple[int, int] | None = None,
        transpose: bool = False,
    ) -> Iterator[Buffer]:
        tensor = self._values(key)
        if rows is not None:
            tensor = tensor[rows[0] : rows[1]]
        yield from _tensor_chunks(tensor.t() if transpose else tensor, chunk_bytes)

    def read_part(
        self,
        key: str,
        part: TensorPart,
        transpose: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Iterator[Buffer]:
        tensor = self._values(key)
        flat = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
        if transpose:
            flat, part = flat.t(), TensorPart(part.columns, part.vectors)
        row_bytes = max(1, part.num_columns * tensor.element_size())
        step = max(1, chunk_bytes // row_bytes)
        for start, stop in part.vectors:
            for first in range(start, stop, step):
                rows = flat[first : min(first + step, stop)]
                taken = torch.cat([rows[:, a:b] for a, b in part.columns], 1)
                yield tensor_bytes(taken.cpu())

    def _values(self, key: str) -> Tensor:
        tensor = self._tensor(key).detach()
        if tensor.is_meta:
            raise WeightError(
                f"{key} of {self._name} is on the meta device",
                "a tensor with values",
                "load the module's weights first, or pass the path of its checkpoint",
            )
        return tensor

    def _tensor(self, key: str) -> Tensor:
        if key not in self._tensors:
            raise missing_tensor(key, self)
        return self._tensors[key]


def write_weights(
    specs: Iterable[WeightSpec],
    reader: TensorReader,
    path: str | Path,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    nonfinite: Report = refuse,
    metadata: Mapping[str, str] | None = None,
) -> FileEntry:
    """Stream weights into one safetensors file; every spec is checked before the first byte.

    Args:
        specs: specs of equal key are written once.
        reader: the checkpoint, or a `MemoryReader`.
        dtype: overrides the dtype of all floating-point specs that have sources; constants keep
            their own.
        progress: called with (bytes done, bytes in total).
        nonfinite: called for every tensor of the checkpoint with NaN, infinity, or values that
            overflow in the type that is written; by default it raises. Constants are not looked
            at: masks among them are full of infinities.
        metadata: of the file.
    Returns:
        hash, size and sums of the file.
    Raises:
        WeightError: a tensor is absent, truncated, of another shape or kind of dtype, or, unless
            `nonfinite` takes it, holds values that are no finite numbers.
        OutputError: the file cannot be written.
    """
    unique: dict[str, WeightSpec] = {}
    for spec in specs:
        if dtype is not None and spec.constant is None and spec.dtype.is_floating_point:
            spec = replace(spec, dtype=dtype)
        if unique.setdefault(spec.key, spec) != spec:
            raise ValueError(f"two different weights are called {spec.key}")
    for spec in unique.values():
        check_spec(spec, reader)
    # larger items first keep every tensor aligned to its items, which a memory-mapped load needs;
    # quantized weights are whole cache lines, and before the others they begin with one
    ordered = sorted(
        unique.values(), key=lambda spec: (spec.quantized is None, -spec.dtype.itemsize)
    )
    tensors = [
        OutputTensor(
            spec.key, spec.stored_dtype, spec.stored_shape, _spec_chunks(spec, reader, nonfinite)
        )
        for spec in ordered
    ]
    return write_safetensors(path, tensors, progress, metadata)


def read_weight(spec: WeightSpec, reader: TensorReader) -> Tensor:
    """The values of a weight, or a constant, as `write_weights` would write them.

    Raises:
        WeightError: as `write_weights`.
    """
    check_spec(spec, reader)
    chunks = (bytes(chunk) for chunk in _spec_chunks(spec, reader, refuse))
    data = bytearray().join(chunks)
    return torch.frombuffer(data, dtype=spec.stored_dtype).view(spec.stored_shape)


def check_spec(spec: WeightSpec, reader: TensorReader) -> None:
    """Compare a spec with the shapes and dtypes of its sources.

    Raises:
        WeightError: they do not fit.
    """
    if spec.constant is not None:
        if tuple(spec.constant.shape) != spec.shape:
            raise ValueError(f"constant {spec.key} is not of shape {spec.shape}")
        return
    num_elements, wanted = 0, spec.source_shape
    for source in spec.sources:
        if source.zeros:
            num_elements += source.zeros
            continue
        shape, dtype = reader.shape(source.name), reader.dtype(source.name)
        _check_source(source, shape)
        if dtype != spec.dtype and not (dtype.is_floating_point and spec.dtype.is_floating_point):
            raise WeightError(
                f"{source.name} in {reader.location(source.name)} has dtype {dtype}",
                f"{spec.dtype} for {spec.key}",
                "pass the unquantized checkpoint of this model",
            )
        if source.rows is not None:
            shape = (source.rows[1] - source.rows[0], *shape[1:])
        if (part := source.part) is not None:
            shape = (part.num_vectors, part.num_columns)[2 - min(2, len(shape)) :]
        if source.transpose:
            shape = (shape[1], shape[0])
        num_elements += math.prod(shape)
        inner = wanted[len(wanted) - len(shape) + 1 :]
        # vectors of a part may be those of a stack
        whole = len(spec.sources) > 1 or part is not None or shape == wanted
        if len(shape) > len(wanted) or shape[1:] != inner or not whole:
            raise _shape_error(spec, reader, f"{source.name} {list(shape)}", source.name)
    if num_elements != math.prod(wanted):
        names = ", ".join(f"{s.name} {list(reader.shape(s.name))}" for s in spec.sources[:3])
        more = ", …" if len(spec.sources) > 3 else ""
        raise _shape_error(spec, reader, f"{names}{more} ({num_elements} elements)", None)


def _check_source(source: Source, shape: tuple[int, ...]) -> None:
    if source.part is not None:
        vectors, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
        for ranges, size in ((source.part.vectors, vectors), (source.part.columns, columns)):
            if not all(0 <= start <= stop <= size for start, stop in ranges):
                raise WeightError(
                    f"{source.name} has shape {list(shape)}",
                    f"{source.part.vectors[-1][1]} vectors of {source.part.columns[-1][1]}",
                    "pass a checkpoint that fits this model's config.json",
                )
    start, stop = source.rows or (0, 0)
    if source.rows is not None and not (shape and 0 <= start <= stop <= shape[0]):
        raise WeightError(
            f"{source.name} has shape {list(shape)}",
            f"rows {start} … {stop - 1}",
            "pass a checkpoint that fits this model's config.json",
        )
    if source.transpose and len(shape) != 2:
        raise WeightError(
            f"{source.name} has shape {list(shape)}",
            "a matrix, since it is stored transposed",
            "pass a checkpoint that fits this model's config.json",
        )


def _shape_error(
    spec: WeightSpec, reader: TensorReader, found: str, source: str | None
) -> WeightError:
    return WeightError(
        f"{found} in {reader.location(source)}",
        f"{list(spec.source_shape)} for {spec.key}",
        "pass a checkpoint that fits this model's config.json",
    )


def _spec_chunks(spec: WeightSpec, reader: TensorReader, nonfinite: Report) -> Iterator[Buffer]:
    if spec.constant is not None:
        return convert_chunks(
            _tensor_chunks(spec.constant, CHUNK_BYTES), spec.constant.dtype, spec.dtype
        )
    if spec.quantized is not None:
        nonfinite = refuse_integers
    rows: Iterator[Buffer] = itertools.chain.from_iterable(
        _source_chunks(source, spec, reader, nonfinite) for source in spec.sources
    )
    if spec.quantized is not None:
        return quantized_chunks(spec, reader, rows)
    if spec.is_turned:
        rows = turned_matrices(rows, spec.shape, spec.dtype)
    return blocks_of_stream(rows, spec.shape, spec.dtype) if spec.in_blocks else rows


def _source_chunks(
    source: Source, spec: WeightSpec, reader: TensorReader, nonfinite: Report
) -> Iterator[Buffer]:
    if source.zeros:
        return _zeros(source.zeros * spec.dtype.itemsize)
    if source.part is not None:
        chunks = reader.read_part(source.name, source.part, source.transpose)
    else:
        chunks = reader.read_chunks(source.name, rows=source.rows, transpose=source.transpose)
    converted = convert_chunks(chunks, reader.dtype(source.name), spec.dtype)
    # what is finite after the conversion was so before: one look at the result is enough
    return watch(converted, spec.dtype, lambda: _find(source, spec, reader), nonfinite)


def _zeros(num_bytes: int) -> Iterator[Buffer]:
    chunk = bytes(min(num_bytes, CHUNK_BYTES))
    for done in range(0, num_bytes, CHUNK_BYTES):
        yield chunk[: num_bytes - done]


def _find(source: Source, spec: WeightSpec, reader: TensorReader) -> NonFinite:
    """Count and locate what is not finite, in the order of the checkpoint."""
    name = source.name
    chunks = reader.read_chunks(name, rows=source.rows)
    nan, infinite, overflowing, place = find_nonfinite(chunks, reader.dtype(name), spec.dtype)
    shape = reader.shape(name)
    first = [int(i) for i in torch.unravel_index(torch.tensor(place), shape)] if shape else []
    if source.rows is not None:
        first[0] += source.rows[0]
    location = reader.location(name)
    return NonFinite(name, location, nan, infinite, overflowing, tuple(first), spec.dtype)


def _tensor_chunks(tensor: Tensor, chunk_bytes: int) -> Iterator[Buffer]:
    """Copy a tensor to the CPU in blocks of rows; rows larger than a chunk are cut further."""
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return
    if num_bytes <= chunk_bytes or tensor.dim() == 0:
        yield tensor_bytes(tensor.detach().cpu())
        return
    row_bytes = num_bytes // tensor.shape[0]
    if row_bytes > chunk_bytes:
        for row in tensor:
            yield from _tensor_chunks(row, chunk_bytes)
        return
    step = chunk_bytes // row_bytes
    for first in range(0, tensor.shape[0], step):
        yield tensor_bytes(tensor[first : first + step].detach().cpu())
