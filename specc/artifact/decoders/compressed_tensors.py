"""Checkpoints of compressed-tensors: packed and whole integers, float8, mxfp4 and nvfp4.

A weight [N, K] of b bits is `weight_packed`, int32 [N, K · b / 32] along K, the lowest bits first,
of q + 2^(b-1); `weight_scale` [N, G]; `weight_shape`, which says N and K; and, where it is not
symmetric, `weight_zero_point`, int32 [N · b / 32, G] along N, with the same offset. So the stored
integers are those of an engine. `int-quantized` has q itself, int8 [N, K]. `float-quantized` has
`weight` float8 [N, K], to be multiplied with one scale, one for each output, or one for each block.
Source: https://github.com/vllm-project/compressed-tensors, src/compressed_tensors/compressors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specc.artifact.decoders.activation_scales import with_scales_of_activations
from specc.artifact.decoders.column_order import column_order
from specc.artifact.decoders.decoded_weight import (
    DecodedWeight,
    GroupedWeight,
    check_group,
)
from specc.artifact.decoders.float8 import decode_float8
from specc.artifact.decoders.mxfp4 import GROUP, decode_mxfp4
from specc.artifact.decoders.nvfp4 import GROUP as NVFP4_GROUP
from specc.artifact.decoders.nvfp4 import decode_nvfp4
from specc.artifact.decoders.refusals import check_activations, unknown_scheme
from specc.artifact.decoders.stored_tensors import (
    num_words,
    read_rows,
    read_tensor,
    require,
    unpack_words,
    word_range,
)
from specc.artifact.integers import Integers
from specc.artifact.safetensors_io import TensorReader
from specc.errors import WeightError

METHOD = "compressed-tensors"
PACKED, WHOLE, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
MXFP4, NVFP4 = "mxfp4-pack-quantized", "nvfp4-pack-quantized"
_FORMATS = (PACKED, WHOLE, FLOAT, MXFP4, NVFP4, "naive-quantized")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_STRATEGIES = {PACKED: ("channel", "group"), WHOLE: ("tensor", "channel", "group")}


@dataclass(frozen=True)
class _Group:
    """One of `config_groups`: which layers it is for, and how their weights are stored."""

    name: str
    targets: tuple[str, ...]
    weights: Mapping[str, Any]
    format: str


@dataclass(frozen=True)
class _PackedWeight(GroupedWeight):
    is_packed: bool = True

    def rows(self, reader: TensorReader, start: int, stop: int) -> Integers:
        levels, scale = self.tensors[:2]
        if self.is_packed:
            words = read_rows(reader, levels, start, stop)
            found = unpack_words(words, self.bits)[:, : self.shape[1]].contiguous()
        else:
            found = (read_rows(reader, levels, start, stop).int() + 128).to(torch.uint8)
        scales = read_rows(reader, scale, start, stop) if _is_by_row(reader, scale) else None
        if scales is None:
            scales = read_tensor(reader, scale).reshape(1, 1).expand(stop - start, 1)
        if not self.has_zeros:
            return Integers(found, scales.float())
        zero = self.tensors[2]
        if not self.is_packed:
            zeros = read_rows(reader, zero, start, stop).to(torch.int16) + 128
            return Integers(found, scales.float(), zeros)
        # words of zero points hold those of neighboring outputs
        first, last = word_range(start, stop, self.bits)
        words = read_rows(reader, zero, first, last)
        skipped = start - first * (32 // self.bits)
        zeros = unpack_words(words.t(), self.bits).t()[skipped : skipped + stop - start]
        return Integers(found, scales.float(), zeros.to(torch.int16))


def decode(
    reader: TensorReader, config: Mapping[str, Any], is_weight_only: bool
) -> dict[str, DecodedWeight]:
    """Find the quantized weights of a checkpoint; headers are read, and small tensors.

    Args:
        config: its `quantization_config`.
        is_weight_only: take weights as they are where activations are quantized, too.
    Returns:
        weights by name.
    Raises:
        WeightError: another scheme, or tensors that do not fit it.
    """
    where = reader.location()
    groups = _groups(config, where, is_weight_only)
    found: dict[str, DecodedWeight] = {}
    for key in reader.keys():  # noqa: SIM118 - a reader is no mapping
        module, _, kind = key.rpartition(".")
        is_float8 = kind == "weight" and reader.dtype(key) == torch.float8_e4m3fn
        is_int8 = kind == "weight" and reader.dtype(key) == torch.int8
        if not (kind == "weight_packed" or is_float8 or is_int8):
            continue
        group = _group_of(module, groups, key, where)
        if is_float8 != (group.format == FLOAT) or is_int8 != (group.format == WHOLE):
            raise unknown_scheme(
                f"{METHOD}, {group.format}, and {key} of {reader.dtype(key)}", where
            )
        weight = _DECODERS.get(group.format, _decode_integers)(reader, module, group)
        found[weight.name] = weight
    return found


def _groups(config: Mapping[str, Any], where: str, is_weight_only: bool) -> list[_Group]:
    if (status := config.get("quantization_status", "compressed")) != "compressed":
        raise unknown_scheme(f"{METHOD} with quantization_status {status}", where)
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise unknown_scheme(f"{METHOD} with sparse weights ({sparsity})", where)
    if config.get("transform_config"):
        raise unknown_scheme(f"{METHOD} with transforms (transform_config)", where)
    if config.get("kv_cache_scheme"):
        check_activations("keys and values (kv_cache_scheme)", METHOD, where, is_weight_only)
    groups = []
    for name, item in (config.get("config_groups") or {}).items():
        form = item.get("format") or config.get("format")
        if form not in _FORMATS:
            raise unknown_scheme(f"{METHOD}, {form}", where)
        weights = item.get("weights")
        if weights is None:
            raise unknown_scheme(f"{METHOD}, {name} without weights", where)
        for part in ("input_activations", "output_activations"):
            if item.get(part) is not None:
                scheme = f"{METHOD}, {_shorthand(weights, item[part])}"
                check_activations(part.replace("_", " "), scheme, where, is_weight_only)
        if form == "naive-quantized":
            form = FLOAT if weights.get("type") == "float" else WHOLE
        groups.append(_Group(name, tuple(item.get("targets") or ()), weights, form))
    if not groups:
        raise unknown_scheme(f"{METHOD} without config_groups", where)
    return groups


def _shorthand(weights: Mapping[str, Any], activations: Mapping[str, Any]) -> str:
    return f"W{weights.get('num_bits')}A{activations.get('num_bits')}"


def _group_of(module: str, groups: list[_Group], key: str, where: str) -> _Group:
    """By its name, by a pattern of names, or as one of the layers of a class, in this order."""
    for group in groups:
        if module in group.targets:
            return group
    for group in groups:
        patterns = [item[3:] for item in group.targets if item.startswith("re:")]
        if any(re.match(pattern, module) for pattern in patterns):
            return group
    # names of classes have capitals, those of layers and patterns have not
    classes = [group for group in groups if any(item[:1].isupper() for item in group.targets)]
    if len(classes) == 1:
        return classes[0]
    raise WeightError(
        f"{key} in {where} is quantized, and {len(classes) or 'none'} of the config_groups of"
        " quantization_config are for it",
        "one group whose targets have it",
        "correct config.json",
    )


def _decode_integers(reader: TensorReader, module: str, group: _Group) -> DecodedWeight:
    form, options, where = group.format, group.weights, reader.location()
    is_packed = form == PACKED
    bits, strategy = options.get("num_bits", 0), options.get("strategy")
    scheme = f"{METHOD}, {form}, {bits} bits"
    if bits not in ((4, 8) if is_packed else (8,)) or options.get("type", "int") != "int":
        raise unknown_scheme(f"{scheme} of type {options.get('type')}", where)
    if strategy not in _STRATEGIES[form]:
        raise unknown_scheme(f"{scheme}, strategy {strategy}", where)
    levels = f"{module}.{'weight_packed' if is_packed else 'weight'}"
    shape = reader.shape(levels)
    if is_packed:
        require(reader, f"{module}.weight_shape", [(2,)], (torch.int64, torch.int32), scheme)
        shape = tuple(read_tensor(reader, f"{module}.weight_shape").tolist())
        want = (shape[0], num_words(shape[1], bits))
        require(reader, levels, [want], (torch.int32,), scheme)
    outputs, columns = shape
    size = options.get("group_size") if strategy == "group" else columns
    if type(size) is not int or size < 1:
        raise unknown_scheme(f"{scheme}, group_size {size}", where)
    check_group(size, columns, levels, where)
    count, has_zeros = -(-columns // size), not options.get("symmetric", True)
    scheme += f", groups of {size}" if strategy == "group" else f", a scale for each {strategy}"
    scale, tensors = f"{module}.weight_scale", [levels, f"{module}.weight_scale"]
    shapes = [(1,), ()] if strategy == "tensor" else [(outputs, count)]
    require(reader, scale, shapes, _FLOATS, scheme)
    if has_zeros:
        zero = f"{module}.weight_zero_point"
        if strategy == "tensor":
            raise unknown_scheme(f"{scheme}, with a zero point", where)
        want = (num_words(outputs, bits) if is_packed else outputs, count)
        require(reader, zero, [want], (torch.int32 if is_packed else torch.int8,), scheme)
        tensors.append(zero)
        scheme += ", zero points"
    tensors += [f"{module}.weight_shape"] * is_packed
    order, columns_of = f"{module}.weight_g_idx", None
    if order in reader.keys():  # noqa: SIM118 - a reader is no mapping
        require(reader, order, [(columns,)], (torch.int32, torch.int64), scheme)
        columns_of = column_order(read_tensor(reader, order), size, order, where)
        tensors.append(order)
    name = f"{module}.weight"
    sizes = (bits, size, has_zeros, columns_of)
    return _PackedWeight(name, shape, tuple(tensors), scheme, *sizes, is_packed=is_packed)


def _decode_float8(reader: TensorReader, module: str, group: _Group) -> DecodedWeight:
    options, where = group.weights, reader.location()
    strategy = options.get("strategy")
    scheme = f"{METHOD}, {FLOAT}, 8 bits, a scale for each {strategy}"
    if options.get("num_bits") != 8 or options.get("type") != "float":
        raise unknown_scheme(f"{scheme}, of type {options.get('type')}", where)
    if not options.get("symmetric", True):
        raise unknown_scheme(f"{scheme}, with zero points", where)
    blocks = None
    if strategy == "block":
        blocks = tuple(options.get("block_structure") or ())
        if len(blocks) != 2 or not all(type(size) is int and size > 0 for size in blocks):
            raise unknown_scheme(f"{scheme}, block_structure {list(blocks)}", where)
    elif strategy not in ("tensor", "channel"):
        raise unknown_scheme(scheme, where)
    names = (f"{module}.weight", f"{module}.weight_scale")
    return decode_float8(reader, *names, scheme, blocks, strategy == "channel")


def _decode_mxfp4(reader: TensorReader, module: str, group: _Group) -> DecodedWeight:
    scheme = _check_e2m1(group, GROUP, reader.location())
    names = (f"{module}.weight_packed", f"{module}.weight_scale")
    return decode_mxfp4(reader, f"{module}.weight", names, scheme)


def _decode_nvfp4(reader: TensorReader, module: str, group: _Group) -> DecodedWeight:
    scheme = _check_e2m1(group, NVFP4_GROUP, reader.location())
    names = (f"{module}.weight_packed", f"{module}.weight_scale", f"{module}.weight_global_scale")
    weight = decode_nvfp4(reader, f"{module}.weight", names, scheme, is_inverse=True)
    return with_scales_of_activations(reader, weight)


def _check_e2m1(group: _Group, size: int, where: str) -> str:
    options, scheme = group.weights, f"{METHOD}, {group.format}"
    kind = options.get("num_bits"), options.get("type"), options.get("group_size")
    if kind != (4, "float", size):
        raise unknown_scheme(f"{scheme}, {kind[0]} bits, {kind[1]}, groups of {kind[2]}", where)
    return scheme


_DECODERS = {FLOAT: _decode_float8, MXFP4: _decode_mxfp4, NVFP4: _decode_nvfp4}


def _is_by_row(reader: TensorReader, scale: str) -> bool:
    return len(reader.shape(scale)) == 2
