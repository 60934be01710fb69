"""Checkpoints of `quant_method: fp8`, as DeepSeek, Qwen and others publish them.

A weight [N, K] is `weight`, e4m3, and `weight_scale_inv`, [N / 128, K / 128], to be multiplied with
it, despite its name; without `weight_block_size` it is one number.
Source: transformers/integrations/finegrained_fp8.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.float8 import FLOAT8, decode_float8
from specc.artifact.decoders.refusals import check_activations, unknown_scheme
from specc.artifact.safetensors_io import TensorReader

METHOD = "fp8"
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


def decode(
    reader: TensorReader, config: Mapping[str, Any], is_weight_only: bool
) -> dict[str, DecodedWeight]:
    """Find the quantized weights of a checkpoint; see `compressed_tensors.decode`."""
    where, size = reader.location(), config.get("weight_block_size")
    scheme = f"{METHOD}, " + ("one scale" if size is None else f"blocks of {size}")
    if (form := config.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise unknown_scheme(f"{METHOD}, {form}", where)
    if config.get("expert_dtype") not in (None, "fp8"):
        raise unknown_scheme(f"{METHOD}, experts in {config['expert_dtype']}", where)
    blocks = None
    if size is not None:
        is_pair = isinstance(size, list | tuple) and len(size) == 2
        if not is_pair or not all(type(item) is int and item > 0 for item in size):
            raise unknown_scheme(f"{METHOD}, weight_block_size {size}", where)
        blocks = (size[0], size[1])
    # transformers itself rounds activations where it has a kernel, and not on a CPU
    activations = config.get("activation_scheme", "dynamic")
    if activations is not None:
        told = f"activations ({activations})"
        check_activations(told, scheme, where, is_weight_only)
    found: dict[str, DecodedWeight] = {}
    for key in reader.keys():  # noqa: SIM118 - a reader is no mapping
        if key.endswith(".weight") and reader.dtype(key) == FLOAT8:
            names = (key, f"{key}_scale_inv")
            found[key] = decode_float8(reader, *names, scheme, blocks, scale_dtypes=_SCALES)
    return found
