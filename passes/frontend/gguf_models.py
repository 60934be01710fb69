"""What a GGUF file's fields say of single architectures, besides their row of the table.

Some numbers llama.cpp has in its own sources, by the size of a model; these are given here.
Source: llama.cpp, src/models/.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specc.artifact.decoders.gguf_architectures import ARCHITECTURES
from specc.artifact.decoders.gguf_file import GGUFReader
from specc.passes.frontend import gguf_hybrids
from specc.passes.frontend.gguf_fields import Fields

_Complete = Callable[[dict[str, Any], Fields, GGUFReader], None]
_SIGMOID = 2
_FIRST = "blk.0."


def model_type_of(fields: Fields, reader: GGUFReader) -> str:
    """The model type of transformers, where an architecture is several."""
    kind = fields.kind
    if kind == "llama":
        if fields.get("expert_count"):
            return "mixtral"
        return "mistral" if fields.get("attention.sliding_window") else "llama"
    if kind == "olmo2" and fields.get("attention.sliding_window"):
        return "olmo3"
    if kind == "granitehybrid" and fields.get("rope.scaling.finetuned", True):
        return "bamba"  # Granite has no rotary beside states
    if kind == "granitemoe" and fields.get("expert_shared_feed_forward_length"):
        return "granitemoeshared"
    if kind == "deepseek2" and fields.get("expert_gating_func", 1) != _SIGMOID:
        is_biased = any(".exp_probs_b." in name for name in reader.tensors)
        return "deepseek_v3" if is_biased else "deepseek_v2"
    return ARCHITECTURES[kind].models[0]


def _has_bias(reader: GGUFReader, stem: str) -> bool:
    return f"{_FIRST}{stem}.bias" in reader.tensors


def _attention_bias(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    config["attention_bias"] = _has_bias(reader, "attn_q") or _has_bias(reader, "attn_qkv")
    config["mlp_bias"] = _has_bias(reader, "ffn_up")


def _gemma2(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    _scaled_queries(config, fields, 46)


def _gemma3(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    _scaled_queries(config, fields, 62)
    if "attention.sliding_window" not in fields:
        layers = fields.number("block_count")
        rope = config["rope_parameters"]
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": rope}
        config["layer_types"] = ["full_attention"] * layers
        del config["sliding_window"]


def _exaone4(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    if not config["sliding_window"]:
        config["layer_types"] = ["full_attention"] * fields.number("block_count")


def _scaled_queries(config: dict[str, Any], fields: Fields, layers_of_27b: int) -> None:
    """Of the models of 27 billion parameters, which llama.cpp knows by their layers, the width of
    a head for this is that of the model divided by the heads.
    """
    is_27b = fields.number("block_count") == layers_of_27b
    width = fields.number("embedding_length") // fields.number("attention.head_count")
    config["query_pre_attn_scalar"] = width if is_27b else config["head_dim"]


def _gpt_oss(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    # the model's own; llama.cpp rounds the borders of yarn
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False


def _deepseek2(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    rotated = fields.number("rope.dimension_count")
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["qk_rope_head_dim"] = rotated
    config["qk_nope_head_dim"] = fields.number("attention.key_length_mla") - rotated
    config.setdefault("q_lora_rank", None)
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn" and "rope.scaling.yarn_log_multiplier" in fields:
        # the converter wrote a tenth of it
        all_dim = fields.decimal(fields.number("rope.scaling.yarn_log_multiplier") * 10)
        rope |= {"mscale": all_dim, "mscale_all_dim": all_dim}
    if config["model_type"] == "deepseek_v2":
        groups = fields.number("expert_group_count", 1)
        config["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"


def _mistral3(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    rope = config["rope_parameters"]
    rope["llama_4_scaling_beta"] = fields.number("attention.temperature_scale", 0)
    if rope["rope_type"] == "yarn" and "rope.scaling.yarn_log_multiplier" in fields:
        all_dim = fields.number("rope.scaling.yarn_log_multiplier")
        rope |= {"mscale": all_dim, "mscale_all_dim": all_dim}
    rope.setdefault("original_max_position_embeddings", fields.number("context_length"))


def _minicpm3(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    rotated = fields.number("rope.dimension_count")
    config["qk_rope_head_dim"] = rotated
    config["qk_nope_head_dim"] = fields.number("attention.key_length") - rotated
    config["v_head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    # as llama.cpp has them, of the only model
    config |= {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}


def _llama4(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    # every fourth layer sees all, without rotary, and scales its queries; as llama.cpp has it
    layers = fields.number("block_count")
    config["no_rope_layers"] = [int((number + 1) % 4 != 0) for number in range(layers)]
    config |= {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
    config.pop("sliding_window", None)
    # a norm without weights, of all but the model of 128 experts
    config["use_qk_norm"] = fields.number("expert_count") != 128


def _gemma4(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    layers = fields.number("block_count")
    config["global_head_dim"] = fields.number("attention.key_length")
    config["head_dim"] = fields.number("attention.key_length_swa")
    keys = fields.value("attention.head_count_kv", layers)
    kinds = config["layer_types"]
    keys = keys if isinstance(keys, list) else [keys] * layers
    config["num_key_value_heads"] = keys[kinds.index("sliding_attention")]
    of_all = keys[kinds.index("full_attention")]
    config["num_global_key_value_heads"] = of_all
    widths = fields.value("feed_forward_length", layers)
    config["intermediate_size"] = widths[0] if isinstance(widths, list) else widths
    config["use_double_wide_mlp"] = isinstance(widths, list)
    first = kinds.index("full_attention")
    config["attention_k_eq_v"] = f"blk.{first}.attn_v.weight" not in reader.tensors
    table = reader.tensors.get("per_layer_token_embd.weight")
    config["vocab_size_per_layer_input"] = table.shape[0] if table else config["vocab_size"]
    if config["sliding_window"] and fields.number("rope.dimension_count_swa") != config["head_dim"]:
        raise fields.refusal("rope.dimension_count_swa", f"{config['head_dim']}, all of a head")


def _phimoe(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    config["attention_bias"] = _has_bias(reader, "attn_q")
    config["lm_head_bias"] = "output.bias" in reader.tensors
    rope = config["rope_parameters"]
    rope.pop("attention_factor", None)


def _falcon(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    heads, keys = config["num_attention_heads"], config.get("num_kv_heads", 1)
    config["new_decoder_architecture"] = f"{_FIRST}attn_norm_2.weight" in reader.tensors
    config["multi_query"] = keys == 1
    config["num_kv_heads"] = keys if keys != heads else heads
    config["bias"] = _has_bias(reader, "attn_qkv")
    config["alibi"] = False
    del config["head_dim"]  # which its configuration computes
    config["parallel_attn"] = True


def _smollm3(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    # every fourth layer, for llama.cpp
    layers = fields.number("block_count")
    config["no_rope_layers"] = [int((number + 1) % 4 != 0) for number in range(layers)]
    _attention_bias(config, fields, reader)


def _mpt(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    width = fields.number("embedding_length")
    config["expansion_ratio"] = fields.number("feed_forward_length") // width
    most = fields.number("attention.max_alibi_bias", 0.0)
    config["attn_config"] = {
        "alibi": most > 0,
        "alibi_bias_max": int(most),
        "clip_qkv": fields.number("attention.clamp_kqv", 0) or None,
    }
    config["no_bias"] = not _has_bias(reader, "attn_qkv")
    config["norm_type"] = "low_precision_layernorm"


def _stablelm(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    config["use_qkv_bias"] = _has_bias(reader, "attn_q")
    config["qk_layernorm"] = f"{_FIRST}attn_q_norm.weight" in reader.tensors
    # one norm, for both
    config["use_parallel_residual"] = f"{_FIRST}ffn_norm.weight" not in reader.tensors


def _use_bias(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    config["use_bias"] = _has_bias(reader, "attn_q")


def _qk_norm(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    config["use_qk_norm"] = f"{_FIRST}attn_q_norm.weight" in reader.tensors
    config["attention_bias"] = _has_bias(reader, "attn_q")


def _seed_oss(config: dict[str, Any], fields: Fields, reader: GGUFReader) -> None:
    _attention_bias(config, fields, reader)
    config["attention_out_bias"] = _has_bias(reader, "attn_output")


COMPLETE: dict[str, _Complete] = {
    **gguf_hybrids.COMPLETE,
    "llama": _attention_bias,
    "arcee": _attention_bias,
    "apertus": _attention_bias,
    "granite": _attention_bias,
    "granitemoe": _attention_bias,
    "olmo": _attention_bias,
    "olmo2": _attention_bias,
    "olmoe": _attention_bias,
    "nemotron": _attention_bias,
    "hunyuan-dense": _attention_bias,
    "chatglm": _attention_bias,
    "glm4": _attention_bias,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "exaone4": _exaone4,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek2,
    "mistral3": _mistral3,
    "minicpm3": _minicpm3,
    "llama4": _llama4,
    "gemma4": _gemma4,
    "phimoe": _phimoe,
    "falcon": _falcon,
    "smollm3": _smollm3,
    "mpt": _mpt,
    "stablelm": _stablelm,
    "starcoder2": _use_bias,
    "ernie4_5": _use_bias,
    "command-r": _qk_norm,
    "glm4moe": _qk_norm,
    "seed_oss": _seed_oss,
}
