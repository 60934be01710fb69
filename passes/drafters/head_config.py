"""Configurations of EAGLE-3 heads, which each trainer writes in its own way, as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specc.errors import HeadError
from specc.passes.drafters.head_spec import (
    DEEPSPEC,
    EAGLE_CONFIG,
    SPECULATORS,
    HeadFlags,
    HeadSwitches,
    RopeFacts,
)
from specc.passes.drafters.tap_ids import AFTER, convention_of
from specc.passes.frontend.config_numbers import check_heads, check_numbers
from specc.passes.frontend.hf_model import quiet_transformers
from specc.passes.frontend.rotary import by_its_name

_DO = "correct config.json, or download the head again"
# of a layer, as transformers' configurations call them
_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters",
)  # fmt: skip
_NEEDED_FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads")
# what other models have, and these not; and what it is where it changes nothing
_PLAIN: dict[str, Any] = {"partial_rotary_factor": 1, "logit_scale": 1, "is_causal": True}
# what its layers may be called; those of heads of SafeAILab are Llama's, whatever their target
_MODEL_TYPES = {SPECULATORS: ("llama", "qwen3"), DEEPSPEC: ("qwen3",)}
_OWN_TYPES = ("llama", "qwen2", "qwen3")
_IDS = "eagle_aux_hidden_state_layer_ids"
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class HeadConfig:
    """What a configuration says.

    Args:
        layers: of transformers, of the head's layers; Llama's or Qwen3's.
        has_qk_norm: queries and keys are normalized.
        windows: keys that each layer sees, 0 is all.
        flags: see there.
        ids: of layers of the target, or None.
        convention: what ids mean, see `tap_ids`.
        target_width: H where it is said, or None.
        draft_vocab_size: Vd where it is said, or None.
        vocab_size: V where it is said, or None.
        warnings: what the user should know.
    """

    layers: Any
    has_qk_norm: bool
    windows: tuple[int, ...]
    flags: HeadFlags
    ids: tuple[int, ...] | None
    convention: str
    target_width: int | None
    draft_vocab_size: int | None
    vocab_size: int | None
    rope: RopeFacts
    warnings: tuple[str, ...]


def read_head_config(
    raw: Mapping[str, Any], layout: str, num_layers: int, switches: HeadSwitches, name: str
) -> HeadConfig:
    """Read what a head's config.json says.

    Args:
        layout: see `HeadSpec`.
        num_layers: that the checkpoint has tensors of.
        switches: see there.
    Raises:
        HeadError: something is missing, or is not read.
        NotCausalLMError: numbers that no model has.
    """
    check_numbers(raw, name)
    if "quantization_config" in raw or "compression_config" in raw:
        raise HeadError(f"{name}: a quantized head", "a head whose weights are floats", _DO)
    own = raw.get("transformer_layer_config") if layout == SPECULATORS else raw
    if not isinstance(own, Mapping):
        raise HeadError(f"{name}: config.json: no transformer_layer_config", "an object", _DO)
    own = by_its_name(dict(own))
    # of speculators, versions differ in what none means
    model_type = own.get("model_type", None if layout == SPECULATORS else "llama")
    if model_type not in _MODEL_TYPES.get(layout, _OWN_TYPES):
        needed = " or ".join(_MODEL_TYPES.get(layout, _OWN_TYPES))
        raise HeadError(f"{name}: layers of model type {model_type!r:.40}", needed, _DO)
    has_qk_norm = layout in _MODEL_TYPES and model_type == "qwen3"
    warnings: list[str] = []
    layers, rope = read_layers(own, has_qk_norm, num_layers, name, warnings)
    flags = _flags(raw, layout, switches, name, warnings)
    ids, convention = _ids(raw, layout, name)
    for config in (raw, own):
        if config.get("sliding_window_non_causal"):
            raise HeadError(
                f"{name}: sliding_window_non_causal", "windows that end at the token", _DO
            )
    return HeadConfig(
        layers=layers,
        has_qk_norm=has_qk_norm,
        windows=read_windows(own, num_layers, name),
        flags=flags,
        ids=ids,
        convention=switches.tap_convention or convention,
        target_width=read_number(raw, "target_hidden_size", name),
        draft_vocab_size=read_number(raw, "draft_vocab_size", name),
        vocab_size=read_number(own, "vocab_size", name),
        rope=rope,
        warnings=tuple(warnings),
    )


def read_layers(
    own: Mapping[str, Any], has_qk_norm: bool, num_layers: int, name: str, warnings: list[str]
) -> tuple[Any, RopeFacts]:
    """Configuration of the layers, and their rotary embedding."""
    from transformers import LlamaConfig, Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for key in _NEEDED_FIELDS:
        if own.get(key) is None:
            raise HeadError(f"{name}: config.json: no {key}", "a number", _DO)
    stated = own.get("num_hidden_layers")
    if stated is not None and stated != num_layers:
        raise HeadError(
            f"{name}: config.json: {stated} layers; the checkpoint has {num_layers}",
            "the configuration of the head in the checkpoint",
            _DO,
        )
    parameters = own.get("rope_parameters")
    if isinstance(parameters, Mapping) and any(isinstance(x, Mapping) for x in parameters.values()):
        raise HeadError(
            f"{name}: config.json: rope_parameters of several kinds of layers",
            "one rotary embedding for all layers",
            _DO,
        )
    for place in (own, parameters if isinstance(parameters, Mapping) else {}):
        for key, plain in _PLAIN.items():
            if place.get(key, plain) not in (None, plain):
                raise HeadError(
                    f"{name}: config.json: {key} is {place[key]!r:.40}", f"{plain}, or none", _DO
                )
    if own.get("rope_theta") is None and not (
        isinstance(parameters, Mapping) and "rope_theta" in parameters
    ):
        warnings.append("config.json names no rope_theta: 10000 is taken")
    fields = {key: own[key] for key in _FIELDS if own.get(key) is not None}
    fields |= {"num_hidden_layers": num_layers, "tie_word_embeddings": False}
    kind = Qwen3Config if has_qk_norm else LlamaConfig
    try:
        with quiet_transformers():
            config: Any = kind(**fields)
    except Exception as error:  # whatever transformers makes of what it says
        reason = " ".join(str(error).split())[:300]
        raise HeadError(
            f"{name}: config.json: {reason}", f"what {kind.__name__} takes", _DO
        ) from error
    check_heads(config, name)
    rope = config.rope_parameters
    if rope["rope_type"] not in {"default", *ROPE_INIT_FUNCTIONS}:
        known = ", ".join(sorted(ROPE_INIT_FUNCTIONS))
        raise HeadError(
            f"{name}: config.json: rotary scaling {rope['rope_type']!r:.40}", f"one of {known}", _DO
        )
    trained = int(config.max_position_embeddings)
    return config, RopeFacts(rope["rope_type"], float(rope["rope_theta"]), trained)


def _flags(
    raw: Mapping[str, Any], layout: str, switches: HeadSwitches, name: str, warnings: list[str]
) -> HeadFlags:
    keys = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    found = {}
    for key in keys:
        value = raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise HeadError(f"{name}: config.json: {key} is {value!r:.40}", "true or false", _DO)
        found[key] = bool(value)
    if found["norm_before_fc"] and found["fc_norm"]:
        raise HeadError(
            f"{name}: config.json: norm_before_fc and fc_norm are both true",
            "at most one of them",
            _DO,
        )
    flags = HeadFlags(**found)
    if switches.norm_before_residual is not None:
        return replace(flags, norm_before_residual=switches.norm_before_residual)
    if raw.get("norm_before_residual") is None and layout == SPECULATORS:
        warnings.append(
            "config.json says nothing of norm_before_residual: false is taken, as its trainer"
            " does; other readers take true"
        )
    return flags


def _ids(raw: Mapping[str, Any], layout: str, name: str) -> tuple[tuple[int, ...] | None, str]:
    """Ids of layers as the file has them, and what they mean."""
    if layout == DEEPSPEC:
        return id_list(raw, "target_layer_ids", name), AFTER
    ids = id_list(raw, _IDS, name)
    # files that say more than their own layout needs
    if "eagle_config" in raw or layout == EAGLE_CONFIG:
        nested = raw.get("eagle_config")
        if not isinstance(nested, Mapping):
            raise HeadError(f"{name}: config.json: eagle_config is no object", "an object", _DO)
        if nested.get("use_aux_hidden_state", True) is not True:
            raise HeadError(
                f"{name}: eagle_config: use_aux_hidden_state is"
                f" {nested['use_aux_hidden_state']!r:.40}",
                "true: a head that reads hidden states of several layers (EAGLE-3)",
                "pass an EAGLE-3 head",
            )
        ids = ids or id_list(nested, _IDS, name) or id_list(nested, "layer_ids", name)
    return ids, convention_of(ids or ())


def id_list(raw: Mapping[str, Any], key: str, name: str) -> tuple[int, ...] | None:
    found = raw.get(key)
    if found is None:
        return None
    if not isinstance(found, list) or not found or any(type(item) is not int for item in found):
        raise HeadError(f"{name}: config.json: {key} is {found!r:.40}", "a list of layers", _DO)
    return tuple(found)


def read_windows(own: Mapping[str, Any], num_layers: int, name: str) -> tuple[int, ...]:
    """Keys that each layer sees, 0 is all."""
    size = own.get("sliding_window")
    types = own.get("layer_types")
    if types is None:
        first, slides = own.get("max_window_layers"), bool(own.get("use_sliding_window"))
        if slides and type(first) is not int:
            raise HeadError(f"{name}: use_sliding_window, no max_window_layers", "a number", _DO)
        types = [
            _SLIDING if slides and i >= first else _FULL  # type: ignore[operator]
            for i in range(num_layers)
        ]
    if not isinstance(types, list) or len(types) != num_layers:
        raise HeadError(f"{name}: config.json: layer_types {types!r:.60}", f"{num_layers}", _DO)
    for item in types:
        if item not in (_SLIDING, _FULL):
            raise HeadError(f"{name}: a layer of {item!r:.40}", f"{_FULL} or {_SLIDING}", _DO)
    if _SLIDING in types and (type(size) is not int or size < 1):
        raise HeadError(f"{name}: {_SLIDING} and sliding_window {size!r:.40}", "its size", _DO)
    return tuple(int(size or 0) if item == _SLIDING else 0 for item in types)


def read_number(raw: Mapping[str, Any], key: str, name: str) -> int | None:
    value = raw.get(key)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise HeadError(f"{name}: config.json: {key} is {value!r:.40}", "a number from 1 on", _DO)
    return value
