"""Hydra heads: what their files say, and whether they fit a target.

Read are headers, and what is there more than once. D heads of L layers have these tensors:

| part | name |
|---|---|
| first layer of head j, of [h, e_0 … e_j] | `hydra_mlp.j.0.linear`, `….res_connection` |
| layer l of it, one module for all l > 0 | `hydra_mlp.j.l.linear` |
| its projection to ids, with a bias | `hydra_lm_head.j` |
| embedding of the target, frozen | `input_embed_fn` |
| a layer as the target's (`prefix-mlp`) | `prefix_embeding_layer.layers.0`, `….norm` |

Where a dropout comes before each layer, as in `prefix-mlp`, layer l is 2 l + 1, and a projection
`hydra_lm_head.j.1`. The prefix layer is a model of the target's configuration with one layer, whose
own embedding nothing reads. Trainers pickle these as `hydra_lm_head.pt`; who converts them writes
`hydra_lm_head.safetensors`, in which layers that are one module may be there once.

Source: zankner/Hydra hydra/model/hydra_model.py, hydra_heads/mlp_head.py, prefix_mlp_head.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specc.artifact.safetensors_io import TensorReader
from specc.drafters.hydra import (
    EMBEDDING,
    FACTS,
    FIRST_READS,
    PARTS,
    PREFIX_FACTS,
    HydraHeads,
    PrefixHydraHeads,
    projection_of,
)
from specc.errors import HeadError
from specc.passes.drafters.head_config import read_number
from specc.passes.drafters.head_spec import HeadSpec, TargetFacts
from specc.passes.drafters.head_tensors import check_left, check_shape, missing_error
from specc.passes.frontend.config_numbers import check_numbers

# what converted files are called in place of model.safetensors
HYDRA_FILE = "hydra_lm_head.safetensors"
LAYOUT = "zankner/Hydra"
_NUM_HEADS, _NUM_LAYERS, _ARCH = "hydra_num_heads", "hydra_num_layers", "hydra_head_arch"
_MLP, _PREFIX = "mlp", "prefix-mlp"
# where the prefix layer is, as its trainer spells it, and what of it is there and not read
_LAYER, _NORM = "prefix_embeding_layer.layers.0", "prefix_embeding_layer.norm.weight"
_UNREAD = "prefix_embeding_layer.embed_tokens.weight"
_EMBEDDING = "input_embed_fn.weight"
_DO = "pass the heads of this target, or download them again"
_OTHERS = "pass Hydra heads whose hydra_head_arch is mlp or prefix-mlp, or another draft"


@dataclass(frozen=True, eq=False)
class HydraSpec(HeadSpec):
    """Hydra heads that fit their target; `config` is the target's, of one layer.

    Args:
        shapes: of all parameters, those of steps among them.
        windows: keys that the prefix layer sees, 0 is all; none without one.
        weights: file or directory of these.
    """

    block: HydraHeads
    shapes: dict[str, tuple[int, ...]]
    windows: tuple[int, ...]
    weights: Path
    has_qk_norm: bool = False

    @property
    def files(self) -> Path:
        return self.weights

    def drafter(self, name: str) -> HydraHeads:
        return replace(self.block, draft=name)

    @property
    def hands_on(self) -> bool:
        """No: levels after the first are computed by steps."""
        return False

    @property
    def trained_length(self) -> int:
        """0 without a prefix layer: heads know no positions."""
        return super().trained_length if self.windows else 0

    def describe(self) -> list[str]:
        """What they are, a line each, for people."""
        norm = " after the final norm" if self.is_last_normed else ""
        layer = "; a prefix layer reads those of all tokens" if self.windows else ""
        tied = ", of which all but the first are one" if self.block.is_tied else ""
        return [
            f"{self.block.size} {self.kind} heads, files of {self.layout}, {self.block.num_layers}"
            f" layers of {self.width} each{tied}",
            f"reads the target at boundary {self.boundaries[0]}{norm}{layer}",
            self.block.describe(),
        ]


def says_hydra(raw: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of Hydra heads, of whatever architecture."""
    return raw.get("speculators_model_type") is None and (_NUM_HEADS in raw or _ARCH in raw)


