"""Checkpoints of bitsandbytes: nf4 and fp4, with scales as they are or quantized again; int8.

A weight [N, K] of 4 bits is `weight`, uint8 [N · K / 2, 1], two codes a byte, the first in the high
bits; of each block of them, a largest magnitude in `weight.absmax`; and the values of codes, at
most 1, in `weight.quant_map`. Where magnitudes are quantized, too, they are bytes, and
`weight.nested_absmax`, `weight.nested_quant_map` and an offset say what they stand for. Shape,
sizes of blocks and offset are JSON, as bytes of a tensor `weight.quant_state.bitsandbytes__nf4`.
No layout of an engine holds such values: they become numbers. A weight of 8 bits is `weight`, int8
[N, K], and `SCB`, the largest magnitude of each row, which 127 stands for; its activations are
rounded but for outliers.
Source: https://github.com/bitsandbytes-foundation/bitsandbytes, bitsandbytes/functional.py,
`QuantState.as_dict` and `dequantize_4bit`; Dettmers et al., arXiv:2305.14314, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specc.artifact.decoders.decoded_weight import DecodedWeight, GroupedWeight
from specc.artifact.decoders.refusals import check_activations, unknown_scheme
from specc.artifact.decoders.stored_tensors import read_rows, read_tensor, require
from specc.artifact.integers import Integers
from specc.artifact.safetensors_io import TensorReader
from specc.errors import WeightError
from specc.system.json_file import JsonError, parse_json

METHOD = "bitsandbytes"
_KINDS = ("nf4", "fp4")
_INT8 = f"{METHOD}, int8"
_STATE = ".quant_state.bitsandbytes__"
# a state is some 200 bytes
_MOST_STATE = 1 << 16


@dataclass(frozen=True)
class _BlockWeight(DecodedWeight):
    """A matrix in blocks of its values, row after row.

    Args:
        block: values with one magnitude.
        nested: magnitudes with one magnitude of their own; 0 where they are numbers.
        offset: what is added to such magnitudes.
    """

    block: int
    nested: int
    offset: float

    def values(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        columns = self.shape[1]
        first, last = start * columns, stop * columns
        codes = read_rows(reader, self.tensors[0], first // 2, last // 2).flatten()
        levels = torch.stack([codes >> 4, codes & 15], -1).flatten().long()
        table = read_tensor(reader, self.tensors[2])
        blocks = torch.arange(first, last) // self.block
        least = first // self.block
        magnitudes = self._magnitudes(reader, least, -(-last // self.block))
        return (table[levels] * magnitudes[blocks - least]).view(stop - start, columns)

    def _magnitudes(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        """Of blocks start … stop - 1, float32."""
        stored = read_rows(reader, self.tensors[1], start, stop)
        if not self.nested:
            return stored
        largest = read_tensor(reader, self.tensors[3])[torch.arange(start, stop) // self.nested]
        return read_tensor(reader, self.tensors[4])[stored.long()] * largest + self.offset


@dataclass(frozen=True)
class _RowWeight(GroupedWeight):
    def rows(self, reader: TensorReader, start: int, stop: int) -> Integers:
        levels = (read_rows(reader, self.tensors[0], start, stop).int() + 128).to(torch.uint8)
        return Integers(levels, read_rows(reader, self.tensors[1], start, stop)[:, None] / 127)


def decode(
    reader: TensorReader, config: Mapping[str, Any], is_weight_only: bool
) -> dict[str, DecodedWeight]:
    """Find the quantized weights of a checkpoint; see `compressed_tensors.decode`."""
    where, found = reader.location(), dict[str, DecodedWeight]()
    if config.get("load_in_8bit"):
        check_activations("activations (int8, but for outliers)", _INT8, where, is_weight_only)
    for key in reader.keys():  # noqa: SIM118 - a reader is no mapping
        module, _, last = key.rpartition(".")
        if last == "SCB":
            found[f"{module}.weight"] = _decode_int8(reader, module)
        name, state, kind = key.partition(_STATE)
        if not state:
            continue
        if kind not in _KINDS:
            raise unknown_scheme(f"{METHOD}, {kind}", where)
        found[name] = _decode_one(reader, name, key, f"{METHOD}, {kind}")
    return found


def _decode_int8(reader: TensorReader, module: str) -> DecodedWeight:
    name, scale, form = (f"{module}.{kind}" for kind in ("weight", "SCB", "weight_format"))
    require(reader, scale, [reader.shape(scale)[:1]], (torch.float32,), _INT8)
    outputs = reader.shape(scale)[0]
    shape = reader.shape(name) if name in reader.keys() else ()  # noqa: SIM118 - no mapping
    fits = len(shape) == 2 and shape[0] == outputs
    require(reader, name, [shape] if fits else [(outputs, 0)], (torch.int8,), _INT8)
    tensors = [name, scale]
    if form in reader.keys():  # noqa: SIM118 - no mapping
        require(reader, form, [()], (torch.uint8,), _INT8)
        if int(read_tensor(reader, form)):
            raise unknown_scheme(f"{_INT8}, in an order of its own ({form})", reader.location())
        tensors.append(form)
    columns = shape[1]
    return _RowWeight(name, (outputs, columns), tuple(tensors), _INT8, 8, columns, False)


def _decode_one(reader: TensorReader, name: str, state: str, scheme: str) -> DecodedWeight:
    where = reader.location(state)
    sizes = _state_of(reader, state)
    shape, block = sizes.get("shape"), sizes.get("blocksize", 0)
    nested, offset = sizes.get("nested_blocksize", 0), sizes.get("nested_offset", 0.0)
    if not (
        isinstance(shape, list)
        and len(shape) == 2
        and all(map(_is_size, [*shape, block, nested or 1]))
    ):
        raise unknown_scheme(f"{scheme}, shape {shape}, blocks of {block} and {nested}", where)
    if type(offset) not in (int, float) or shape[1] % 2:
        raise unknown_scheme(f"{scheme}, shape {shape}, offset {offset}", where)
    count = shape[0] * shape[1]
    blocks = -(-count // block)
    parts = [name, f"{name}.absmax", f"{name}.quant_map"]
    require(reader, name, [(count // 2, 1)], (torch.uint8,), scheme)
    kind = torch.uint8 if nested else torch.float32
    require(reader, parts[1], [(blocks,)], (kind,), scheme)
    require(reader, parts[2], [(16,)], (torch.float32,), scheme)
    if nested:
        parts += [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
        require(reader, parts[3], [(-(-blocks // nested),)], (torch.float32,), scheme)
        require(reader, parts[4], [(256,)], (torch.float32,), scheme)
        scheme += ", scales in 8 bits"
    scheme += f", blocks of {block}"
    tensors = (*parts, state)
    own = (shape[0], shape[1])
    return _BlockWeight(name, own, tensors, scheme, block, nested, float(offset))


def _state_of(reader: TensorReader, key: str) -> dict[str, Any]:
    shape = reader.shape(key)
    is_text = len(shape) == 1 and shape[0] <= _MOST_STATE and reader.dtype(key) == torch.uint8
    try:
        found = parse_json(bytes(read_tensor(reader, key).tolist())) if is_text else None
    except JsonError:
        found = None
    if not isinstance(found, dict):
        raise WeightError(
            f"{key} in {reader.location(key)} is not the state of a quantized weight",
            "JSON as bytes, which bitsandbytes writes",
            "download or save the checkpoint again",
        )
    return found


def _is_size(item: Any) -> bool:
    return type(item) is int and 0 < item < 1 << 40
