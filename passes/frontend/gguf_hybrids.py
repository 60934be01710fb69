"""What a GGUF file's fields say of models of which some layers keep states.

Which layers these are is a list of truths, or follows from layers without heads of keys.
Source: llama.cpp, src/models/.
"""

from __future__ import annotations

from typing import Any

from specc.artifact.decoders.gguf_file import GGUFReader
from specc.passes.frontend.gguf_fields import Fields

_STATE, _ATTENTION = "linear_attention", "full_attention"
_SIGMOID = 2
_KEYS, _WIDTHS = "attention.head_count_kv", "feed_forward_length"


def _has(reader: GGUFReader, name: str) -> bool:
    """Whether some layer has this tensor."""
    return any(key.endswith(f".{name}") for key in reader.tensors)


def _of_layers(fields: Fields, key: str) -> list[int]:
    """A number for each layer."""
    layers = fields.number("block_count")
    found = fields.value(key, layers)
    return found if isinstance(found, list) else [found] * layers


def _most(fields: Fields, key: str) -> int:
    """The number that all layers have that have one.

    Raises:
        WeightError: they have several.
    """
    found = set(_of_layers(fields, key)) - {0}
    if len(found) > 1:
        raise fields.refusal(key, "one number for all layers that have one, 0 for others")
    return found.pop() if found else 0


def _head_width(fields: Fields) -> int:
    """Columns of a head of a recurrence's values."""
    inner, heads = fields.number("ssm.inner_size"), fields.number("ssm.time_step_rank")
    if not heads or inner % heads:
        raise fields.refusal("ssm.inner_size", f"a multiple of {fields.kind}.ssm.time_step_rank")
    return int(inner // heads)


def _expansion(fields: Fields) -> int:
    """How many times as wide as the model a recurrence is."""
    inner, width = fields.number("ssm.inner_size"), fields.number("embedding_length")
    if not width or inner % width:
        raise fields.refusal("ssm.inner_size", f"a multiple of {fields.kind}.embedding_length")
    return int(inner // width)


def _check_sigmoid(fields: Fields) -> None:
    if fields.number("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise fields.refusal("expert_gating_func", f"{_SIGMOID}, a sigmoid of each expert")


def _delta(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    """Qwen3-Next, Qwen3.5."""
    config["linear_value_head_dim"] = _head_width(fields)
    layers, every = fields.number("block_count"), fields.number("full_attention_interval", 4)
    kinds = [(number + 1) % max(1, every) != 0 for number in range(layers)]
    if "attention.recurrent_layers" in fields:
        kinds = [bool(kind) for kind in _of_layers(fields, "attention.recurrent_layers")]
    config["layer_types"] = [_STATE if kind else _ATTENTION for kind in kinds]
    config["attention_bias"] = _has(reader, "attn_q.bias")
    if (sections := fields.get("rope.dimension_sections")) is not None:
        # of images and videos; those of text are all alike
        own = {"mrope_section": sections[:3], "mrope_interleaved": True}
        config["rope_parameters"] |= own


def _lfm2(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    if config.pop("sliding_window"):
        raise fields.refusal("attention.sliding_window", "0: layers that see all")
    _check_sigmoid(fields)
    config["num_key_value_heads"] = _most(fields, _KEYS)
    config["layer_types"] = [_ATTENTION if n else "conv" for n in _of_layers(fields, _KEYS)]
    config["conv_bias"] = _has(reader, "shortconv.in_proj.bias")


def _mamba(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    config["mamba_d_head"] = _head_width(fields)
    config["mamba_conv_bias"] = _has(reader, "ssm_conv1d.bias")
    config["mamba_proj_bias"] = _has(reader, "ssm_in.bias")
    config["attention_bias"] = _has(reader, "attn_q.bias")
    config["mlp_bias"] = _has(reader, "ffn_up.bias")
    config["num_key_value_heads"] = _most(fields, _KEYS)


def _granite(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    """Granite 4, Bamba."""
    _mamba(config, fields, reader)
    config["mamba_expand"] = _expansion(fields)
    keys = _of_layers(fields, _KEYS)
    if config["model_type"] == "bamba":
        config["attn_layer_indices"] = [number for number, count in enumerate(keys) if count]
        if config["rope_parameters"].pop("partial_rotary_factor") != 0.5:
            raise fields.refusal("rope.dimension_count", "half of a head: Bamba rotates that")
        return
    config["layer_types"] = [_ATTENTION if count else _STATE for count in keys]
    config["position_embedding_type"] = "nope"
    config["num_local_experts"] = fields.number("expert_count", 0)


def _falcon_h1(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    _mamba(config, fields, reader)
    config["mamba_d_ssm"] = fields.number("ssm.inner_size")
    config["mamba_rms_norm"] = _has(reader, "ssm_norm.weight")
    config["mamba_norm_before_gate"] = False
    config["projectors_bias"] = _has(reader, "attn_output.bias")
    # the converter multiplied weights by all of these
    config |= {f"{part}_multiplier": 1.0 for part in ("embedding", "lm_head", "key")}
    for part in ("attention", "ssm"):
        config |= {f"{part}_in_multiplier": 1.0, f"{part}_out_multiplier": 1.0}
    config |= {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}


def _nemotron_h(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    keys, widths = _of_layers(fields, _KEYS), _of_layers(fields, _WIDTHS)
    _check_sigmoid(fields)
    mixture = "moe" if fields.kind.endswith("_moe") else "mlp"
    config["layers_block_type"] = [
        mixture if width else _ATTENTION if count else _STATE
        for count, width in zip(keys, widths, strict=True)
    ]
    del config["num_hidden_layers"]
    config["num_key_value_heads"] = _most(fields, _KEYS)
    width = _most(fields, _WIDTHS)
    config["intermediate_size"] = width
    config["mamba_head_dim"] = _head_width(fields)
    config["use_conv_bias"] = _has(reader, "ssm_conv1d.bias")
    config["mamba_proj_bias"] = _has(reader, "ssm_in.bias")
    config["attention_bias"] = _has(reader, "attn_q.bias")
    config["mlp_bias"] = _has(reader, "ffn_up.bias")
    for name in ("moe_intermediate_size", "num_experts_per_tok"):
        if isinstance(config.get(name), list):
            raise fields.refusal("expert_used_count", "as many experts in all layers")


def _kimi(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    _check_sigmoid(fields)
    heads, rotated = config["num_attention_heads"], fields.number("rope.dimension_count")
    config |= {"num_key_value_heads": heads, "linear_num_heads": heads}
    # nothing is rotated: what is called so is a part of a head that all keys share
    config["qk_rope_head_dim"] = rotated
    config["qk_nope_head_dim"] = fields.number("attention.key_length_mla") - rotated
    config.setdefault("q_lora_rank", None)
    keys = _of_layers(fields, _KEYS)
    config["layer_types"] = [_ATTENTION if count else _STATE for count in keys]
    for name in ("rope_parameters", "sliding_window"):
        del config[name]


def _mamba2(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    config["head_dim"] = _head_width(fields)
    config["expand"] = _expansion(fields)
    config["use_conv_bias"] = _has(reader, "ssm_conv1d.bias")
    config["use_bias"] = _has(reader, "ssm_in.bias")
    for name in ("rope_parameters", "sliding_window"):
        del config[name]


COMPLETE = {
    "qwen3next": _delta,
    "qwen35": _delta,
    "qwen35moe": _delta,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "granitehybrid": _granite,
    "falcon-h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "mamba2": _mamba2,
    "kimi-linear": _kimi,
}
