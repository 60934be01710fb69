"""Checkpoints of NVIDIA's ModelOpt, `quant_algo` FP8 and NVFP4.

The scheme is in `quantization_config`, or in `hf_quant_config.json` beside it. FP8: a weight [N, K]
is `weight`, e4m3, and `weight_scale`, a number that it is multiplied with. NVFP4: `weight`, uint8
[N, K / 2]; `weight_scale`, e4m3 [N, K / 16]; `weight_scale_2`, a number that scales are multiplied
with. Activations are rounded with `input_scale`, which is passed over.
Source: https://github.com/NVIDIA/TensorRT-Model-Optimizer, modelopt/torch/export.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specc.artifact.decoders.activation_scales import with_scales_of_activations
from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.float8 import FLOAT8, decode_float8
from specc.artifact.decoders.nvfp4 import decode_nvfp4
from specc.artifact.decoders.refusals import check_activations, unknown_scheme
from specc.artifact.safetensors_io import TensorReader

METHOD = "modelopt"
_FP8, _NVFP4 = "FP8", "NVFP4"


def decode(
    reader: TensorReader, config: Mapping[str, Any], is_weight_only: bool
) -> dict[str, DecodedWeight]:
    """Find the quantized weights of a checkpoint; see `compressed_tensors.decode`."""
    where, own = reader.location(), config
    if isinstance(inner := config.get("quantization"), Mapping):
        own = inner
    algorithm = own.get("quant_algo")
    scheme = f"{METHOD}, {algorithm}"
    if algorithm not in (_FP8, _NVFP4):
        raise unknown_scheme(scheme, where)
    keys = list(reader.keys())
    if scaled := [key for key in keys if key.endswith(".pre_quant_scale")]:
        raise unknown_scheme(f"{scheme}, with activations that are scaled ({scaled[0]})", where)
    check_activations("input activations", scheme, where, is_weight_only)
    if own.get("kv_cache_quant_algo") or own.get("kv_cache_scheme"):
        check_activations("keys and values", scheme, where, is_weight_only)
    found: dict[str, DecodedWeight] = {}
    for key in keys:
        if not key.endswith(".weight"):
            continue
        names = (key, f"{key}_scale", f"{key}_scale_2")
        if algorithm == _FP8 and reader.dtype(key) == FLOAT8:
            weight: DecodedWeight = decode_float8(reader, *names[:2], scheme, None)
        elif algorithm == _NVFP4 and reader.dtype(key) == torch.uint8:
            weight = decode_nvfp4(reader, key, names, scheme, is_inverse=False)
        else:
            continue
        found[key] = with_scales_of_activations(reader, weight)
    return found
