"""A checkpoint some of whose weights are integers already: those that calibration has rounded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.forwarding_reader import ForwardingReader
from specc.artifact.integers import Integers
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.safetensors_io import TensorReader


@dataclass(frozen=True)
class CalibratedWeight(DecodedWeight):
    """A weight [..., N, K] whose integers are here.

    Args:
        own: of all its matrices [N, K], one after the other.
    """

    own: Integers = field(default_factory=lambda: Integers(torch.empty(0), torch.empty(0)))
    of: QuantizedLayout = field(default_factory=lambda: QuantizedLayout(8))

    @property
    def layout(self) -> QuantizedLayout:
        return self.of

    def values(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        part = self.integers(reader, start, stop)
        return part.values(self.of).view(stop - start, *self.shape[1:])

    def integers(self, reader: TensorReader, start: int, stop: int) -> Integers:
        rows = math.prod(self.shape[1:-1])
        return self.own.rows(start * rows, stop * rows)


class CalibratedReader(ForwardingReader):
    """A checkpoint, and integers beside the floats of some of its tensors.

    Values are those of the checkpoint: the integers are had from `decoded` alone. Levels lie in
    files, and are in memory only as far as there is room.

    Args:
        reader: of the checkpoint, in floats.
    """

    def __init__(self, reader: TensorReader) -> None:
        self.stored = reader
        self._weights: dict[str, CalibratedWeight] = {}
        self._directory = TemporaryDirectory(prefix="specc-calibrated-")

    def add(self, key: str, own: Integers, layout: QuantizedLayout) -> None:
        """Give a tensor its integers, those of all its rows."""
        path = Path(self._directory.name) / f"{len(self._weights)}.levels"
        path.write_bytes(own.levels.contiguous().numpy().tobytes())
        levels = torch.from_file(str(path), False, own.levels.numel(), dtype=torch.uint8)
        own = Integers(levels.view(own.levels.shape), own.scales, own.zeros)
        shape = self.stored.shape(key)
        self._weights[key] = CalibratedWeight(key, shape, (key,), layout.name, own, layout)

    def decoded(self, key: str) -> DecodedWeight | None:
        """The rounded weight of this name; None where there are floats alone."""
        return self._weights.get(key)

    def source_of(self, key: str) -> tuple[TensorReader, str]:
        return self.stored, key

    def keys(self) -> Iterable[str]:
        return self.stored.keys()

    def location(self, key: str | None = None) -> str:
        return self.stored.location(key)
