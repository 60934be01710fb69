"""A matrix of a GGUF file: its rows, as numbers or as integers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.gguf_blocks import integers_of, layout_of, values_of
from specc.artifact.decoders.gguf_file import PLAIN
from specc.artifact.decoders.mxfp4 import held_scales
from specc.artifact.decoders.stored_tensors import read_rows
from specc.artifact.integers import Integers
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.safetensors_io import TensorReader

METHOD = "gguf"
_PLAIN = {str(kind) for kind in PLAIN.values()}


@dataclass(frozen=True)
class GGUFWeight(DecodedWeight):
    """A matrix of a GGUF file.

    Args:
        kind: `Q4_0`, …, or of plain numbers the name of their type.
        paired_rows: rows of a head whose rotary halves are stored pair by pair; 0 for rows in the
            order of the model.
    """

    kind: str
    paired_rows: int

    @property
    def is_quantized(self) -> bool:
        return self.kind not in _PLAIN

    @property
    def layout(self) -> QuantizedLayout | None:
        return layout_of(self.kind) if self.is_quantized else None

    def values(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        rows = self._rows(reader, start, stop)
        return values_of(self.kind, rows) if self.is_quantized else rows.float()

    def integers(self, reader: TensorReader, start: int, stop: int) -> Integers:
        found = integers_of(self.kind, self._rows(reader, start, stop))
        if self.kind != "MXFP4":
            return found
        told = f"{self.tensors[0]} in {reader.location(self.tensors[0])}"
        return replace(found, scales=held_scales(found.levels, found.scales, told))

    def _rows(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        if not self.paired_rows:
            return read_rows(reader, self.tensors[0], start, stop).contiguous()
        # row (half, i) of a head lies at (i, half)
        size = self.paired_rows
        first, last = start // size * size, -(-stop // size) * size
        stored = read_rows(reader, self.tensors[0], first, last)
        heads = stored.view(-1, size // 2, 2, stored.shape[1]).transpose(1, 2)
        return heads.reshape(last - first, -1)[start - first : stop - first].contiguous()
