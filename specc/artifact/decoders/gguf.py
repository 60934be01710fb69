"""Weights of GGUF files: blocks Q4_0, Q8_0, Q4_K and Q6_K.

- Q4_0: fp16 d, 16 bytes: low bits are values 0 … 15 of 32, high bits 16 … 31; d · (q - 8).
- Q8_0: fp16 d, 32 int8; d · q.
- Q4_K: 256 values in 8 parts: fp16 d and dmin, 12 bytes with 6 bits of scale and minimum for each
  part, 4 · 32 bytes, low bits part 2j, high bits part 2j + 1; d · scale · q - dmin · minimum.
- Q6_K: 256 values in 16 parts: 128 bytes of low and 64 of high bits, 16 int8 scales, fp16 d;
  d · scale · (q - 32).

Q4_0 and Q8_0 are layouts of the engine. The minima of Q4_K are zero points that are no integers,
and the parts of Q6_K have 16 columns: such weights are read as numbers.
Source: https://github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h, ggml-quants.c;
convert_hf_to_gguf.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.gguf_file import BLOCKS
from specc.artifact.decoders.gguf_rows import RowOrder, read_in_order
from specc.artifact.decoders.stored_tensors import read_rows
from specc.artifact.integers import Integers
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.safetensors_io import TensorReader
from specc.artifact.weight_layout import turned

METHOD = "gguf"
_GROUP = 32
_LAYOUTS = {"Q4_0": QuantizedLayout(4, _GROUP), "Q8_0": QuantizedLayout(8, _GROUP)}


@dataclass(frozen=True)
class GGUFWeight(DecodedWeight):
    """A matrix of a GGUF file, or stacked ones, of tensors of one type.

    Args:
        kind: `Q4_0`, …, or of plain numbers the name of their type.
        row_order: which stored row each of its rows is; None is the order of the file.
        is_stored_turned: its matrices are [K, N], and the file's [N, K].
    """

    kind: str
    row_order: RowOrder | None = field(default=None, compare=False)
    is_stored_turned: bool = False

    @property
    def is_quantized(self) -> bool:
        return self.kind in _BYTES

    @property
    def layout(self) -> QuantizedLayout | None:
        return _LAYOUTS.get(self.kind)

    @property
    def is_turned(self) -> bool:
        return self.is_stored_turned

    def values(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        if len(self.shape) == 1:
            return read_rows(reader, self.tensors[0], start, stop).float()
        rows = self._rows(reader, start, stop)
        if self.kind in _VALUES:
            rows = _VALUES[self.kind](rows.view(-1, _BYTES[self.kind]))
        found = rows.float().view(stop - start, *self._stored_shape[1:])
        return found.transpose(1, 2).contiguous() if self.is_turned else found

    def integers(self, reader: TensorReader, start: int, stop: int) -> Integers:
        blocks = self._rows(reader, start, stop).view(-1, _BYTES[self.kind])
        data = blocks[:, 2:]
        # sums of bytes wrap: -1, which is 255, becomes 127
        levels = torch.cat([data & 15, data >> 4], 1) if self.kind == "Q4_0" else data + 128
        rows = (stop - start) * self._vectors
        return Integers(levels.reshape(rows, -1), _half(blocks, 0).reshape(rows, -1))

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


def _half(blocks: Tensor, place: int) -> Tensor:
    return blocks[:, place : place + 2].contiguous().view(torch.float16).float()


def _q4_0(blocks: Tensor) -> Tensor:
    data = blocks[:, 2:]
    return (torch.cat([data & 15, data >> 4], 1).float() - 8) * _half(blocks, 0)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _q4_k(blocks: Tensor) -> Tensor:
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = torch.cat([low & 63, (high & 15) | (low >> 6) << 4], 1).float() * _half(blocks, 0)
    least = torch.cat([middle & 63, (high >> 4) | (middle >> 6) << 4], 1).float() * _half(blocks, 2)
    data = blocks[:, 16:].reshape(-1, 4, 1, 32)
    parts = torch.cat([data & 15, data >> 4], 2).reshape(-1, 8, 32).float()
    return (parts * scale[..., None] - least[..., None]).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    # 128 values at a time: 64 bytes of low bits, 32 of high ones
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    lows = torch.cat([low & 15, low >> 4], 2)
    highs = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], 2)
    q = (lows | highs << 4).reshape(-1, 16, 16).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return (q * scales[..., None]).flatten(1)


_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
_BYTES = {name: size for name, _, size in BLOCKS.values()}
