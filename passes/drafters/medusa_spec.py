"""Medusa heads: what their files say, and whether they fit a target.

Read are headers, the map of ids, and a projection that is there under two names.

Head j is one layer or more of x + SiLU(W x + b), and a projection to ids. All heads read the hidden
state of one token after the target's final norm, from which the target's own head says what comes
next: head j proposes the token j + 1 after that. Published files name the tensors in two ways:

| | vLLM | FasterDecoding |
|---|---|---|
| all may begin with | `medusa_heads.` | `medusa_head.`, `medusa_heads.` |
| layers | `blocks.j.layers.l.` | `j.l.linear.` |
| projections, of L layers | `lm_heads.j.weight` | `j.L.weight` |
| one for all heads (`original_lm_head`) | `lm_head.weight`, or `lm_heads.0.weight` | |
| rows for some ids (`truncated_vocab_size`) | `token_map`, the id of each row | |
| a bias of layers | where `medusa_fc_bias` says so | always |

Sources: vllm-project/vllm models/medusa.py and transformers_utils/configs/medusa.py;
FasterDecoding/Medusa medusa/model/medusa_model.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.artifact.safetensors_io import TensorReader
from specc.drafters.medusa import MedusaHeads
from specc.errors import HeadError
from specc.passes.drafters.head_config import read_number
from specc.passes.drafters.head_spec import (
    MEDUSA,
    VLLM,
    HeadSpec,
    TargetFacts,
)
from specc.passes.drafters.head_tensors import check_left, check_shape, missing_error
from specc.passes.drafters.vocabulary_map import read_integers
from specc.passes.frontend.config_numbers import check_numbers

# the file that trainers of FasterDecoding's heads write in place of model.safetensors
MEDUSA_FILE = "medusa_lm_head.safetensors"
ONE_HEAD = "lm_head.weight"
_MAP = "token_map"
_PREFIXES = ("medusa_heads.", "medusa_head.")
_NUM_HEADS = ("medusa_num_heads", "num_medusa_heads", "num_heads")
_NUM_LAYERS = ("medusa_num_layers", "num_medusa_layers", "num_hidden_layers")
_DO = "pass the heads of this target, or download them again"


@dataclass(frozen=True, eq=False)
class MedusaSpec(HeadSpec):
    """Medusa heads that fit their target.

    Args:
        block: what one pass of them proposes.
        num_layers: L, of each head.
        num_rows: of a projection.
        columns: [V] int64, the row of the projections of each id of the target: `num_rows`, one
            past all, for none. None where row i is id i, of all ids.
        has_one_projection: all heads have the same one.
        weights: file or directory of these.
    """

    block: MedusaHeads
    num_layers: int
    num_rows: int
    columns: Tensor | None
    has_one_projection: bool
    weights: Path

    @property
    def files(self) -> Path:
        """A directory, or the one file that trainers of FasterDecoding's heads write."""
        return self.weights

    def drafter(self, name: str) -> MedusaHeads:
        return replace(self.block, draft=name)

    @property
    def hands_on(self) -> bool:
        """No: a pass reads the target alone."""
        return False

    @property
    def trained_length(self) -> int:
        """0: heads know no positions."""
        return 0

    def describe(self) -> list[str]:
        """What they are, a line each, for people."""
        kept = self.num_rows if self.columns is None else int((self.columns < self.num_rows).sum())
        owner = "one projection for all" if self.has_one_projection else "a projection of each"
        return [
            f"{self.block.size} {self.kind} heads, files of {self.layout}, {self.num_layers} layers"
            f" of {self.width} each",
            f"reads the target at boundary {self.boundaries[0]} after the final norm",
            self.block.describe(),
            f"{owner}: {kept} of {self.target.vocab_size} ids",
        ]


