"""What rows of `gguf_architectures` have in common: names of tensors, and fields.

Source: llama.cpp, gguf-py/gguf/tensor_mapping.py, conversion/base.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specc.artifact.decoders.gguf_targets import How, Target

Names = dict[str, str | Target]

ENDS: Names = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
ATTENTION: Names = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
PAIRED: Names = {
    **ATTENTION,
    "attn_q": Target("self_attn.q_proj", How.PAIRED),
    "attn_k": Target("self_attn.k_proj", How.PAIRED),
}
QK_NORMS: Names = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
NORMS: Names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
# norms behind, or around, attention and what follows it
POST_NORMS: Names = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
SANDWICH: Names = {
    **POST_NORMS,
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
}
LATENTS: Names = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
MLP: Names = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def experts(module: str, router: str) -> Names:
    return {
        "ffn_gate_inp": f"{module}.{router}",
        "ffn_gate_exps.weight": Target(f"{module}.experts.gate_up_proj", How.HALVES, 0),
        "ffn_up_exps.weight": Target(f"{module}.experts.gate_up_proj", How.HALVES, 1),
        "ffn_gate_up_exps.weight": f"{module}.experts.gate_up_proj",
        "ffn_down_exps.weight": f"{module}.experts.down_proj",
    }


EXPERTS = experts("mlp", "gate")
BIASED_ROUTER: Names = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}


def shared_experts(module: str) -> Names:
    return {
        "ffn_gate_shexp": f"{module}.gate_proj",
        "ffn_up_shexp": f"{module}.up_proj",
        "ffn_down_shexp": f"{module}.down_proj",
    }


def less_one(names: Names) -> Names:
    """Norms that the model multiplies by 1 + w, and the file has so."""
    return {f"{key}.weight": Target(f"{name}.weight", How.LESS_ONE) for key, name in names.items()}


DENSE: Names = {**ENDS, **ATTENTION, **NORMS, **MLP}

# required by llama.cpp of every architecture
SIZES: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
KV = {"attention.head_count_kv": "num_key_value_heads"}
RMS = {**SIZES, **KV, "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
LAYER_NORM = "attention.layer_norm_epsilon"
MIXTURE = {"expert_used_count": "num_experts_per_tok"}
LOCAL = {**MIXTURE, "expert_count": "num_local_experts"}
EXPERT_WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
ROUTED = {
    **MIXTURE,
    **EXPERT_WIDTH,
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
}
LATENT_FIELDS = {
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length_mla": "",
    "attention.value_length_mla": "v_head_dim",
}
MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
GPT2_FIELDS = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    LAYER_NORM: "layer_norm_epsilon",
}
GPT2: Names = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "ffn_norm": "ln_2",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
NO_BIAS: dict[str, Any] = {"attention_bias": False}
