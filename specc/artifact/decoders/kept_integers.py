"""What an engine keeps of a quantized weight: the layout of its integers, the order of columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.safetensors_io import tensor_bytes


@dataclass(frozen=True)
class KeptIntegers:
    """How a parameter is stored; equal of parameters that may lie one after the other.

    Args:
        layout: of the integers.
        order: bytes of the columns, int64, in the order in which they are stored; none where that
            is their own.
        is_turned: the parameter has matrices [K, N], and the integers are of [N, K].
    """

    layout: QuantizedLayout
    order: bytes = b""
    is_turned: bool = False

    @classmethod
    def of(cls, weight: DecodedWeight) -> KeptIntegers | None:
        """None of a weight that no layout holds."""
        if weight.layout is None:
            return None
        order = b"" if weight.order is None else bytes(tensor_bytes(weight.order.long()))
        return cls(weight.layout, order, weight.is_turned)

    @property
    def name(self) -> str:
        """For people."""
        return self.layout.name + (" in an order of columns" if self.order else "")

    @property
    def columns(self) -> Tensor | None:
        """[K] int64; None where columns are in their own order."""
        return torch.frombuffer(bytearray(self.order), dtype=torch.int64) if self.order else None
