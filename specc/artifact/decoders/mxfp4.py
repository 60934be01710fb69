"""Weights in e2m1 with a power of two for each 32 columns: the experts of gpt-oss, and matrices.

Experts of `quant_method: mxfp4`, [E, N, K], are `<name>_blocks`, uint8 [E, N, K / 32, 16], two e2m1
numbers a byte, the even column in the low bits; and `<name>_scales`, uint8 [E, N, K / 32],
exponents e8m0. The parameter `<name>` is [E, K, N]. A matrix of compressed-tensors is
`weight_packed`, uint8 [N, K / 2], and `weight_scale`, uint8 [N, K / 32].
Source: OCP Microscaling Formats 1.0, sections 5.1 and 5.3; transformers/integrations/mxfp4.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.refusals import unknown_scheme
from specc.artifact.decoders.stored_tensors import read_rows, require
from specc.artifact.integers import Integers
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.safetensors_io import TensorReader
from specc.errors import WeightError

METHOD = "mxfp4"
GROUP, _BIAS, _NAN = 32, 127, 255
LAYOUT = QuantizedLayout(4, GROUP, is_float=True)
SMALLEST = 2.0**-_BIAS
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class _MXFP4Experts(DecodedWeight):
    def values(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        codes, scale = self.tensors
        found = e2m1_values(read_rows(reader, codes, start, stop)).flatten(-2)
        exponents = read_rows(reader, scale, start, stop)
        wide = e8m0_values(exponents).repeat_interleave(GROUP, -1)
        return (found * wide).transpose(1, 2).contiguous()

    @property
    def layout(self) -> QuantizedLayout | None:
        return LAYOUT

    @property
    def is_turned(self) -> bool:
        return True

    def integers(self, reader: TensorReader, start: int, stop: int) -> Integers:
        codes, scale = self.tensors
        found = read_rows(reader, codes, start, stop).flatten(-2).flatten(0, 1)
        exponents = read_rows(reader, scale, start, stop).flatten(0, 1)
        return _integers(reader, scale, found, e8m0_values(exponents))


@dataclass(frozen=True)
class MXFP4Weight(DecodedWeight):
    """A matrix."""

    @property
    def layout(self) -> QuantizedLayout | None:
        return LAYOUT

    def values(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        found = e2m1_values(read_rows(reader, self.tensors[0], start, stop))
        return found * self._scales(reader, start, stop).repeat_interleave(GROUP, 1)

    def integers(self, reader: TensorReader, start: int, stop: int) -> Integers:
        codes = read_rows(reader, self.tensors[0], start, stop)
        return _integers(reader, self.tensors[1], codes, self._scales(reader, start, stop))

    def _scales(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        return e8m0_values(read_rows(reader, self.tensors[1], start, stop))


def decode_mxfp4(
    reader: TensorReader, name: str, tensors: tuple[str, str], scheme: str
) -> MXFP4Weight:
    """Check the tensors of a matrix: uint8 [N, K / 2] and uint8 [N, K / 32].

    Args:
        tensors: names of its codes and scales.
    Raises:
        WeightError: a tensor is missing, or has another shape or type.
    """
    codes, scale = tensors
    shape = reader.shape(codes)
    fits = len(shape) == 2 and shape[1] % (GROUP // 2) == 0
    require(reader, codes, [shape] if fits else [(0, 0)], (torch.uint8,), scheme)
    require(reader, scale, [(shape[0], shape[1] * 2 // GROUP)], (torch.uint8,), scheme)
    return MXFP4Weight(name, (shape[0], shape[1] * 2), tensors, scheme)


def _integers(reader: TensorReader, scale: str, codes: Tensor, scales: Tensor) -> Integers:
    """Rows of codes [n, K / 2], low bits first, with scales [n, K / 32]."""
    levels = codes_of(codes)
    return Integers(levels, held_scales(levels, scales, f"{scale} in {reader.location(scale)}"))


def held_scales(levels: Tensor, scales: Tensor, told: str) -> Tensor:
    """Scales [n, K / 32] as an engine holds them, whose smallest is 2^-126: 0 of zeros.

    Args:
        levels: [n, K] codes.
        scales: [n, K / 32], powers of two.
        told: what has them, for errors.
    Raises:
        WeightError: other numbers have a smaller one.
    """
    is_small = scales == SMALLEST
    used = (levels & 7).view(*scales.shape, GROUP).amax(-1) > 0
    if bool((is_small & used).any()):
        raise WeightError(
            f"{told} holds a scale of 2^-127",
            "scales from 2^-126 on",
            "pass the unquantized checkpoint with --quantize int8 or int4",
        )
    return torch.where(is_small, 0, scales)


def codes_of(stored: Tensor) -> Tensor:
    """Codes [..., 2 n] of bytes [..., n], low bits first."""
    return torch.stack([stored & 15, stored >> 4], -1).flatten(-2)


def e2m1_values(codes: Tensor) -> Tensor:
    """Numbers [..., 2 n] float32 of bytes [..., n], low bits first."""
    return LAYOUT.values(codes_of(codes))


def e8m0_values(exponents: Tensor) -> Tensor:
    """2^(x - 127) as float32, exactly; NaN where x is 255."""
    powers = torch.exp2(exponents.double() - _BIAS)
    return torch.where(exponents == _NAN, torch.nan, powers).float()


def decode(
    reader: TensorReader, config: Mapping[str, Any], is_weight_only: bool
) -> dict[str, DecodedWeight]:
    """Find the quantized weights of a checkpoint; see `compressed_tensors.decode`."""
    found: dict[str, DecodedWeight] = {}
    for key in reader.keys():  # noqa: SIM118 - a reader is no mapping
        if not key.endswith(_BLOCKS):
            continue
        name = key.removesuffix(_BLOCKS)
        shape, scale = reader.shape(key), f"{name}{_SCALES}"
        if len(shape) != 4 or shape[3] != GROUP // 2:
            raise unknown_scheme(f"{METHOD}, {key} of {list(shape)}", reader.location(key))
        require(reader, key, [shape], (torch.uint8,), METHOD)
        require(reader, scale, [shape[:3]], (torch.uint8,), METHOD)
        experts, outputs, groups = shape[:3]
        own = (experts, groups * GROUP, outputs)
        found[name] = _MXFP4Experts(name, own, (key, scale), f"{METHOD}, experts")
    return found
