"""Checkpoints of NVIDIA's ModelOpt, `quant_algo` FP8, NVFP4, and MIXED_PRECISION of the two.

The scheme is in `quantization_config`, or in `hf_quant_config.json` beside it. FP8: a weight [N, K]
is `weight`, e4m3, and `weight_scale`, a number that it is multiplied with. NVFP4: `weight`, uint8
[N, K / 2]; `weight_scale`, e4m3 [N, K / 16]; `weight_scale_2`, a number that scales are multiplied
with. Where layers have schemes of their own, the types of their tensors tell them apart, and
`quantized_layers` or `config_groups` which there are. Activations are rounded with `input_scale`,
which is passed over; with W4A16_NVFP4 they are not.
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
_FP8, _NVFP4, _WEIGHTS_ALONE = "FP8", "NVFP4", "W4A16_NVFP4"
_MIXED = "MIXED_PRECISION"


def decode(
    reader: TensorReader, config: Mapping[str, Any], is_weight_only: bool
) -> dict[str, DecodedWeight]:
    """Find the quantized weights of a checkpoint; see `compressed_tensors.decode`."""
    where, own = reader.location(), config
    if isinstance(inner := config.get("quantization"), Mapping):
        own = inner
    algorithms = _algorithms(own)
    scheme = f"{METHOD}, {own.get('quant_algo')}"
    if unknown := sorted(algorithms - {_FP8, _NVFP4, _WEIGHTS_ALONE}):
        raise unknown_scheme(f"{METHOD}, {unknown[0]}", where)
    if not algorithms:
        raise unknown_scheme(f"{scheme} of no layers", where)
    keys = list(reader.keys())
    if scaled := [key for key in keys if key.endswith(".pre_quant_scale")]:
        raise unknown_scheme(f"{scheme}, with activations that are scaled ({scaled[0]})", where)
    if algorithms != {_WEIGHTS_ALONE}:
        check_activations("input activations", scheme, where, is_weight_only)
    if own.get("kv_cache_quant_algo") or own.get("kv_cache_scheme"):
        check_activations("keys and values", scheme, where, is_weight_only)
    found: dict[str, DecodedWeight] = {}
    for key in keys:
        if not key.endswith(".weight"):
            continue
        names = (key, f"{key}_scale", f"{key}_scale_2")
        if _FP8 in algorithms and reader.dtype(key) == FLOAT8:
            weight: DecodedWeight = decode_float8(reader, *names[:2], f"{METHOD}, {_FP8}", None)
        elif algorithms - {_FP8} and reader.dtype(key) == torch.uint8:
            weight = decode_nvfp4(reader, key, names, f"{METHOD}, {_NVFP4}", is_inverse=False)
        else:
            continue
        found[key] = with_scales_of_activations(reader, weight)
    return found


def _algorithms(own: Mapping[str, Any]) -> set[str]:
    """What layers are quantized with."""
    algorithm = own.get("quant_algo")
    if str(algorithm).upper() != _MIXED:
        return {str(algorithm)}
    layers = own.get("quantized_layers") or {}
    layers = layers.get("quantized_layers", layers)  # some files have it twice
    found = {str(item.get("quant_algo")) for item in layers.values()}
    for group in () if found else (own.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        kind = weights.get("num_bits"), weights.get("type")
        names: dict[tuple[Any, Any], str] = {(8, "float"): _FP8, (4, "float"): _NVFP4}
        found.add(names.get(kind, f"weights of {kind}"))
    return found
