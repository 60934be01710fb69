"""How kernels read the blocks of a quantized weight: pointers, and constants of its layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specc.artifact.quantized_layout import QuantizedLayout
from specc.kernels.cuda.shipped import TYPE_NAMES

# columns of a unit → what holds those of an output
_ELEMENTS = {2: torch.int16, 4: torch.int32, 8: torch.int32}


def parts_of(weight: Tensor, layout: QuantizedLayout) -> tuple[Tensor, Tensor, Tensor | None]:
    """The weight as elements of units, as scales, and as zero points."""
    return (
        weight.view(_ELEMENTS[layout.unit]),
        weight if layout.has_byte_scales else weight.view(torch.float32),
        weight.view(torch.int16) if layout.has_zeros else None,
    )


def group_of(layout: QuantizedLayout) -> int:
    """Columns whose sum a scale multiplies; 0 where all of an output have one, or a factor."""
    return 0 if layout.has_factors else layout.group


def format_of(layout: QuantizedLayout) -> dict[str, Any]:
    return {
        "BITS": layout.bits,
        "IS_FLOAT": layout.is_float,
        "UNIT": layout.unit,
        "HEADER": layout.header_bytes,
    }


def pointers_of(layout: QuantizedLayout) -> dict[str, str]:
    """Argument → type, of those of `parts_of` that there are."""
    element = TYPE_NAMES.get(_ELEMENTS[layout.unit], "i16")
    zeros = {"zeros": "*i16"} if layout.has_zeros else {}
    return {
        "levels": f"*{element}",
        "scales": "*u8" if layout.has_byte_scales else "*fp32",
        **zeros,
    }


def absent_of(layout: QuantizedLayout) -> dict[str, None]:
    return {} if layout.has_zeros else {"zeros": None}
