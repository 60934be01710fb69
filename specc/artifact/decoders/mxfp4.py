"""Checkpoints of `quant_method: mxfp4`, the experts of gpt-oss.

Experts [E, N, K] are `<name>_blocks`, uint8 [E, N, K / 32, 16], two e2m1 numbers a byte, the even
column in the low bits; and `<name>_scales`, uint8 [E, N, K / 32], exponents e8m0. The parameter
`<name>` is [E, K, N].
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
from specc.artifact.safetensors_io import TensorReader

METHOD = "mxfp4"
_GROUP, _BIAS, _NAN = 32, 127, 255
_BLOCKS, _SCALES = "_blocks", "_scales"
# by sign, exponent and fraction, one number of 4 bits
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class _MXFP4Experts(DecodedWeight):
    def values(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        codes, scale = self.tensors
        found = e2m1_values(read_rows(reader, codes, start, stop)).flatten(-2)
        exponents = read_rows(reader, scale, start, stop)
        wide = e8m0_values(exponents).repeat_interleave(_GROUP, -1)
        return (found * wide).transpose(1, 2).contiguous()


def e2m1_values(codes: Tensor) -> Tensor:
    """Numbers [..., 2 n] float32 of bytes [..., n], low bits first."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    return table[nibbles.long()]


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
        if len(shape) != 4 or shape[3] != _GROUP // 2:
            raise unknown_scheme(f"{METHOD}, {key} of {list(shape)}", reader.location(key))
        require(reader, key, [shape], (torch.uint8,), METHOD)
        require(reader, scale, [shape[:3]], (torch.uint8,), METHOD)
        experts, outputs, groups = shape[:3]
        own = (experts, groups * _GROUP, outputs)
        found[name] = _MXFP4Experts(name, own, (key, scale), f"{METHOD}, experts")
    return found
