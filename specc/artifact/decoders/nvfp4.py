"""Weights in e2m1 with a scale in e4m3 for each 16 columns, and one more for all of them: NVFP4.

A matrix [N, K] is two numbers a byte, uint8 [N, K / 2], the even column in the low bits; scales
e4m3 [N, K / 16]; and a float32 number g. compressed-tensors divides scales by it, ModelOpt
multiplies with it. No layout of an engine holds them: they become numbers.
Source: https://github.com/vllm-project/compressed-tensors, src/compressed_tensors/compressors;
https://github.com/NVIDIA/TensorRT-Model-Optimizer, modelopt/torch/quantization/qtensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.float8 import FLOAT8
from specc.artifact.decoders.mxfp4 import e2m1_values
from specc.artifact.decoders.stored_tensors import read_rows, read_tensor, require
from specc.artifact.safetensors_io import TensorReader

GROUP = 16


@dataclass(frozen=True)
class NVFP4Weight(DecodedWeight):
    """A matrix.

    Args:
        is_inverse: scales are divided by the number that all have in common.
    """

    is_inverse: bool

    def values(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        codes, scale, common = self.tensors[:3]
        scales = read_rows(reader, scale, start, stop).float()
        whole = read_tensor(reader, common).reshape(())
        scales = scales / whole if self.is_inverse else scales * whole
        found = e2m1_values(read_rows(reader, codes, start, stop))
        return found * scales.repeat_interleave(GROUP, 1)


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
