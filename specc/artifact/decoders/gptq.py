"""Checkpoints of GPTQ, versions 1 and 2, as AutoGPTQ, Optimum and GPTQModel write them.

A weight [N, K] of b bits is `qweight`, int32 [K · b / 32, N] along K, the lowest bits first;
`scales` [G, N]; `qzeros`, int32 [G, N · b / 32] along N; and `g_idx` [K], the group of each column.
Version 1 (`checkpoint_format: gptq`) stores z - 1. A zero point of 0 is then all ones, or has
borrowed from its neighbor, as programs differ: such a weight is refused.
Source: https://github.com/ModelCloud/GPTQModel, gptqmodel/nn_modules/qlinear and utils/model.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specc.artifact.decoders.column_order import column_order
from specc.artifact.decoders.decoded_weight import (
    DecodedWeight,
    GroupedWeight,
    check_group,
)
from specc.artifact.decoders.refusals import unknown_scheme
from specc.artifact.decoders.stored_tensors import (
    num_words,
    read_columns,
    read_tensor,
    require,
    unpack_words,
    word_range,
)
from specc.artifact.integers import Integers
from specc.artifact.safetensors_io import TensorReader
from specc.errors import WeightError

METHOD = "gptq"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# checkpoint_format → what stored zero points are less than those that are meant
_OFFSETS = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True)
class _GPTQWeight(GroupedWeight):
    offset: int = 0

    def rows(self, reader: TensorReader, start: int, stop: int) -> Integers:
        levels, scale, zero = self.tensors[:3]
        words = read_columns(reader, levels, start, stop)
        found = unpack_words(words.t(), self.bits)[:, : self.shape[1]].contiguous()
        scales = read_columns(reader, scale, start, stop).t().float()
        # words of zero points hold those of neighboring outputs
        first, last = word_range(start, stop, self.bits)
        fields = unpack_words(read_columns(reader, zero, first, last), self.bits)
        skipped = start - first * (32 // self.bits)
        stored = fields[:, skipped : skipped + stop - start].t().to(torch.int16)
        zeros = self._meant(stored, reader)
        return Integers(found, scales, zeros if self.has_zeros else None)

    def _meant(self, stored: torch.Tensor, reader: TensorReader) -> torch.Tensor:
        where = f"{self.tensors[2]} in {reader.location(self.tensors[2])}"
        if self.offset and bool((stored == (1 << self.bits) - 1).any()):
            raise WeightError(
                f"{where} holds the zero point {(1 << self.bits) - 1} of version 1, which some"
                f" programs take for {1 << self.bits}, others for 0",
                f"zero points of 1 … {(1 << self.bits) - 1}, or checkpoint_format gptq_v2",
                "save the checkpoint as gptq_v2, or pass the unquantized one with --quantize int8"
                " or int4",
            )
        zeros = stored + self.offset
        middle = 1 << (self.bits - 1)
        if not self.has_zeros and bool((zeros != middle).any()):
            raise WeightError(
                f"{where} holds zero points other than {middle}",
                f"zero points of {middle}, since quantization_config says sym: true and"
                f" checkpoint_format: {'gptq' if self.offset else 'gptq_v2'}",
                "correct sym or checkpoint_format in config.json",
            )
        return zeros


def decode(
    reader: TensorReader, config: Mapping[str, Any], is_weight_only: bool
) -> dict[str, DecodedWeight]:
    """Find the quantized weights of a checkpoint; see `compressed_tensors.decode`."""
    _offset(config, reader.location())
    found: dict[str, DecodedWeight] = {}
    for key in reader.keys():  # noqa: SIM118 - a reader is no mapping
        module, _, kind = key.rpartition(".")
        if kind == "qweight":
            weight = decode_module(reader, module, config)
            found[weight.name] = weight
    return found


def _offset(config: Mapping[str, Any], where: str) -> int:
    """What stored zero points are less than those that are meant.

    Raises:
        WeightError: another scheme.
    """
    bits = config.get("bits")
    form = config.get("checkpoint_format") or config.get("format") or "gptq"
    if config.get("is_marlin_format"):
        form = "marlin"
    scheme = f"{METHOD}, {bits} bits"
    if bits not in (4, 8):
        raise unknown_scheme(scheme, where)
    if form not in _OFFSETS:
        raise unknown_scheme(f"{scheme}, checkpoint_format {form}", where)
    # names that begin with -: are of layers that are left as they are
    changed = [name for name in config.get("dynamic") or {} if not name.startswith("-:")]
    if changed:
        raise unknown_scheme(f"{scheme}, other bits or groups for {changed[0]} (dynamic)", where)
    return _OFFSETS[form]


def decode_module(reader: TensorReader, module: str, config: Mapping[str, Any]) -> DecodedWeight:
    """The weight of one layer.

    Args:
        module: name of the layer, which has a tensor `qweight`.
        config: `quantization_config`, as it is for this layer.
    Raises:
        WeightError: another scheme, or tensors that do not fit it.
    """
    bits, where = config.get("bits", 0), reader.location()
    offset = _offset(config, where)
    size = config.get("group_size", -1)
    # without sym, zero points are read as they are
    has_zeros = not config.get("sym", False)
    scheme = f"{METHOD}{'' if offset else ' v2'}, {bits} bits"
    levels, scale, zero, order = (
        f"{module}.{kind}" for kind in ("qweight", "scales", "qzeros", "g_idx")
    )
    shape = reader.shape(levels)
    require(reader, levels, [shape] if len(shape) == 2 else [(0, 0)], (torch.int32,), scheme)
    columns, outputs = shape[0] * 32 // bits, shape[1]
    if size == -1:
        size = columns
    if type(size) is not int or size < 1:
        raise unknown_scheme(f"{scheme}, group_size {size}", where)
    check_group(size, columns, levels, where)
    count = -(-columns // size)
    scheme += f", groups of {size}" if size < columns else ", a scale for each channel"
    scheme += ", zero points" if has_zeros else ""
    require(reader, scale, [(count, outputs)], _FLOATS, scheme)
    require(reader, zero, [(count, num_words(outputs, bits))], (torch.int32,), scheme)
    tensors, columns_of = [levels, scale, zero], None
    if order in reader.keys():  # noqa: SIM118 - a reader is no mapping
        require(reader, order, [(columns,)], (torch.int32, torch.int64), scheme)
        columns_of = column_order(read_tensor(reader, order), size, order, where)
        tensors.append(order)
    elif config.get("desc_act"):
        raise WeightError(
            f"{where} has desc_act and no tensor {order}",
            f"a tensor {order}, which says the group of each column",
            "download or save the checkpoint again",
        )
    sizes = (bits, size, has_zeros, columns_of)
    return _GPTQWeight(
        f"{module}.weight", (outputs, columns), tuple(tensors), scheme, *sizes, offset=offset
    )