def fit_medusa(
    reader: TensorReader,
    raw: Mapping[str, Any],
    layout: str,
    directory: Path,
    weights: Path,
    target: TargetFacts,
) -> MedusaSpec:
    """Heads, compared with their target.

    Args:
        raw: contents of config.json.
        layout: `VLLM` or `FASTER_DECODING`.
        weights: what `reader` reads.
    Raises:
        HeadError: another target's, tensors too many or too few, or what specc does not compute.
        NotCausalLMError: numbers that no model has.
    """
    from transformers import PretrainedConfig

    name = str(directory)
    check_numbers(raw, name)
    if "quantization_config" in raw or "compression_config" in raw:
        raise HeadError(
            f"{name}: quantized Medusa heads", "heads whose weights are floats", "pass others"
        )
    if raw.get("logit_scale") not in (None, 1):
        raise HeadError(
            f"{name}: config.json: logit_scale is {raw['logit_scale']!r:.40}",
            "1, or none",
            "pass other heads",
        )
    if (width := read_number(raw, "hidden_size", name)) not in (None, target.width):
        raise HeadError(
            f"{name}: heads for a target of hidden size {width}; {target.name} has {target.width}",
            f"heads for a hidden size of {target.width}",
            "pass the heads of this target",
        )
    target.require("ids", read_number(raw, "vocab_size", name), target.vocab_size, name)
    places = _Places(list(reader.keys()), layout)
    num_heads = _number(raw, _NUM_HEADS, name) or places.count_heads()
    num_layers = _number(raw, _NUM_LAYERS, name) or places.count_layers()
    has_one = layout == VLLM and _flag(raw, "original_lm_head", name) is True
    tensors, num_rows = _tensors(reader, places, raw, (num_heads, num_layers), has_one, target)
    columns = _columns(reader, places, raw, num_rows, target, name)
    return MedusaSpec(
        kind=MEDUSA,
        layout=layout,
        directory=directory,
        target=target,
        config=PretrainedConfig.from_dict(
            {"hidden_size": target.width, "vocab_size": target.vocab_size}
        ),
        boundaries=(target.num_layers,),
        is_last_normed=True,
        shared=(),
        warnings=(),
        block=MedusaHeads(num_heads, is_partial=columns is not None),
        num_layers=num_layers,
        num_rows=num_rows,
        columns=columns,
        has_one_projection=has_one,
        tensors=tensors,
        weights=weights,
    )


class _Places:
    """Names of tensors in a checkpoint of a layout."""

    def __init__(self, names: list[str], layout: str) -> None:
        self.names, self.is_vllm = names, layout == VLLM
        found = (p for p in _PREFIXES if any(name.startswith(p) for name in names))
        self._prefix = next(found, "")

    def layer(self, head: int, layer: int) -> str:
        """What the tensors of a layer begin with."""
        if self.is_vllm:
            return f"{self._prefix}blocks.{head}.layers.{layer}"
        return f"{self._prefix}{head}.{layer}.linear"

    def projection(self, head: int, num_layers: int) -> str:
        if self.is_vllm:
            return f"{self._prefix}lm_heads.{head}.weight"
        return f"{self._prefix}{head}.{num_layers}.weight"

    def shared_projection(self) -> str:
        """The one that is all heads'; both names may be there, for the same."""
        own = f"{self._prefix}{ONE_HEAD}"
        return own if own in self.names else self.projection(0, 0)

    @property
    def token_map(self) -> str:
        return f"{self._prefix}{_MAP}"

    def count_heads(self) -> int:
        """Heads with a first layer; at least 1."""
        count = 0
        while f"{self.layer(count, 0)}.weight" in self.names:
            count += 1
        return max(count, 1)

    def count_layers(self) -> int:
        """Layers of the first head; at least 1."""
        count = 0
        while f"{self.layer(0, count)}.weight" in self.names:
            count += 1
        return max(count, 1)


