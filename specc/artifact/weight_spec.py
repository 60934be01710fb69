"""What one tensor of an engine's weight file is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.tensor_part import Range, TensorPart
from specc.artifact.weight_layout import blocks_shape, turned


@dataclass(frozen=True)
class Source:
    """A run of bytes of a checkpoint.

    Args:
        rows: take rows start … stop - 1 along dim 0; None takes all.
        transpose: take the transpose of those rows; for 2-D tensors.
        part: take these of the whole tensor's vectors and columns, in place of rows; with
            `transpose`, the transpose of that.
        zeros: so many zeros, and no tensor at all.
    """

    name: str
    rows: tuple[int, int] | None = None
    transpose: bool = False
    part: TensorPart | None = None
    zeros: int = 0


@dataclass(frozen=True)
class QuantizedPart:
    """What a rank has of a quantized weight, whose rows are rounded as wholes before that.

    Args:
        shape: [N, K] of each matrix that the sources hold.
        rows: of each matrix; () is all of them, where the sources have the rank's rows alone.
        columns: whole groups, but for the last one.
    """

    shape: tuple[int, int]
    rows: tuple[Range, ...]
    columns: tuple[Range, ...]


@dataclass(frozen=True)
class WeightSpec:
    """One tensor of the engine's weight file: its sources' bytes one after the other.

    Concatenating and stacking along leading axes is concatenating bytes, so a fused q/k/v is three
    sources, and stacked experts [E, 2I, H] are e0.w1, e0.w3, e1.w1, …

    Args:
        key: name in the engine's file.
        dtype: type to write; floating-point sources are converted to it.
        shape: shape of the whole tensor.
        sources: where the bytes come from; empty for a constant.
        constant: a small tensor in memory (rotary frequencies) in place of sources.
        in_blocks: write matrices in blocks; see `specc.artifact.weight_layout`.
        quantized: write a matrix as integers: those of the checkpoint, where it has them in this
            layout, else rounded from its numbers in `dtype`.
        is_turned: of a weight [..., N, K]: sources have matrices [..., K, N].
        part: of a quantized weight, the part of a rank.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: tuple[Source, ...] = ()
    constant: Tensor | None = field(default=None, compare=False)
    in_blocks: bool = False
    quantized: QuantizedLayout | None = None
    is_turned: bool = False
    part: QuantizedPart | None = None

    @classmethod
    def from_tensor(cls, key: str, tensor: Tensor) -> WeightSpec:
        """Make a constant, written in its own dtype."""
        return cls(key, tensor.dtype, tuple(tensor.shape), constant=tensor)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in the engine's file."""
        if self.quantized is not None:
            return self.quantized.stored_shape(self.shape)
        return blocks_shape(self.shape, self.dtype) if self.in_blocks else self.shape

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Shape of what the sources hold."""
        shape = self.shape
        if self.part is not None:
            shape = (*shape[:-2], *self.part.shape)
        return turned(shape) if self.is_turned else shape

    @property
    def stored_dtype(self) -> torch.dtype:
        """Type of the elements in the engine's file."""
        return self.dtype if self.quantized is None else torch.uint8
