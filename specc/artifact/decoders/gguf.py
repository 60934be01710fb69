"""Weights of GGUF files: rows of blocks, or of plain numbers, in the order of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.gguf_blocks import integers_of, layout_of, values_of
from specc.artifact.decoders.gguf_file import PLAIN
from specc.artifact.decoders.gguf_rows import RowOrder, read_in_order
from specc.artifact.decoders.mxfp4 import held_scales
from specc.artifact.decoders.stored_tensors import read_rows
from specc.artifact.integers import Integers
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.safetensors_io import TensorReader
from specc.artifact.weight_layout import turned

METHOD = "gguf"
_PLAIN = {str(kind).removeprefix("torch.") for kind in PLAIN.values()}


@dataclass(frozen=True)
class GGUFWeight(DecodedWeight):
    """A matrix of a GGUF file, or stacked ones, of tensors of one type.

    Args:
        kind: `Q4_0`, …, or of plain numbers the name of their type.
        row_order: which stored row each of its rows is; None is the order of the file.
        is_stored_turned: its matrices are [K, N], and the file's [N, K].
        columns: [K], which of its columns each stored one is; None is the order of the file.
    """

    kind: str
    row_order: RowOrder | None = field(default=None, compare=False)
    is_stored_turned: bool = False
    columns: Tensor | None = field(default=None, compare=False)

    @property
    def is_quantized(self) -> bool:
        return self.kind not in _PLAIN

    @property
    def layout(self) -> QuantizedLayout | None:
        return layout_of(self.kind) if self.is_quantized else None

    @property
    def order(self) -> Tensor | None:
        return self.columns

    @property
    def is_turned(self) -> bool:
        return self.is_stored_turned

    def values(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        if len(self.shape) == 1:
            return read_rows(reader, self.tensors[0], start, stop).float()
        rows = self._rows(reader, start, stop)
        if self.is_quantized:
            rows = values_of(self.kind, rows)
        found = rows.float().view(stop - start, *self._stored_shape[1:])
        if self.columns is not None:
            found = torch.empty_like(found).index_copy_(1, self.columns, found)
        return found.transpose(1, 2).contiguous() if self.is_turned else found

    def integers(self, reader: TensorReader, start: int, stop: int) -> Integers:
        found = integers_of(self.kind, self._rows(reader, start, stop))
        if self.kind != "MXFP4":
            return found
        told = f"{self.tensors[0]} in {reader.location(self.tensors[0])}"
        return replace(found, scales=held_scales(found.levels, found.scales, told))

    @property
    def _stored_shape(self) -> tuple[int, ...]:
        return turned(self.shape) if self.is_turned else self.shape

    @property
    def _vectors(self) -> int:
        """Rows of each of its matrices, or 1 where it is one."""
        return math.prod(self._stored_shape[1:-1])

    def _rows(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        """Of matrices start … stop - 1, or of rows where it is one."""
        first, last = start * self._vectors, stop * self._vectors
        return read_in_order(reader, self.tensors, self.row_order, first, last)
