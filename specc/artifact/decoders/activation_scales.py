"""Scales of activations beside a weight: specc rounds none, and nobody misses them."""

from __future__ import annotations

from dataclasses import replace

from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.safetensors_io import TensorReader

_NAMES = ("input_scale", "input_global_scale", "output_scale", "k_scale", "v_scale")


def with_scales_of_activations(reader: TensorReader, weight: DecodedWeight) -> DecodedWeight:
    """The weight with them among its tensors, last, so that no one takes them for parameters."""
    module = weight.name.removesuffix(".weight")
    names = (f"{module}.{own}" for own in _NAMES)
    more = tuple(name for name in names if name in reader.keys())  # noqa: SIM118 - no mapping
    return replace(weight, tensors=(*weight.tensors, *more)) if more else weight
