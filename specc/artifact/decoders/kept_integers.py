"""What an engine keeps of a quantized weight: the layout of its integers, the order of columns."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specc.artifact.byte_scales import NVFP4
from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.quantized_layout import GGML, QuantizedLayout
from specc.artifact.safetensors_io import tensor_bytes


@dataclass(frozen=True)
class KeptIntegers:
    """How a parameter is stored; equal of parameters that may lie one after the other.

    Args:
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

    def held_as(self, kinds: Collection[str]) -> KeptIntegers | None:
        """This, or the same numbers in another layout, where a backend lacks ggml's blocks.

        Args:
            kinds: of layouts that it has. Others than ggml's and nvfp4 are refused by a pass, not
                here.
        Returns:
            None where it holds them as numbers alone.
        """
        if self.layout.kind not in (GGML, NVFP4) or self.layout.kind in kinds:
            return self
        wide = self.layout.widened
        return replace(self, layout=wide) if wide is not None and wide.kind in kinds else None

    @property
    def name(self) -> str:
        """For people."""
        return self.layout.name + (" in an order of columns" if self.order else "")

    @property
    def columns(self) -> Tensor | None:
        """[K] int64; None where columns are in their own order."""
        return torch.frombuffer(bytearray(self.order), dtype=torch.int64) if self.order else None
