"""Tiny configurations of further architectures, as `tests.models` has those of every test.

The tests of passes, backends and shards run over `tests.models.ARCHITECTURES`; these have what the
compiler could get wrong elsewhere: layers without positions, mixtures with shared experts, caches
that layers share, softcaps, sinks, values narrower than keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WINDOW = 16
CHUNK = 16
POSITIONS = 256

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
}
_WITH_DIM = COMMON | {"head_dim": 16}
_UNTIED = {"tie_word_embeddings": False}
# a window, then none
_MIXED = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}

# name → class of the configuration, its fields
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": (
        "SmolLM3Config",
        COMMON | {"no_rope_layers": [1, 0], "use_sliding_window": False} | _UNTIED,
    ),
    "olmo": ("OlmoConfig", COMMON),
    "olmo2": ("Olmo2Config", COMMON),
    "olmo3": ("Olmo3Config", COMMON | _MIXED),
    "olmoe": ("OlmoeConfig", COMMON | {"num_experts": 4, "num_experts_per_tok": 2}),
    "cohere": ("CohereConfig", COMMON | {"logit_scale": 1.0} | _UNTIED),
    "cohere2": ("Cohere2Config", COMMON | {"logit_scale": 1.0} | _MIXED | _UNTIED),
    "granite": (
        "GraniteConfig",
        COMMON
        | {"attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 2.0}
        | {"embedding_multiplier": 3.0},
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        COMMON | {"attention_multiplier": 0.2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        COMMON
        | {"attention_multiplier": 0.2, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"shared_intermediate_size": 48},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        COMMON
        | {"attention_multiplier": 0.2, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"shared_intermediate_size": 48, "layer_types": ["attention", "attention"]}
        | {"position_embedding_type": "nope"},
    ),
    "ministral": ("MinistralConfig", _WITH_DIM | _MIXED),
    "ministral3": ("Ministral3Config", _WITH_DIM),
    "gpt_bigcode": (
        "GPTBigCodeConfig",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS, "n_inner": 96}
        | {"multi_query": True},
    ),
    "gemma": ("GemmaConfig", _WITH_DIM | _UNTIED),
    "gemma4": (
        "Gemma4TextConfig",
        COMMON
        | {"num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW}
        | {"num_global_key_value_heads": 1, "num_kv_shared_layers": 2}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128}
        | _UNTIED,
    ),
    # several streams, one of which goes through a layer, and gates of the largest activations alone
    "gemma3n": (
        "Gemma3nTextConfig",
        _WITH_DIM
        | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": WINDOW}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128}
        | {"laurel_rank": 8, "altup_num_inputs": 2, "final_logit_softcapping": 5.0}
        | {"activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]}
        | _UNTIED,
    ),
    "exaone4": ("Exaone4Config", COMMON | _MIXED | {"sliding_window_pattern": 2}),
    "glm": ("GlmConfig", _WITH_DIM | {"partial_rotary_factor": 0.5}),
    "glm4": ("Glm4Config", _WITH_DIM | {"partial_rotary_factor": 0.5}),
    "glm4_moe": (
        "Glm4MoeConfig",
        _WITH_DIM | _ROUTED | {"partial_rotary_factor": 0.5, "use_qk_norm": True},
    ),
    "ernie4_5": ("Ernie4_5Config", _WITH_DIM | {"use_bias": True} | _UNTIED),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", _WITH_DIM),
    "seed_oss": ("SeedOssConfig", _WITH_DIM),
    "starcoder2": ("Starcoder2Config", COMMON | {"use_bias": True} | _UNTIED),
    "stablelm": (
        "StableLmConfig",
        COMMON | {"use_qkv_bias": True, "use_parallel_residual": False},
    ),
    "nemotron": ("NemotronConfig", _WITH_DIM),
    "arcee": ("ArceeConfig", _WITH_DIM),
    "helium": ("HeliumConfig", _WITH_DIM),
    "cwm": (
        "CwmConfig",
        _WITH_DIM
        | _MIXED
        | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "bos_token_id": 1},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        COMMON | _EXPERTS | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 1},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        _WITH_DIM
        | _EXPERTS
        | {"layer_types": ["full_attention"] * 2, "shared_expert_intermediate_size": 48},
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        _WITH_DIM | {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    ),
    "apertus": ("ApertusConfig", COMMON),
    "phimoe": (
        "PhimoeConfig",
        COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "falcon": (
        "FalconConfig",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2}
        | {"new_decoder_architecture": True, "alibi": False, "ffn_hidden_size": 96}
        | {"max_position_embeddings": POSITIONS, "bias": True},
    ),
    "falcon7b": (
        "FalconConfig",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True}
        | {"alibi": False, "max_position_embeddings": POSITIONS, "ffn_hidden_size": 96},
    ),
    # heads that are no power of two have slopes that are not, either
    "bloom": ("BloomConfig", {"hidden_size": 96, "n_layer": 2, "n_head": 12} | _UNTIED),
    "mpt": (
        "MptConfig",
        {
            "d_model": 96,
            "n_layers": 2,
            "n_heads": 12,
            "max_seq_len": POSITIONS,
            "expansion_ratio": 2,
        }
        | {"no_bias": True}
        | _UNTIED,
    ),
    "falcon_rw": (
        "FalconConfig",
        {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 12, "alibi": True}
        | {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False}
        | {"max_position_embeddings": POSITIONS, "ffn_hidden_size": 128, "bias": True}
        | _UNTIED,
    ),
    # heads one after the other, but queries, values and keys of each quarter of them together
    "gptj": (
        "GPTJConfig",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS, "n_inner": 96}
        | {"rotary_dim": 8}
        | _UNTIED,
    ),
    "codegen": (
        "CodeGenConfig",
        {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": POSITIONS, "n_inner": 96}
        | {"rotary_dim": 4, "n_ctx": POSITIONS}
        | _UNTIED,
    ),
    "gemma2": (
        "Gemma2Config",
        _WITH_DIM
        | _MIXED
        | _UNTIED
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
        | {"query_pre_attn_scalar": 16},
    ),
    "gpt_oss": (
        "GptOssConfig",
        _WITH_DIM
        | _MIXED
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": _YARN},
    ),
    # values of fewer columns than keys, sinks in layers with a window, a router of sigmoids
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        _WITH_DIM
        | {"v_head_dim": 8, "sliding_window": WINDOW}
        | {"layer_types": ["full_attention", "sliding_attention"]}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        COMMON
        | _ROUTED
        | {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24}
        | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
        | {"topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        COMMON
        | _ROUTED
        | {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24}
        | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    ),
    "minicpm3": (
        "MiniCPM3Config",
        COMMON
        | {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24}
        | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
        | _UNTIED,
    ),
    # chunks of keys in layers with rotary, none and scaled queries in those without; one that is
    # dense, and mixtures whose experts each see all tokens
    "llama4_text": (
        "Llama4TextConfig",
        _WITH_DIM
        | {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "attention_chunk_size": CHUNK}
        | {"floor_scale": 8, "attn_scale": 0.5, "intermediate_size_mlp": 96}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_layers": [1, 2]}
        | _UNTIED,
    ),
    # layers of different numbers of heads, each with a gate
    "laguna": (
        "LagunaConfig",
        _WITH_DIM
        | _EXPERTS
        | _MIXED
        | {"num_attention_heads_per_layer": [4, 8], "shared_expert_intermediate_size": 48},
    ),
    "hy_v3": ("HYV3Config", _WITH_DIM | _EXPERTS),
    "afmoe": ("AfmoeConfig", _WITH_DIM | _EXPERTS | _MIXED | {"num_dense_layers": 1}),
    "exaone_moe": ("ExaoneMoeConfig", _WITH_DIM | _EXPERTS | _MIXED),
    "flex_olmo": ("FlexOlmoConfig", COMMON | {"num_experts": 4, "num_experts_per_tok": 2}),
    "solar_open": ("SolarOpenConfig", _WITH_DIM | _ROUTED),
    # among transformers' models that also take images
    "mistral4": (
        "Mistral4Config",
        COMMON
        | _ROUTED
        | {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24}
        | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        COMMON
        | _ROUTED
        | {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24}
        | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    ),
}


# those of the default tier: no positions at all, buffers that a checkpoint holds and a router by
# groups, neighboring places by a list, sinks, a softcap, values narrower than keys,
# slopes, chunks
COVERING = (
    "granitemoehybrid", "glm4_moe", "falcon", "gpt_oss", "gemma2", "deepseek_v3", "mpt",
    "llama4_text",
)  # fmt: skip

# of those where the noise of the others makes a draft that is always right, or never
DRAFT_NOISE: dict[str, float] = {}


def spread(name: str, key: str, parameter: Tensor) -> tuple[float, float]:
    """Standard deviation and mean of a parameter's values; mean 1 is that of a fresh norm."""
    if parameter.ndim == 1 and "bias" not in key:
        return 0.3, 1.0 if bool((parameter == 1).all()) else 0.0
    if "bias" in key or any(part in key for part in ("embed", "wte", "wpe")):
        return 0.1, 0.0
    return 0.2, 0.0


def draw_buffers(model: Any, generator: torch.Generator) -> None:
    """Disturb the buffers that a checkpoint holds: those of routers are zeros at first."""
    stored = model.state_dict()
    for key, buffer in model.named_buffers():
        if key in stored and buffer.is_floating_point():
            buffer += 0.2 * torch.rand(buffer.shape, generator=generator)
