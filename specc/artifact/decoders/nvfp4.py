"""Weights in e2m1 with a scale in e4m3 for each 16 columns, and one more for all of them: NVFP4.

A matrix [N, K] is two numbers a byte, uint8 [N, K / 2], the even column in the low bits; scales
e4m3 [N, K / 16]; and a float32 number g. ModelOpt multiplies scales with it, compressed-tensors
divides by it: here they are multiplied with 1 / g, rounded once, which is the factor that an engine
holds for each output (`byte_scales.py`).
Source: https://github.com/vllm-project/compressed-tensors, src/compressed_tensors/compressors;
https://github.com/NVIDIA/TensorRT-Model-Optimizer, modelopt/torch/quantization/qtensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specc.artifact.byte_scales import NVFP4
from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.float8 import FLOAT8
from specc.artifact.decoders.mxfp4 import codes_of
from specc.artifact.decoders.stored_tensors import read_rows, read_tensor, require
from specc.artifact.integers import Integers
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.safetensors_io import TensorReader

LAYOUT = QuantizedLayout.named(NVFP4)
GROUP = LAYOUT.group


@dataclass(frozen=True)
class NVFP4Weight(DecodedWeight):
    """A matrix.

    Args:
        is_inverse: scales are divided by the number that all have in common.
    """

    is_inverse: bool

    @property
    def layout(self) -> QuantizedLayout | None:
        return LAYOUT

    def values(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        return self.integers(reader, start, stop).values(LAYOUT)

    def integers(self, reader: TensorReader, start: int, stop: int) -> Integers:
        codes, scale, common = self.tensors[:3]
        levels = codes_of(read_rows(reader, codes, start, stop))
        scales = read_rows(reader, scale, start, stop).float()
        # an engine's have no sign: it goes to the numbers
        levels ^= (scales < 0).to(torch.uint8).repeat_interleave(GROUP, 1) << 3
        whole = read_tensor(reader, common).reshape(1, 1).expand(len(scales), 1)
        factors = 1 / whole if self.is_inverse else whole
        return Integers(levels, torch.cat([factors, scales.abs()], 1))


def decode_nvfp4(
    reader: TensorReader,
    name: str,
    tensors: tuple[str, str, str],
    scheme: str,
    is_inverse: bool,
) -> NVFP4Weight:
    """Check the tensors of a weight.

    Args:
        tensors: names of its codes, its scales and the number that all have in common.
        is_inverse: see `NVFP4Weight`.
    Raises:
        WeightError: a tensor is missing, or has another shape or type.
    """
    codes, scale, common = tensors
    shape = reader.shape(codes)
    fits = len(shape) == 2 and shape[1] % (GROUP // 2) == 0
    require(reader, codes, [shape] if fits else [(0, 0)], (torch.uint8,), scheme)
    outputs, columns = shape[0], shape[1] * 2
    require(reader, scale, [(outputs, columns // GROUP)], (FLOAT8,), scheme)
    require(reader, common, [(1,), (), (1, 1)], (torch.float32,), scheme)
    return NVFP4Weight(name, (outputs, columns), tensors, scheme, is_inverse)
