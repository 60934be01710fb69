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
    """The weight as elements of units, or words of fragments, as scales, and as zero points."""
    return (
        weight.view(_element(layout)),
        weight if _has_byte_pointer(layout) else weight.view(torch.float32),
        weight.view(torch.int16) if layout.has_zeros else None,
    )


def format_of(layout: QuantizedLayout) -> dict[str, Any]:
    return {"KIND": layout.kind, "IN_FRAGMENTS": layout.is_fragments}


def width_of(layout: QuantizedLayout) -> int:
    """Columns with one header, or with one scale in fragments; 0 for all."""
    return layout.group if layout.is_fragments else layout.header_columns


def pointers_of(layout: QuantizedLayout) -> dict[str, str]:
    """Argument → type, of those of `parts_of` that there are."""
    element = TYPE_NAMES.get(_element(layout), "i16")
    zeros = {"zeros": "*i16"} if layout.has_zeros else {}
    scales = "*u8" if _has_byte_pointer(layout) else "*fp32"
    return {"levels": f"*{element}", "scales": scales, **zeros}


def absent_of(layout: QuantizedLayout) -> dict[str, None]:
    return {} if layout.has_zeros else {"zeros": None}


def _has_byte_pointer(layout: QuantizedLayout) -> bool:
    """Of scales; in fragments words have them."""
    return layout.has_byte_scales and not layout.is_fragments


def _element(layout: QuantizedLayout) -> torch.dtype:
    return torch.int32 if layout.is_fragments else _ELEMENTS[layout.unit]