def fit_hydra(
    reader: TensorReader,
    raw: Mapping[str, Any],
    directory: Path,
    weights: Path,
    target: TargetFacts,
) -> HydraSpec:
    """Heads, compared with their target.

    Args:
        raw: contents of config.json.
        weights: what `reader` reads.
    Raises:
        HeadError: another target's, tensors too many or too few, or what specc does not compute.
        NotCausalLMError: numbers that no model has.
    """
    from transformers import PretrainedConfig

    name = str(directory)
    check_numbers(raw, name)
    has_prefix = _arch(raw, target, name) == _PREFIX
    offset = _offset(raw, target, name)
    names = list(reader.keys())
    num_heads = read_number(raw, _NUM_HEADS, name) or _count(names)
    num_layers = read_number(raw, _NUM_LAYERS, name) or 1
    places = _heads(names, num_heads, num_layers)
    is_tied = _are_tied(reader, places, num_heads, num_layers)
    if has_prefix:
        config = copy.deepcopy(target.config)
        config.num_hidden_layers = 1
        places |= _prefix(names)
    else:
        sizes = {"hidden_size": target.width, "vocab_size": target.vocab_size}
        config = PretrainedConfig.from_dict(sizes)
    kind = PrefixHydraHeads if has_prefix else HydraHeads
    block = kind(
        num_heads, hidden_columns=FIRST_READS * target.width, num_layers=num_layers, is_tied=is_tied
    )
    if is_tied:
        places = {key: x for key, x in places.items() if _layer_of(key) < 2}
    shared = () if _EMBEDDING in names else (EMBEDDING,)
    places |= {} if shared else {EMBEDDING: _EMBEDDING}
    if missing := [tensor for tensor in places.values() if tensor not in names]:
        raise missing_error(missing, reader, name)
    shapes = _shapes(places, target, config, has_prefix) | {
        EMBEDDING: (target.vocab_size, target.width)
    }
    for key, tensor in places.items():
        check_shape(reader, tensor, shapes[key], name)
    known = {*_heads(names, num_heads, num_layers).values(), *places.values(), _UNREAD}
    check_left([item for item in names if item not in known], name)
    return HydraSpec(
        kind=(PREFIX_FACTS if has_prefix else FACTS).kind,
        layout=LAYOUT,
        directory=directory,
        target=target,
        config=config,
        boundaries=(target.num_layers - offset,),
        is_last_normed=offset == 0,
        shared=shared,
        warnings=(),
        tensors=places,
        block=block,
        shapes=shapes,
        windows=(0,) if has_prefix else (),
        weights=weights,
    )


def _arch(raw: Mapping[str, Any], target: TargetFacts, name: str) -> str:
    """Raises HeadError: heads that specc does not compute."""
    arch = raw.get(_ARCH, _MLP)
    if arch not in (_MLP, _PREFIX):
        raise HeadError(
            f"{name}: Hydra heads, config.json: {_ARCH} is {arch!r:.40}",
            f"{_MLP} or {_PREFIX}",
            _OTHERS,
        )
    if raw.get("grounded_heads", False) is not True:
        raise HeadError(
            f"{name}: Hydra heads, config.json: grounded_heads is"
            f" {raw.get('grounded_heads')!r:.40}",
            "true: heads that read the tokens drafted before",
            "pass grounded heads, or Medusa heads, which read none",
        )
    if arch == _PREFIX and getattr(target.config, "model_type", None) != "llama":
        found = getattr(target.config, "model_type", "a module")
        raise HeadError(
            f"{name}: Hydra heads with a prefix layer, and {target.name}, a target of type {found}",
            "a Llama: the layer is one of the target's, and such heads are trained for no other",
            _OTHERS,
        )
    return str(arch)


def _offset(raw: Mapping[str, Any], target: TargetFacts, name: str) -> int:
    """Layers before the target's last whose output heads read; 0 is after the final norm."""
    offset = raw.get("hidden_state_offset", 0)
    if type(offset) is not int or not 0 <= offset <= target.num_layers:
        raise HeadError(
            f"{name}: config.json: hidden_state_offset is {offset!r:.40}",
            f"a layer of the target, 0 … {target.num_layers} before its last",
            _DO,
        )
    return offset


