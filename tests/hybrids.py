"""Tiny configurations of models with convolutions and recurrences over tokens beside attention.

Keys and values have other widths, and there are more value heads than key heads wherever a model
can have that: a state that is turned, or heads in another order, then show.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests import more_models

_COMMON: dict[str, Any] = more_models.COMMON
_UNTIED = {"tie_word_embeddings": False}
_LINEAR, _FULL = "linear_attention", "full_attention"
_GATED_DELTA: dict[str, Any] = _COMMON | {
    "num_hidden_layers": 4, "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR], "head_dim": 16,
    "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_expand": 2,
    "mamba_d_head": 16, "mamba_chunk_size": 16, "mamba_conv_bias": True,
}  # fmt: skip

# name → class of the configuration, its fields
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next_hybrid": ("Qwen3NextConfig", _GATED_DELTA | _EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", _GATED_DELTA | _UNTIED),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", _GATED_DELTA | _EXPERTS | _UNTIED),
    "lfm2": (
        "Lfm2Config",
        _COMMON
        | {"num_hidden_layers": 4, "layer_types": ["conv", "conv", _FULL, "conv"]}
        | {"conv_bias": True, "block_multiple_of": 16}
        | _UNTIED,
    ),
    # convolutions of seven tokens, a window, gates of heads, norms behind each part
    "lfm3": (
        "Lfm3Config",
        _COMMON
        | {"num_hidden_layers": 4, "layer_types": ["conv", "sliding_attention", _FULL, "conv"]}
        | {"head_dim": 16, "sliding_window": 16}
        | _UNTIED,
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        _COMMON
        | {"num_hidden_layers": 4, "layer_types": ["conv", "conv", _FULL, "conv"]}
        | {"num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 48}
        | _UNTIED,
    ),
    "granite4_hybrid": (
        "GraniteMoeHybridConfig",
        _COMMON
        | _MAMBA
        | {"num_hidden_layers": 4, "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR]}
        | {"attention_multiplier": 0.2, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"shared_intermediate_size": 48, "position_embedding_type": "nope"},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        _COMMON
        | {"layers_block_type": [_LINEAR, "mlp", _FULL, "moe", _LINEAR, "mlp"], "head_dim": 16}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 12}
        | {"chunk_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48},
    ),
    "falcon_h1": (
        "FalconH1Config",
        _COMMON
        | _MAMBA
        | {"mamba_d_ssm": 128, "ssm_multipliers": [0.7, 1.2, 0.9, 1.1, 0.8]}
        | {"key_multiplier": 0.7, "ssm_out_multiplier": 0.8, "attention_out_multiplier": 0.9},
    ),
    "falcon_h1_norm": (
        "FalconH1Config",
        _COMMON | _MAMBA | {"mamba_d_ssm": 128, "mamba_rms_norm": True},
    ),
    "mamba2": (
        "Mamba2Config",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "expand": 2}
        | {"n_groups": 2, "state_size": 12, "chunk_size": 16},
    ),
    "bamba": (
        "BambaConfig",
        _COMMON | _MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    ),
    "olmo_hybrid": ("OlmoHybridConfig", _GATED_DELTA),
    "kimi_linear": (
        "KimiLinearConfig",
        _COMMON
        | {"num_hidden_layers": 3, "layer_types": [_LINEAR, _FULL, _LINEAR]}
        | {"linear_head_dim": 16, "linear_num_heads": 4, "num_key_value_heads": 4}
        | {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    # Ling 3: KDA whose decays have a bound, latent attention, a router of groups
    "bailing_hybrid": (
        "BailingHybridConfig",
        _COMMON
        | {"num_hidden_layers": 3, "layer_types": [_LINEAR, _FULL, _LINEAR]}
        | {"head_dim": 16, "num_key_value_heads": 4, "num_mtp_layers": 0}
        | {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "zamba2": (
        "Zamba2Config",
        _COMMON
        | {"num_hidden_layers": 4, "layers_block_type": [_LINEAR, "hybrid", _LINEAR, "hybrid"]}
        | {"n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 12, "chunk_size": 16}
        | {"use_mem_rope": True, "use_shared_attention_adapter": True, "adapter_rank": 8}
        | {"num_key_value_heads": 4}
        | _UNTIED,
    ),
}  # fmt: skip
# standard deviation of embeddings, beside which layers decide about half of the tokens
_EMBEDDINGS = {
    "qwen3_next_hybrid": 12.0, "qwen3_5": 12.0, "qwen3_5_moe": 12.0, "lfm2": 20.0,
    "lfm3": 20.0, "lfm2_moe": 20.0, "granite4_hybrid": 14.0, "nemotron_h": 6.0, "falcon_h1": 40.0,
    "falcon_h1_norm": 14.0, "mamba2": 5.0, "bamba": 13.0, "olmo_hybrid": 15.0,
    "kimi_linear": 14.0, "bailing_hybrid": 14.0, "zamba2": 10.0,
}  # fmt: skip
# those of the default tier: the delta rule, convolutions alone, the scan of Mamba-2
COVERING = ("qwen3_next_hybrid", "lfm2", "nemotron_h")


def spread(name: str, key: str, parameter: Tensor) -> tuple[float, float]:
    """As `more_models.spread`; decays are slow enough for a state to say something for a while."""
    last = key.rpartition(".")[2]
    if "embed" in key and "norm" not in key:
        return _EMBEDDINGS[name], 0.0
    if last == "A_log":
        return 0.3, -2.0
    if "conv" in key and last == "weight" and parameter.ndim == 3:
        return 0.5, 0.0
    return more_models.spread(name, key, parameter)


def draft_of(model: Any) -> Any:
    """An attention model that guesses what one of these says next, from its last token alone.

    It has the embedding, the final norm and the head of the other one, and a layer that adds
    nothing; embeddings are drawn so wide (`_EMBEDDINGS`) that it is right now and then.
    """
    import transformers

    ends = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    vocab, width = ends[0].shape
    sizes = more_models.COMMON | {"num_hidden_layers": 1, "hidden_size": width, "vocab_size": vocab}
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=False)
    draft = transformers.LlamaForCausalLM(config).float().eval()
    layer = draft.model.layers[0]
    norm = [part for name, part in model.base_model.named_children() if "norm" in name][-1]
    with torch.no_grad():
        # a norm of ones is its weight, whatever is added to that
        draft.model.norm.weight.copy_(norm(torch.ones(1, 1, width))[0, 0])
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            part.weight.zero_()
        draft.get_input_embeddings().weight.copy_(ends[0])
        draft.get_output_embeddings().weight.copy_(ends[1])
    return draft
