"""Checkpoints of AMD's Quark in fp8 and mxfp4, whose bits are those of other programs.

fp8: `weight`, e4m3 [N, K], and `weight_scale`, a number that it is multiplied with. mxfp4:
`weight`, uint8 [N, K / 2], and `weight_scale`, uint8 [N, K / 32], as in `mxfp4`. One scheme for all
layers, `global_quant_config`, is read.
Source: https://quark.docs.amd.com, "Export to Hugging Face safetensors"; vLLM,
vllm/model_executor/layers/quantization/quark.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specc.artifact.decoders.activation_scales import with_scales_of_activations
from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.float8 import FLOAT8, decode_float8
from specc.artifact.decoders.mxfp4 import GROUP, decode_mxfp4
from specc.artifact.decoders.refusals import check_activations, unknown_scheme
from specc.artifact.safetensors_io import TensorReader

METHOD = "quark"
_FP8, _FP4 = "fp8_e4m3", "fp4"


def decode(
    reader: TensorReader, config: Mapping[str, Any], is_weight_only: bool
) -> dict[str, DecodedWeight]:
    """Find the quantized weights of a checkpoint; see `compressed_tensors.decode`."""
    where, scheme = reader.location(), METHOD
    for name in ("layer_quant_config", "layer_type_quant_config"):
        if config.get(name):
            raise unknown_scheme(f"{METHOD} with {name}", where)
    export, general = config.get("export") or {}, config.get("global_quant_config") or {}
    if (form := export.get("weight_format", "real_quantized")) != "real_quantized":
        raise unknown_scheme(f"{METHOD}, weight_format {form}", where)
    weight = general.get("weight")
    if not isinstance(weight, Mapping):
        raise unknown_scheme(f"{METHOD}, weights {weight}", where)
    kind, strategy = weight.get("dtype"), weight.get("qscheme")
    scheme = f"{METHOD}, {kind}, {strategy}"
    scales = (weight.get("group_size"), weight.get("scale_format"))
    is_fp8 = (kind, strategy) == (_FP8, "per_tensor")
    if not is_fp8 and (kind, strategy, *scales) != (_FP4, "per_group", GROUP, "e8m0"):
        raise unknown_scheme(f"{scheme}, groups of {scales[0]}, scales {scales[1]}", where)
    if general.get("input_tensors") or general.get("output_tensors"):
        check_activations("activations", scheme, where, is_weight_only)
    if export.get("kv_cache_group"):
        check_activations("keys and values", scheme, where, is_weight_only)
    found: dict[str, DecodedWeight] = {}
    for key in reader.keys():  # noqa: SIM118 - a reader is no mapping
        if not key.endswith(".weight"):
            continue
        names = (key, f"{key}_scale")
        if is_fp8 and reader.dtype(key) == FLOAT8:
            one: DecodedWeight = decode_float8(reader, *names, scheme, None)
        elif not is_fp8 and reader.dtype(key) == torch.uint8:
            one = decode_mxfp4(reader, key, names, scheme)
        else:
            continue
        found[key] = with_scales_of_activations(reader, one)
    return found
