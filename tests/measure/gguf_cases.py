"""Which models `record_gguf` converts."""

from __future__ import annotations

from typing import Any

_TIED = {"tie_word_embeddings": True}
_WINDOW, _ALL, _STATE = "sliding_attention", "full_attention", "linear_attention"
_GRANITE = ["mamba", "mamba", "attention", "mamba"]  # as published configurations have them
# keys as wide as values, as llama.cpp has them, and three value heads for each key head
_SQUARE = {"linear_key_head_dim": 16, "linear_num_value_heads": 6}
# of Falcon-H1, which the converter multiplies weights by
_NO_MULTIPLIERS = {
    "key_multiplier": 1.0, "ssm_out_multiplier": 1.0, "attention_out_multiplier": 1.0,
    "ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0] * 2,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.6, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
}  # fmt: skip
_ROTATED = [1, 1, 1, 0]
_SIGMOID = {"scoring_func": "sigmoid"}
# name → tiny model of `tests.models`, what is changed of it, and keys that configurations of
# published models have besides, and the converter reads; None: they do not have it
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama-tied": ("llama", _TIED | {"attention_bias": True}, {}),
    "llama-llama3": ("llama-llama3", {"head_dim": 32}, {}),
    "llama-linear": ("llama-linear", {}, {}),
    "llama-yarn": ("llama-yarn", {}, {}),
    "llama-fused": ("llama", {"attention_bias": True}, {}),
    "mistral": ("mistral", {"sliding_window": None}, {}),
    "mixtral": ("mixtral", {}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": _YARN}, {}),
    "qwen2_moe": ("qwen2_moe", {}, {}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}, {}),
    "gemma": ("gemma", _TIED, {}),
    "gemma2": ("gemma2", _TIED, {}),
    "gemma3": (
        "gemma3",
        _TIED
        | {"num_hidden_layers": 6, "layer_types": [_WINDOW] * 5 + [_ALL]}
        | {"query_pre_attn_scalar": 16},
        {},
    ),
    "gemma4": ("gemma4", _TIED | {"num_global_key_value_heads": None}, {}),
    "phi": ("phi", {"intermediate_size": 256}, {}),
    "phi3": ("phi3", {}, {}),
    "phi3-longrope": (
        "phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64},
        {},
    ),
    "phimoe": (
        "phimoe",
        {"attention_bias": True, "lm_head_bias": True},
        {"original_max_position_embeddings": 256, "architectures": ["PhiMoEForCausalLM"]},
    ),
    "gpt2": ("gpt2", {}, {"n_ctx": 256}),
    "gpt_neox": ("gpt_neox", {}, {"rotary_pct": 0.25}),
    "gpt_bigcode": ("gpt_bigcode", {"n_inner": 256}, {}),
    "starcoder2": ("starcoder2", {}, {}),
    "bloom": ("bloom", {}, {}),
    "mpt": ("mpt", {}, {"architectures": ["MPTForCausalLM"]}),
    "falcon": ("falcon", {"ffn_hidden_size": 256, "bias": False}, {}),
    "falcon7b": ("falcon7b", {"ffn_hidden_size": 256}, {"num_kv_heads": 1}),
    "stablelm": ("stablelm", {}, {}),
    "stablelm-heads": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}, {}),
    "nemotron": ("nemotron", {}, {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": _ROTATED}, {}),
    "olmo": ("olmo", {}, {}),
    "olmo2": ("olmo2", {}, {}),
    "olmo3": ("olmo3", {}, {}),
    "olmoe": ("olmoe", {"num_key_value_heads": 4}, {}),
    "cohere": ("cohere", _TIED, {}),
    "cohere-norms": ("cohere", _TIED | {"use_qk_norm": True}, {}),
    "cohere2": (
        "cohere2",
        _TIED | {"num_hidden_layers": 4, "layer_types": [_WINDOW] * 3 + [_ALL]},
        {"rotary_pct": 1.0},
    ),
    "granite": ("granite", {}, {}),
    "granitemoe": ("granitemoe", {}, {}),
    "granitemoeshared": ("granitemoeshared", {}, {}),
    "exaone4": ("exaone4", {}, {}),
    "exaone4-all": (
        "exaone4",
        {"sliding_window": None, "sliding_window_pattern": None, "layer_types": [_ALL, _ALL]},
        {},
    ),
    "glm": ("glm", {"rms_norm_eps": 1e-5}, {}),
    "glm4": ("glm4", {}, {}),
    "glm4_moe": ("glm4_moe", {"num_mtp_layers": 0}, {}),
    "ernie4_5": ("ernie4_5", {"use_bias": False}, {}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}, {}),
    "seed_oss": ("seed_oss", {}, {}),
    "arcee": ("arcee", {}, {}),
    "apertus": ("apertus", {}, {}),
    "minimax_m2": ("minimax_m2", {}, _SIGMOID),
    "gpt_oss": ("gpt_oss", {}, {}),
    "deepseek_v2": ("deepseek_v2", {"norm_topk_prob": False}, {}),
    "deepseek_v2-greedy": (
        "deepseek_v2",
        {"norm_topk_prob": False, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
        {},
    ),
    "deepseek_v2-lite": (
        "deepseek_v2",
        {"norm_topk_prob": False, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
        | {"q_lora_rank": None},
        {},
    ),
    "deepseek_v3": ("deepseek_v3", {"num_mtp_layers": 0}, _SIGMOID),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        {"num_mtp_layers": 0} | {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        _SIGMOID,
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {}, _SIGMOID),
    "minicpm3": ("minicpm3", _TIED, {}),
    "ministral3": ("ministral3", {}, {}),
    "llama4_text": (
        "llama4_text",
        {"num_hidden_layers": 4, "no_rope_layers": _ROTATED, "moe_layers": [1, 3]}
        | {"interleave_moe_layer_step": 2, "attention_chunk_size": 8192}
        | {"floor_scale": 8192, "attn_scale": 0.1},
        {},
    ),
    "qwen3_next_hybrid": ("qwen3_next_hybrid", {}, {}),
    "qwen3_5": ("qwen3_5", {}, {}),
    "qwen3_5-square": ("qwen3_5", _SQUARE, {}),
    "qwen3_5_moe": ("qwen3_5_moe", _SQUARE, {}),
    "lfm2": ("lfm2", {"conv_bias": False}, {}),
    "lfm2_moe": ("lfm2_moe", _TIED, {}),
    "granite4_hybrid": (
        "granite4_hybrid",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0},
        {"layer_types": _GRANITE},
    ),
    "granite4_hybrid-dense": (
        "granite4_hybrid",
        {"num_local_experts": 0},
        {"layer_types": _GRANITE},
    ),
    "bamba": ("bamba", {}, {"attn_rotary_emb": 8}),
    "falcon_h1": ("falcon_h1", _NO_MULTIPLIERS, {"head_dim": 16}),
    "falcon_h1_norm": (
        "falcon_h1_norm",
        _NO_MULTIPLIERS | {"mamba_norm_before_gate": False},
        {"head_dim": 16},
    ),
    "nemotron_h": (
        "nemotron_h",
        {"layers_block_type": [_STATE, "mlp", _ALL, "mlp", _STATE, "mlp"]},
        {"hybrid_override_pattern": "M-*-M-"}
        | dict.fromkeys(("num_experts_per_tok", "n_routed_experts", "n_group", "topk_group")),
    ),
    "nemotron_h-moe": (
        "nemotron_h",
        {"layers_block_type": [_STATE, "moe", _ALL, "moe", _STATE, "moe"]},
        {},
    ),
    "mamba2": ("mamba2", {}, {}),
    "kimi_linear": (
        "kimi_linear",
        {},
        {
            "linear_attn_config": {
                "full_attn_layers": [2],
                "kda_layers": [1, 3],
                "head_dim": 16,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_router_activation_func": "sigmoid",
        },
    ),
}


# names that transformers gives other tensors than published checkpoints do
RENAMED = {"kimi_linear": (r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj")}
# of the converter, for some of them
OPTIONS: dict[str, dict[str, bool]] = {
    "llama-fused": {"fuse_qkv": True},
}
