"""Checkpoints of AutoRound (`quant_method: auto-round`): words as GPTQ's or AWQ's.

`packing_format` says whose. `extra_config` has layers with bits or groups of their own, by name or
by a pattern of names; those of 16 bits are plain tensors.
Source: https://github.com/intel/auto-round, auto_round/export/export_to_autoround; vLLM,
vllm/model_executor/layers/quantization/inc.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from specc.artifact.decoders import awq, gptq
from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.refusals import check_activations, unknown_scheme
from specc.artifact.safetensors_io import TensorReader

METHOD = "auto-round"
_SPECIAL = frozenset("*+?^$()[]{}|\\")
_Decode = Callable[[TensorReader, str, Mapping[str, Any]], DecodedWeight]
_PACKINGS: Mapping[str, _Decode] = {
    "auto_round:auto_gptq": gptq.decode_module,
    "auto_round:auto_awq": awq.decode_module,
}


def decode(
    reader: TensorReader, config: Mapping[str, Any], is_weight_only: bool
) -> dict[str, DecodedWeight]:
    """Find the quantized weights of a checkpoint; see `compressed_tensors.decode`."""
    where = reader.location()
    packing = config.get("packing_format", "auto_round:auto_gptq")
    if packing not in _PACKINGS:
        raise unknown_scheme(f"{METHOD}, packing_format {packing}", where)
    if (bits := config.get("act_bits")) not in (None, 16, 32):
        check_activations(f"activations ({bits} bits)", METHOD, where, is_weight_only)
    found: dict[str, DecodedWeight] = {}
    for key in reader.keys():  # noqa: SIM118 - a reader is no mapping
        module, _, kind = key.rpartition(".")
        if kind != "qweight":
            continue
        try:
            own = dict(config) | _changes_of(module, config.get("extra_config") or {})
        except (re.error, TypeError, ValueError) as error:
            raise unknown_scheme(f"{METHOD}, extra_config ({error})", where) from error
        if (form := own.get("data_type", "int")) != "int":
            raise unknown_scheme(f"{METHOD}, {module} in {form}", where)
        weight = _PACKINGS[packing](reader, module, own | {"checkpoint_format": "gptq"})
        found[weight.name] = weight
    return found


def _changes_of(module: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """What a layer has of its own: by its name, or else by the first pattern that it fits."""
    if module in extra:
        return dict(extra[module])
    for pattern, changes in extra.items():
        # a plain name is that of one layer
        if _SPECIAL & set(pattern) and re.search(pattern, module):
            return dict(changes)
    return {}