def _tensors(
    reader: TensorReader,
    places: _Places,
    raw: Mapping[str, Any],
    sizes: tuple[int, int],
    has_one: bool,
    target: TargetFacts,
) -> tuple[dict[str, str], int]:
    """Parameter of the module → tensor, and rows of a projection."""
    name, (num_heads, num_layers) = reader.location(), sizes
    found: dict[str, str] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            own, place = f"blocks.{head}.{layer}", places.layer(head, layer)
            found[f"{own}.weight"] = f"{place}.weight"
            if _has_bias(raw, places, f"{place}.bias", name):
                found[f"{own}.bias"] = f"{place}.bias"
    if has_one:
        found[ONE_HEAD] = places.shared_projection()
    else:
        for head in range(num_heads):
            found[f"lm_heads.{head}.weight"] = places.projection(head, num_layers)
    if missing := [tensor for tensor in found.values() if tensor not in places.names]:
        raise missing_error(missing, reader, name)
    projection = found[ONE_HEAD if has_one else "lm_heads.0.weight"]
    shape = reader.shape(projection)
    num_rows = shape[0] if len(shape) == 2 else 0
    for parameter, tensor in found.items():
        wanted: tuple[int, ...] = (target.width, target.width)
        if parameter.endswith(".bias"):
            wanted = (target.width,)
        elif parameter.startswith("lm_head"):
            wanted = (num_rows, target.width)
        check_shape(reader, tensor, wanted, name)
    known = {*found.values(), places.token_map}
    if has_one and (other := places.projection(0, 0)) in places.names:
        _check_same(reader, projection, other, name)
        known.add(other)
    check_left([item for item in places.names if item not in known], name)
    return found, num_rows


def _check_same(reader: TensorReader, one: str, other: str, name: str) -> None:
    """Raises HeadError: two tensors for all heads' projection, and they are not the same."""
    if one == other:
        return
    check_shape(reader, other, reader.shape(one), name)
    is_same = reader.dtype(one) == reader.dtype(other) and all(
        bytes(a) == bytes(b)
        for a, b in zip(reader.read_chunks(one), reader.read_chunks(other), strict=True)
    )
    if not is_same:
        raise HeadError(
            f"{name}: original_lm_head, one projection for all heads, and two that differ: {one}"
            f" and {other}",
            "one of them, or the same twice",
            _DO,
        )


def _has_bias(raw: Mapping[str, Any], places: _Places, bias: str, name: str) -> bool:
    """Whether a layer has one: it is left over where the configuration says that it has none."""
    said = _flag(raw, "medusa_fc_bias", name) if places.is_vllm else True
    return bias in places.names if said is None else said


def _columns(
    reader: TensorReader,
    places: _Places,
    raw: Mapping[str, Any],
    num_rows: int,
    target: TargetFacts,
    name: str,
) -> Tensor | None:
    """See `MedusaSpec`."""
    size = target.vocab_size
    kept = read_number(raw, "truncated_vocab_size", name) or size
    has_map = places.token_map in places.names
    if num_rows not in (kept, size) or kept > size:
        raise HeadError(
            f"{name}: projections of {num_rows} rows; config.json and {target.name} say {kept} of"
            f" {size} ids",
            f"{kept} rows" if kept == size else f"{kept} rows, or {size}",
            _DO,
        )
    if not has_map and kept == size:
        return None
    if not has_map:
        raise HeadError(
            f"{name}: heads of {kept} of {size} ids, and no {_MAP}",
            f"{_MAP} [{kept}], the id of each row",
            _DO,
        )
    ids = read_integers(reader, places.token_map, (kept,), (torch.int64, torch.int32), name).long()
    if not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise HeadError(
            f"{name}: {_MAP} maps rows to ids {int(ids.min())} … {int(ids.max())}",
            f"ids of the target, 0 … {size - 1}",
            _DO,
        )
    if len(ids.unique()) < kept:
        raise HeadError(f"{name}: {_MAP} maps two rows to one id", "an id of each row", _DO)
    if kept == size and not torch.equal(ids, torch.arange(size)):
        # some of its readers then take row i for id i
        raise HeadError(
            f"{name}: {_MAP} of all {size} ids, in another order",
            f"a truncated_vocab_size below {size}, or no {_MAP}",
            _DO,
        )
    if kept == size:
        return None
    columns = torch.full((size,), num_rows)
    # projections may have rows of all ids, of which those that the map names are read
    columns[ids] = torch.arange(kept) if num_rows == kept else ids
    return columns


def _number(raw: Mapping[str, Any], keys: tuple[str, ...], name: str) -> int | None:
    """The first of these keys that is there."""
    found = (read_number(raw, key, name) for key in keys)
    return next((number for number in found if number is not None), None)


def _flag(raw: Mapping[str, Any], key: str, name: str) -> bool | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise HeadError(f"{name}: config.json: {key} is {value!r:.40}", "true or false", _DO)
    return value
