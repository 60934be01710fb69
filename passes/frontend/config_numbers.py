"""Numbers of a config.json: what no model can have is refused before anything is built of it.

transformers takes most numbers as they are. A model of a billion layers then fills the memory, a
base of 0 makes every angle NaN, and a string ends in a traceback far away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from specc.errors import NotCausalLMError


class _Range(NamedTuple):
    least: int
    most: int


_LAYERS, _HEADS, _WIDTH = _Range(1, 4096), _Range(1, 1 << 16), _Range(1, 1 << 24)
_POSITIONS, _EXPERTS = _Range(1, (1 << 31) - 1), _Range(0, 1 << 14)
# as models call them; null is whatever the model takes for it, and lists hold one for each layer
_COUNTS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads"), _HEADS),
    **dict.fromkeys(("head_dim", "attention_head_size", "d_kv", "kv_channels"), _HEADS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_dim"), _WIDTH),
    **dict.fromkeys(("n_inner", "moe_intermediate_size"), _WIDTH),
    "vocab_size": _Range(1, 1 << 28),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), _POSITIONS),
    "sliding_window": _Range(0, (1 << 31) - 1),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _EXPERTS),
    "num_experts_per_tok": _EXPERTS,
}
_POSITIVE = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon",
    "rope_theta", "rotary_emb_base", "rope_local_base_freq", "global_rope_theta",
    "local_rope_theta", "partial_rotary_factor", "rotary_pct",
)  # fmt: skip
# of a rotary scaling, where these names mean that
_ROTARY = ("rope_scaling", "rope_parameters")
_POSITIVE_OF_ROTARY = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")

_DO = "correct config.json, or download the model again"


def check_numbers(config: Mapping[str, Any], name: str) -> None:
    """Refuse numbers that no model has.

    Args:
        config: contents of config.json.
    Raises:
        NotCausalLMError: a number out of its range, or something that is none.
    """
    for path, key, value in _numbers(config, ""):
        where = f"{name}: config.json: {path} is {_shown(value)}"
        if key in _COUNTS:
            low, high = _COUNTS[key]
            if type(value) is not int or not low <= value <= high:
                raise NotCausalLMError(where, f"a whole number from {low} to {high}", _DO)
        elif not _is_finite(value) or value <= 0:
            raise NotCausalLMError(where, "a finite number above 0", _DO)


def check_heads(config: Any, name: str) -> None:
    """Refuse heads that do not share what they have to share.

    Args:
        config: a configuration of transformers, whose names are those of every model.
    Raises:
        NotCausalLMError: KV heads that do not divide the heads, or heads that do not divide the
            width, where nothing else says how wide a head is.
    """
    heads, width = whole_number(config, "num_attention_heads"), whole_number(config, "hidden_size")
    kv_heads = whole_number(config, "num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise NotCausalLMError(
            f"{name}: config.json: {heads} heads and {kv_heads} KV heads",
            "a number of KV heads that divides the number of heads",
            _DO,
        )
    if (
        heads
        and width
        and width % heads
        and not any(whole_number(config, key) for key in _HEAD_WIDTHS)
    ):
        raise NotCausalLMError(
            f"{name}: config.json: a width of {width} and {heads} heads",
            "a number of heads that divides the width, or a head_dim",
            _DO,
        )


_HEAD_WIDTHS = ("head_dim", "attention_head_size", "d_kv", "kv_channels", "qk_nope_head_dim")


def check_layers(config: Any, num_tensors: int, name: str) -> None:
    """Refuse more layers than a checkpoint has tensors: each has some of its own.

    Raises:
        NotCausalLMError: the configuration is that of another model.
    """
    layers = whole_number(config, "num_hidden_layers")
    if layers and layers > num_tensors:
        raise NotCausalLMError(
            f"{name}: config.json: {layers} layers; the checkpoint has {num_tensors} tensors",
            "the configuration of the model in the checkpoint",
            _DO,
        )


def _numbers(config: Mapping[str, Any], path: str) -> Iterator[tuple[str, str, Any]]:
    """Path, key and value of what has to be a number."""
    for key, value in config.items():
        is_of_rotary = key in _POSITIVE_OF_ROTARY and any(name in path for name in _ROTARY)
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{path}{key}.")
        elif key in _COUNTS or key in _POSITIVE or is_of_rotary:
            for item in value if isinstance(value, list) else [value]:
                if item is not None:
                    yield path + key, key, item
        elif isinstance(value, float) and math.isnan(value):
            yield path + key, key, value


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is no float
        return False


def whole_number(config: Any, key: str) -> int:
    """A number of a configuration, or 0; that of the first layer where each has its own."""
    try:
        value = getattr(config, key, None)
    except RuntimeError:  # layers differ, and the configuration of all of them has no such number
        value = getattr(config.per_layer_config[0], key, None)
    return value if type(value) is int else 0


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
