"""Checkpoints of `quant_method: fbgemm_fp8`, as Llama 3.1's in 8 bits.

A weight [N, K] is `weight`, e4m3, and `weight_scale`, [N, 1], to be multiplied with it.
Source: transformers/integrations/fbgemm_fp8.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.float8 import FLOAT8, decode_float8
from specc.artifact.decoders.refusals import check_activations
from specc.artifact.safetensors_io import TensorReader

METHOD = "fbgemm_fp8"


def decode(
    reader: TensorReader, config: Mapping[str, Any], is_weight_only: bool
) -> dict[str, DecodedWeight]:
    """Find the quantized weights of a checkpoint; see `compressed_tensors.decode`."""
    scheme = f"{METHOD}, a scale for each output"
    check_activations("activations (dynamic)", scheme, reader.location(), is_weight_only)
    found: dict[str, DecodedWeight] = {}
    for key in reader.keys():  # noqa: SIM118 - a reader is no mapping
        if key.endswith(".weight") and reader.dtype(key) == FLOAT8:
            found[key] = decode_float8(reader, key, f"{key}_scale", scheme, None, True)
    return found
