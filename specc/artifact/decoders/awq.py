"""Checkpoints of AWQ, version gemm, as AutoAWQ writes them.

A weight [N, K] of 4 bits is `qweight`, int32 [K, N / 8] along N; `scales` [G, N]; and `qzeros`,
int32 [G, N / 8]. The nibbles of a word, from the lowest on, are those of its outputs 0, 2, 4, 6, 1,
3, 5 and 7; zero points are as they are meant.
Source: https://github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specc.artifact.decoders.decoded_weight import (
    DecodedWeight,
    GroupedWeight,
    check_group,
)
from specc.artifact.decoders.refusals import unknown_scheme
from specc.artifact.decoders.stored_tensors import (
    read_columns,
    require,
    unpack_words,
    word_range,
)
from specc.artifact.integers import Integers
from specc.artifact.safetensors_io import TensorReader

METHOD = "awq"
_BITS, _PER_WORD = 4, 8
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# output of a word's eight that each of its nibbles belongs to
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_OWN_NAMES = {"bits": "w_bit", "group_size": "q_group_size"}


@dataclass(frozen=True)
class _AWQWeight(GroupedWeight):
    def rows(self, reader: TensorReader, start: int, stop: int) -> Integers:
        levels, scale, zero = self.tensors
        found = _outputs(reader, levels, start, stop)
        scales = read_columns(reader, scale, start, stop).t().float()
        return Integers(found, scales, _outputs(reader, zero, start, stop).to(torch.int16))


def _outputs(reader: TensorReader, key: str, start: int, stop: int) -> Tensor:
    """[outputs, rows] uint8 of outputs start … stop - 1 of words [rows, N / 8]."""
    first, last = word_range(start, stop, _BITS)
    nibbles = unpack_words(read_columns(reader, key, first, last), _BITS)
    words = nibbles.view(nibbles.shape[0], -1, _PER_WORD)
    ordered = torch.empty_like(words)
    ordered[..., list(_ORDER)] = words
    skipped = start - first * _PER_WORD
    return ordered.flatten(1)[:, skipped : skipped + stop - start].t().contiguous()


def decode(
    reader: TensorReader, config: Mapping[str, Any], is_weight_only: bool
) -> dict[str, DecodedWeight]:
    """Find the quantized weights of a checkpoint; see `compressed_tensors.decode`."""
    where, scheme = reader.location(), _check(config, reader.location())
    keys = set(reader.keys())
    if scaled := [key for key in keys if key.endswith(".act.scales")]:
        raise unknown_scheme(f"{scheme}, with activations that are scaled ({scaled[0]})", where)
    found: dict[str, DecodedWeight] = {}
    for key in reader.keys():  # noqa: SIM118 - a reader is no mapping
        module, _, kind = key.rpartition(".")
        if kind == "qweight":
            weight = decode_module(reader, module, config)
            found[weight.name] = weight
    return found


def _check(config: Mapping[str, Any], where: str) -> str:
    """The scheme's name. Raises WeightError: another scheme."""
    bits, version = _field(config, "bits"), str(config.get("version", "gemm")).lower()
    scheme = f"{METHOD}, {bits} bits, version {version}"
    if bits != _BITS or version != "gemm":
        raise unknown_scheme(scheme, where)
    if not config.get("zero_point", True):
        raise unknown_scheme(f"{scheme}, zero_point: false", where)
    return scheme


def _field(config: Mapping[str, Any], name: str) -> Any:
    """A field, whose name is another in AutoAWQ's own quant_config.json."""
    return config.get(name, config.get(_OWN_NAMES[name]))


def decode_module(reader: TensorReader, module: str, config: Mapping[str, Any]) -> DecodedWeight:
    """The weight of one layer; see `gptq.decode_module`."""
    _check(config, reader.location())
    levels, scale, zero = (f"{module}.{kind}" for kind in ("qweight", "scales", "qzeros"))
    scheme, where, shape = f"{METHOD}, 4 bits", reader.location(), reader.shape(levels)
    require(reader, levels, [shape] if len(shape) == 2 else [(0, 0)], (torch.int32,), scheme)
    columns, outputs = shape[0], shape[1] * _PER_WORD
    size = _field(config, "group_size")
    size = -1 if size is None else size
    if size == -1:
        size = columns
    if type(size) is not int or size < 1:
        raise unknown_scheme(f"{scheme}, group_size {size}", where)
    check_group(size, columns, levels, where)
    count = -(-columns // size)
    scheme += f", groups of {size}" if size < columns else ", a scale for each channel"
    scheme += ", zero points"
    require(reader, scale, [(count, outputs)], _FLOATS, scheme)
    require(reader, zero, [(count, shape[1])], (torch.int32,), scheme)
    tensors = (levels, scale, zero)
    return _AWQWeight(f"{module}.weight", (outputs, columns), tensors, scheme, _BITS, size, True)
