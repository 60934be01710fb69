"""A quantized checkpoint as a reader of the model's own weights."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType

import torch

from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.gguf_file import GGUFReader
from specc.artifact.safetensors_io import (
    CHUNK_BYTES,
    Buffer,
    SafetensorsReader,
    TensorReader,
    tensor_bytes,
)
from specc.artifact.tensor_part import TensorPart
from specc.artifact.weight_layout import BLOCK
from specc.errors import WeightError


class DecodedReader:
    """Names, shapes and values of a checkpoint as if it were not quantized.

    What its tensors stand for has the name of the parameter and is read as float32; the tensors
    that it consists of have no names here. Integers and scales are had from `decoded`.

    Args:
        weights: those that are quantized, by name.
    Raises:
        WeightError: numbers of 8 bits that are no part of a quantized weight.
    """

    def __init__(
        self, reader: SafetensorsReader | GGUFReader, weights: Mapping[str, DecodedWeight]
    ) -> None:
        self.stored = reader
        self._weights = dict(weights)
        # a tensor may be a part of several weights
        owners: dict[str, list[str]] = {}
        for item in weights.values():
            for part in item.tensors:
                owners.setdefault(part, []).append(item.name)
        names = [name for key in reader.keys() for name in owners.get(key, [key])]  # noqa: SIM118
        # and a weight may have none, where a field of the file says it
        self._names = tuple(dict.fromkeys([*names, *self._weights]))
        # of plain tensors, those that the checkpoint has under another name
        self._plain: dict[str, str] = {}
        for key in self._names:
            if key not in self._weights:
                _check_plain(reader, key)

    def __enter__(self) -> DecodedReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stored.close()

    def renamed(self, names: Mapping[str, str]) -> DecodedReader:
        """Some of the tensors, by other names.

        Args:
            names: other name → name here.
        """
        found = copy.copy(self)
        weights = {name: self._weights.get(own) for name, own in names.items()}
        found._weights = {name: item for name, item in weights.items() if item is not None}
        found._plain = {name: self._plain.get(own, own) for name, own in names.items()}
        found._names = tuple(names)
        return found

    def plain_keys(self) -> Iterable[str]:
        """Names of tensors that are not quantized."""
        return (key for key in self._names if key not in self._weights)

    @property
    def has_parameter_names(self) -> bool:
        """Whether tensors have the names of the model's parameters, not those of a checkpoint."""
        return isinstance(self.stored, GGUFReader)

    @property
    def scheme(self) -> str | None:
        """How most of its quantized weights are stored, for people; None where none is."""
        counts: Counter[str] = Counter()
        for weight in filter(lambda item: item.is_quantized, self._weights.values()):
            counts[weight.scheme] += math.prod(weight.shape)
        if not counts:
            return None
        (first, _), *others = counts.most_common()
        return first + (f"; and {len(others)} others" if others else "")

    def decoded(self, key: str) -> DecodedWeight | None:
        """The quantized weight of this name; None where there is a plain tensor."""
        return self._weights.get(key)

    def keys(self) -> Iterable[str]:
        return self._names

    def dtype(self, key: str) -> torch.dtype:
        return torch.float32 if key in self._weights else self.stored.dtype(self._of(key))

    def shape(self, key: str) -> tuple[int, ...]:
        weight = self._weights.get(key)
        return self.stored.shape(self._of(key)) if weight is None else weight.shape

    def location(self, key: str | None = None) -> str:
        weight = self._weights.get(key) if key is not None else None
        if weight is not None and not weight.tensors:
            return self.stored.location()
        if key is not None:
            key = self._of(key) if weight is None else weight.tensors[0]
        return self.stored.location(key)

    def _of(self, key: str) -> str:
        """What the checkpoint calls a plain tensor."""
        return self._plain.get(key, key)

    def read_chunks(
        self,
        key: str,
        chunk_bytes: int = CHUNK_BYTES,
        rows: tuple[int, int] | None = None,
        transpose: bool = False,
    ) -> Iterator[Buffer]:
        weight = self._weights.get(key)
        if weight is None:
            yield from self.stored.read_chunks(self._of(key), chunk_bytes, rows, transpose)
            return
        if not weight.shape:
            yield tensor_bytes(weight.values(self.stored, 0, 1))
            return
        start, stop = rows or (0, weight.shape[0])
        if transpose:
            # one weight at a time: its columns lie in all rows
            yield tensor_bytes(weight.values(self.stored, start, stop).t())
            return
        for first, last in row_ranges(weight, start, stop, chunk_bytes):
            yield tensor_bytes(weight.values(self.stored, first, last))

    def read_part(
        self,
        key: str,
        part: TensorPart,
        transpose: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Iterator[Buffer]:
        weight = self._weights.get(key)
        if weight is None:
            yield from self.stored.read_part(self._of(key), part, transpose, chunk_bytes)
            return
        values = weight.values(self.stored, 0, weight.shape[0])
        values = values.reshape(-1, values.shape[-1])  # one vector is a row
        taken = torch.cat([values[start:stop] for start, stop in part.vectors])
        taken = torch.cat([taken[:, start:stop] for start, stop in part.columns], 1)
        yield tensor_bytes(taken.t() if transpose else taken)


def row_ranges(
    weight: DecodedWeight, start: int, stop: int, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[int, int]]:
    """Ranges of rows whose values take `chunk_bytes`, in whole blocks of 32 rows, at least one."""
    row_bytes = max(1, math.prod(weight.shape[1:]) * torch.float32.itemsize)
    each = BLOCK if len(weight.shape) == 2 else 1
    step = max(1, chunk_bytes // (each * row_bytes)) * each
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def _check_plain(reader: TensorReader, key: str) -> None:
    kind = reader.dtype(key)
    if kind.is_floating_point and kind.itemsize == 1:
        raise WeightError(
            f"{key} in {reader.location(key)} is of {str(kind).removeprefix('torch.')}, and no"
            " quantized weight has it",
            "weights of 8 bits with scales beside them, as quantization_config says",
            "pass the config.json of this checkpoint, or the unquantized checkpoint",
        )
