"""Check what TensorRT's parser made of a decoder before hours are spent on building it."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from specc.errors import TensorRTError
from specc.passes.lower.tensorrt.dequantized import Dequantized
from specc.passes.lower.tensorrt.onnx_attention import Cache, CachedAttention, DecoderForm, RankSum

# inputs of IAttentionInputLayer, where they are set
_K, _V, _MASK, _KV_LENGTHS = 1, 2, 3, 6
# layers between a cache and its reader that keep the value's place
_VIEWS = ("ELEMENTWISE", "CAST", "SHUFFLE", "IDENTITY")
_DO = "report the ONNX file and the version: specc writes no such network"


@dataclass(frozen=True)
class ParsedAttention:
    """One attention of the network.

    Args:
        node: the ONNX node that it came from.
        mask: network input that it masks with.
        has_lengths: key/value lengths are attached.
        scales_keys: the whole cache of keys is multiplied before it is read.
    """

    node: str
    mask: str
    has_lengths: bool
    scales_keys: bool


class _Network:
    """Layers of a network by the tensors that they make."""

    def __init__(self, trt: ModuleType, network: Any) -> None:
        self.kinds = {kind: name for name, kind in trt.LayerType.__members__.items()}
        self.layers = [network.get_layer(i) for i in range(network.num_layers)]
        inputs = [network.get_input(i) for i in range(network.num_inputs)]
        outputs = [network.get_output(i) for i in range(network.num_outputs)]
        self.inputs = {tensor.name: tensor for tensor in inputs}
        self.outputs = {tensor.name: tensor for tensor in outputs}
        self.maker = {
            layer.get_output(i).name: layer
            for layer in self.layers
            for i in range(layer.num_outputs)
            if layer.get_output(i) is not None
        }

    def kind(self, layer: Any) -> str:
        return self.kinds[layer.type]

    def of_kind(self, kind: str) -> list[Any]:
        return [layer for layer in self.layers if self.kind(layer) == kind]

    def origin(self, name: str) -> tuple[str, bool]:
        """Where a value comes from, through views, and whether it is multiplied on the way."""
        is_scaled = False
        while (layer := self.maker.get(name)) is not None and self.kind(layer) in _VIEWS:
            is_scaled |= self.kind(layer) == "ELEMENTWISE"
            name = layer.get_input(0).name
        return name, is_scaled


def check_trt_network(
    trt: ModuleType, network: Any, form: DecoderForm, has_lengths: bool
) -> tuple[ParsedAttention, ...]:
    """Compare a parsed network with the file that it was parsed from.

    Args:
        trt: module of the network.
        network: parsed, nothing added.
        has_lengths: every attention must have key/value lengths.
    Returns:
        the attentions in the order of `form`.
    Raises:
        TensorRTError: an attention is not one layer, lost its mask, its lengths or its caches; a
            cache is not updated in place, exactly once; a sum over ranks, or a quantized weight, is
            missing, or another.
    """
    layers = _Network(trt, network)
    _check_caches(layers, form)
    _check_sums(layers, form.sums)
    _check_weights(trt, layers, form.weights)
    found = {layer.get_output(0).name: layer for layer in layers.of_kind("ATTENTION_OUTPUT")}
    attentions = tuple(
        _check_attention(layers, attention, found.get(attention.output), has_lengths)
        for attention in form.attentions
    )
    if len(found) != len(attentions):
        raise _wrong(f"{len(found)} attention layers", f"{len(attentions)}, one for each Attention")
    return attentions


def _check_sums(layers: _Network, sums: tuple[RankSum, ...]) -> None:
    """A sum that is left out, or goes over other ranks, gives wrong numbers without a word.

    What kind of collective a layer is, TensorRT's interface does not say: the file is checked.
    """
    found = {layer.get_output(0).name: layer for layer in layers.of_kind("DIST_COLLECTIVE")}
    if found.keys() != {item.output for item in sums}:
        raise _wrong(f"{len(found)} sums over ranks", f"{len(sums)}, one for each of the file")
    for item in sums:
        layer = found[item.output]
        if layer.num_ranks != item.num_ranks:
            raise _wrong(f"{item.node} over {layer.num_ranks} ranks", f"{item.num_ranks} ranks")


def _check_weights(trt: ModuleType, layers: _Network, weights: tuple[Dequantized, ...]) -> None:
    """Scales along another axis, or for other groups, give wrong weights without a word."""
    found = {layer.get_output(0).name: layer for layer in layers.of_kind("DEQUANTIZE")}
    if found.keys() != {weight.output for weight in weights}:
        raise _wrong(f"{len(found)} quantized weights", f"{len(weights)}, those of the file")
    for weight in weights:
        layer = found[weight.output]
        # layers of a network come without their own properties
        layer.__class__ = trt.IDequantizeLayer
        levels, scales = (tuple(layer.get_input(i).shape) for i in range(2))
        said = levels, scales, layer.axis
        if said != (weight.levels, weight.scales, weight.axis) or layer.num_inputs > 2:
            raise _wrong(
                f"{weight.node} of levels {levels} with scales {scales} along axis {layer.axis}",
                f"levels {weight.levels}, scales {weight.scales} along axis {weight.axis} alone",
            )


def _check_caches(layers: _Network, form: DecoderForm) -> None:
    updates: dict[str, list[Any]] = {}
    for layer in layers.of_kind("KV_CACHE_UPDATE"):
        updates.setdefault(layer.get_input(0).name, []).append(layer)
    for cache in form.caches:
        mine = updates.pop(cache.input, [])
        if len(mine) != 1:
            raise _wrong(f"{len(mine)} updates of {cache.input}", "one, in place")
        _check_alias(layers, cache, mine[0])
    if updates:
        raise _wrong(f"an update of {', '.join(updates)}", "updates of the file's caches only")


def _check_alias(layers: _Network, cache: Cache, layer: Any) -> None:
    """One buffer holds the cache before and after: same shape and dtype, both at the border."""
    output = layer.get_output(0).name
    if output != cache.output or output not in layers.outputs:
        raise _wrong(f"{cache.input} updated into {output}", f"the network's output {cache.output}")
    given, made = layers.inputs.get(cache.input), layers.outputs[output]
    if given is None:
        raise _wrong(f"no network input {cache.input}", "an input for each cache")
    shapes = [tuple(tensor.shape) for tensor in (given, made)]
    if shapes[0] != shapes[1] or given.dtype != made.dtype:
        raise _wrong(
            f"{cache.input} {shapes[0]} {given.dtype} and {output} {shapes[1]} {made.dtype}",
            "one shape and dtype, since both are one buffer",
        )
    if shapes[0][1:] != cache.shape:
        raise _wrong(f"{cache.input} of shape {shapes[0]}", f"[batch, {cache.shape}], static")


def _check_attention(
    layers: _Network, attention: CachedAttention, layer: Any, has_lengths: bool
) -> ParsedAttention:
    if layer is None:
        raise _wrong(f"{attention.node} without an attention layer", "one layer for the Attention")
    begin = layers.maker.get(layer.get_input(0).name)
    if begin is None or layers.kind(begin) != "ATTENTION_INPUT":
        raise _wrong(f"{attention.node} computed from primitive layers", "one attention layer")
    inputs = [begin.get_input(i) for i in range(begin.num_inputs)]
    inputs += [None] * (_KV_LENGTHS + 1 - len(inputs))
    if inputs[_MASK] is None:
        raise _wrong(f"{attention.node} without its mask {attention.mask}", "the mask attached")
    mask, _ = layers.origin(inputs[_MASK].name)
    if mask != attention.mask:
        raise _wrong(f"{attention.node} masked by {mask}", f"the mask {attention.mask}")
    keys, scales_keys = layers.origin(inputs[_K].name)
    values, scales_values = layers.origin(inputs[_V].name)
    if (keys, values) != (attention.keys, attention.values) or scales_values:
        raise _wrong(
            f"{attention.node} over {keys} and {values}",
            f"the caches {attention.keys} and {attention.values}",
        )
    if has_lengths and inputs[_KV_LENGTHS] is None:
        raise _wrong(f"{attention.node} without key/value lengths", "lengths attached")
    return ParsedAttention(attention.node, mask, inputs[_KV_LENGTHS] is not None, scales_keys)


def _wrong(found: str, needed: str) -> TensorRTError:
    return TensorRTError(f"after parsing: {found}", needed, _DO)