def _count(names: Iterable[str]) -> int:
    """Heads in a checkpoint; at least 1."""
    found = [x.split(".")[1] for x in names if x.startswith("hydra_lm_head.")]
    return max((int(x) + 1 for x in found if x.isdecimal()), default=1)


def _heads(names: list[str], num_heads: int, num_layers: int) -> dict[str, str]:
    """Parameter → tensor, of all heads."""
    has_dropout = "hydra_mlp.0.0.linear.weight" not in names
    found: dict[str, str] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            place = f"hydra_mlp.{head}.{2 * layer + 1 if has_dropout else layer}"
            found |= _both(f"heads.{head}.{layer}.linear", f"{place}.linear")
            if layer == 0:
                found |= _both(f"heads.{head}.0.skip", f"{place}.res_connection")
        place = f"hydra_lm_head.{head}" + (".1" if has_dropout else "")
        found |= _both(projection_of(head), place)
    return found


def _both(key: str, place: str) -> dict[str, str]:
    return {f"{key}.{part}": f"{place}.{part}" for part in PARTS}


def _layer_of(key: str) -> int:
    """Of a head's parameter, its layer; 0 of others."""
    return int(key.split(".")[2]) if key.startswith("heads.") else 0


def _are_tied(
    reader: TensorReader, places: Mapping[str, str], num_heads: int, num_layers: int
) -> bool:
    """Whether layers after the first are one: they are there once, or again with equal bytes."""
    names = set(reader.keys())
    for head in range(num_heads):
        for part in PARTS:
            first = places.get(f"heads.{head}.1.linear.{part}", "")
            for layer in range(2, num_layers):
                other = places[f"heads.{head}.{layer}.linear.{part}"]
                if other in names and not (first in names and _are_same(reader, first, other)):
                    return False
    return num_layers > 2


def _are_same(reader: TensorReader, one: str, other: str) -> bool:
    if (reader.dtype(one), reader.shape(one)) != (reader.dtype(other), reader.shape(other)):
        return False
    pairs = zip(reader.read_chunks(one), reader.read_chunks(other), strict=True)
    return all(bytes(a) == bytes(b) for a, b in pairs)


def _prefix(names: list[str]) -> dict[str, str]:
    """Parameter → tensor, of the prefix layer; it has biases where its target has some."""
    parts = {f"self_attn.{x}_proj": f"self_attn.{x}_proj" for x in "qkvo"} | {
        f"mlp.{x}_proj": f"mlp.{x}_proj" for x in ("gate", "up", "down")
    }
    found = {f"layers.0.{key}.weight": f"{_LAYER}.{key}.weight" for key in parts}
    found |= {
        f"layers.0.{key}.bias": f"{_LAYER}.{key}.bias"
        for key in parts
        if f"{_LAYER}.{key}.bias" in names
    }
    for key in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        found[f"layers.0.{key}"] = f"{_LAYER}.{key}"
    return found | {"norm.weight": _NORM}


def _shapes(
    places: Iterable[str], target: TargetFacts, config: Any, has_prefix: bool
) -> dict[str, tuple[int, ...]]:
    """Parameter → shape."""
    d, ids = target.width, target.vocab_size
    rows: dict[str, tuple[int, int]] = {}
    if has_prefix:
        size, inner = int(config.head_dim), int(config.intermediate_size)
        queries, keys = (
            int(x) * size for x in (config.num_attention_heads, config.num_key_value_heads)
        )
        rows = {
            "q_proj": (queries, d), "k_proj": (keys, d), "v_proj": (keys, d),
            "o_proj": (d, queries), "gate_proj": (inner, d), "up_proj": (inner, d),
            "down_proj": (d, inner),
        }  # fmt: skip
    found: dict[str, tuple[int, ...]] = {}
    for key in places:
        *_, part, what = key.split(".")
        if key.startswith("lm_heads."):
            shape: tuple[int, ...] = (ids, d)
        elif key.startswith("heads."):
            head, layer = map(int, key.split(".")[1:3])
            shape = (d, (FIRST_READS + head) * d if layer == 0 else d)
        else:
            shape = rows.get(part, (d,))
        found[key] = shape if what == "weight" else shape[:1]
    return found
