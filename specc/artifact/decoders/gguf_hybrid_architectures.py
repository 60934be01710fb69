"""Rows of `gguf_architectures`: models of which some layers keep states in place of attention.

Source: llama.cpp, conversion/, src/models/.
"""

from __future__ import annotations

from specc.artifact.decoders.gguf_names import (
    ATTENTION,
    BIASED_ROUTER,
    DENSE,
    ENDS,
    EXPERT_WIDTH,
    EXPERTS,
    LATENT_FIELDS,
    LATENTS,
    LAYER_NORM,
    LOCAL,
    MIXTURE,
    MLP,
    MULTIPLIERS,
    NORMS,
    PAIRED,
    QK_NORMS,
    RMS,
    SIZES,
    Names,
    experts,
    less_one,
    shared_experts,
)
from specc.artifact.decoders.gguf_targets import Architecture, How, Target

# gated delta rules of Qwen3-Next and Qwen3.5
_DELTA: Names = {
    "post_attention_norm": "post_attention_layernorm",
    "ssm_a": Target("linear_attn.A_log", How.DECAY),
    "ssm_dt.bias": Target("linear_attn.dt_bias", How.VALUES),
    "ssm_conv1d.weight": Target("linear_attn.conv1d.weight", How.KERNEL),
    "ssm_norm": "linear_attn.norm",
    "ssm_out.weight": Target("linear_attn.out_proj.weight", How.VALUE_COLUMNS),
    **less_one(
        {
            **QK_NORMS,
            "output_norm": "model.norm",
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
        }
    ),
}
_DELTA_APART: Names = {
    "attn_qkv.weight": Target("linear_attn.in_proj_qkv.weight", How.VALUES),
    "attn_gate.weight": Target("linear_attn.in_proj_z.weight", How.VALUES),
    "ssm_alpha.weight": Target("linear_attn.in_proj_a.weight", How.VALUES),
    "ssm_beta.weight": Target("linear_attn.in_proj_b.weight", How.VALUES),
}
_SHARED: Names = {
    **EXPERTS,
    **shared_experts("mlp.shared_expert"),
    "ffn_gate_inp_shexp.weight": Target("mlp.shared_expert_gate.weight", How.ROW),
}
_DELTA_FIELDS = {
    **RMS,
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": "",
    "attention.recurrent_layers": "",
    "full_attention_interval": "",
    "nextn_predict_layers": "",
    "rope.dimension_sections": "",
}
_SHARED_FIELDS = {
    **MIXTURE,
    **EXPERT_WIDTH,
    "expert_count": "num_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


def _scan(module: str) -> Names:
    """Mamba-2, as a part of this name."""
    return {
        "ssm_in": f"{module}.in_proj",
        "ssm_conv1d.weight": Target(f"{module}.conv1d.weight", How.KERNEL),
        "ssm_conv1d.bias": f"{module}.conv1d.bias",
        "ssm_dt.bias": f"{module}.dt_bias",
        "ssm_a": Target(f"{module}.A_log", How.DECAY),
        "ssm_d": Target(f"{module}.D", How.FLAT),
        "ssm_norm.weight": Target(f"{module}.norm.weight", How.FLAT),
        "ssm_out": f"{module}.out_proj",
    }


_MAMBA_FIELDS = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
    "ssm.inner_size": "",
}
_FEED_FORWARD: Names = {
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}

# short convolutions
_LFM2: Names = {
    **DENSE,
    "token_embd_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv.weight": Target("conv.conv.weight", How.KERNEL),
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_LFM2_FIELDS = {
    **RMS,
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "attention.head_count_kv": "",
    "shortconv.l_cache": "conv_L_cache",
}

_NEMOTRON: Names = {
    **ENDS,
    **_scan("mixer"),
    "token_embd": "model.embeddings",
    "output_norm": "model.norm_f",
    "attn_norm": "norm",
    "attn_q": Target("mixer.q_proj", How.PAIRED),
    "attn_k": Target("mixer.k_proj", How.PAIRED),
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}
_NEMOTRON_FIELDS = {
    **SIZES,
    "feed_forward_length": "",
    "attention.head_count_kv": "",
    LAYER_NORM: "layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups",
    "ssm.time_step_rank": "mamba_num_heads",
    "ssm.inner_size": "",
}

HYBRIDS: dict[str, Architecture] = {
    "qwen3next": Architecture(
        ("qwen3_next",),
        {
            **ENDS,
            **ATTENTION,
            **_DELTA,
            **_SHARED,
            "attn_qkv.weight": Target("linear_attn.in_proj_qkvz.weight", How.STATE_GROUPS, 0),
            "attn_gate.weight": Target("linear_attn.in_proj_qkvz.weight", How.STATE_GROUPS, 1),
            # of files from before the two
            "ssm_in": "linear_attn.in_proj_qkvz",
            "ssm_ba": "linear_attn.in_proj_ba",
        },
        {**_DELTA_FIELDS, **_SHARED_FIELDS},
        says={"norm_topk_prob": True},
        is_partial=True,
    ),
    "qwen35": Architecture(
        ("qwen3_5_text",),
        {**ENDS, **ATTENTION, **MLP, **_DELTA, **_DELTA_APART},
        _DELTA_FIELDS,
        is_partial=True,
        has_tiled_values=True,
    ),
    "qwen35moe": Architecture(
        ("qwen3_5_moe_text",),
        {**ENDS, **ATTENTION, **_DELTA, **_DELTA_APART, **_SHARED},
        {**_DELTA_FIELDS, **_SHARED_FIELDS},
        is_partial=True,
        has_tiled_values=True,
    ),
    "lfm2": Architecture(("lfm2",), _LFM2, _LFM2_FIELDS, says={"block_auto_adjust_ff_dim": False}),
    "lfm2moe": Architecture(
        ("lfm2_moe",),
        {
            **_LFM2,
            **experts("feed_forward", "gate"),
            "exp_probs_b.bias": "feed_forward.expert_bias",
        },
        {
            **_LFM2_FIELDS,
            **MIXTURE,
            **EXPERT_WIDTH,
            "expert_count": "num_experts",
            "expert_gating_func": "",
            "leading_dense_block_count": "num_dense_layers",
        },
        says={"norm_topk_prob": True, "use_expert_bias": True},
    ),
    "granitehybrid": Architecture(
        ("granitemoehybrid", "bamba"),
        {
            **ENDS,
            **PAIRED,
            **NORMS,
            **_scan("mamba"),
            **experts("block_sparse_moe", "router"),
            "ffn_gate_shexp.weight": Target("shared_mlp.input_linear.weight", How.JOINED, 0),
            "ffn_up_shexp.weight": Target("shared_mlp.input_linear.weight", How.JOINED, 1),
            "ffn_down_shexp": "shared_mlp.output_linear",
            # without experts
            "ffn_gate.weight": Target("shared_mlp.input_linear.weight", How.JOINED, 0),
            "ffn_up.weight": Target("shared_mlp.input_linear.weight", How.JOINED, 1),
            "ffn_down": "shared_mlp.output_linear",
        },
        {
            **RMS,
            **MULTIPLIERS,
            **LOCAL,
            **_MAMBA_FIELDS,
            "attention.head_count_kv": "",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        is_partial=True,
        names_of={
            "bamba": {
                **_FEED_FORWARD,
                "ffn_gate.weight": "feed_forward.gate_proj.weight",
                "ffn_up.weight": "feed_forward.up_proj.weight",
                "ffn_norm": "pre_ff_layernorm",
                "output_norm": "model.final_layernorm",
            }
        },
    ),
    "falcon-h1": Architecture(
        ("falcon_h1",),
        {
            **ENDS,
            **ATTENTION,
            **_scan("mamba"),
            **_FEED_FORWARD,
            "output_norm": "model.final_layernorm",
            "attn_norm": "input_layernorm",
            # the converter leaves out the suffix
            "ffn_norm": "pre_ff_layernorm.weight",
        },
        {**RMS, **_MAMBA_FIELDS},
    ),
    "nemotron_h": Architecture(("nemotron_h",), _NEMOTRON, _NEMOTRON_FIELDS),
    "nemotron_h_moe": Architecture(
        ("nemotron_h",),
        {
            **_NEMOTRON,
            **shared_experts("mixer.shared_experts"),
            "ffn_gate_inp": "mixer.gate",
            "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
            "ffn_up_exps.weight": "mixer.experts.up_proj",
            "ffn_down_exps.weight": "mixer.experts.down_proj",
            "ffn_latent_down": "mixer.fc1_latent_proj",
            "ffn_latent_up": "mixer.fc2_latent_proj",
        },
        {
            **_NEMOTRON_FIELDS,
            **MIXTURE,
            **EXPERT_WIDTH,
            "expert_count": "n_routed_experts",
            "expert_shared_count": "n_shared_experts",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
            "expert_gating_func": "",
            "moe_latent_size": "moe_latent_size",
            "nextn_predict_layers": "",
        },
    ),
    "mamba2": Architecture(
        ("mamba2",),
        {
            **ENDS,
            **_scan("mixer"),
            "token_embd": "backbone.embeddings",
            "output_norm": "backbone.norm_f",
            "attn_norm": "norm",
        },
        {
            "embedding_length": "hidden_size",
            "block_count": "num_hidden_layers",
            "context_length": "",
            "feed_forward_length": "",
            "attention.head_count": "",
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "state_size",
            "ssm.group_count": "n_groups",
            "ssm.time_step_rank": "num_heads",
            "ssm.inner_size": "",
        },
        layers="backbone.layers",
    ),
    "kimi-linear": Architecture(
        ("kimi_linear",),
        {
            **DENSE,
            **LATENTS,
            **EXPERTS,
            **BIASED_ROUTER,
            **shared_experts("mlp.shared_experts"),
            "attn_k_b.weight": Target("self_attn.kv_b_proj.weight", How.LATENT, 0),
            "attn_v_b.weight": Target("self_attn.kv_b_proj.weight", How.LATENT, 1),
            "ssm_conv1d_q.weight": Target("self_attn.conv1d.weight", How.KERNELS, 0),
            "ssm_conv1d_k.weight": Target("self_attn.conv1d.weight", How.KERNELS, 1),
            "ssm_conv1d_v.weight": Target("self_attn.conv1d.weight", How.KERNELS, 2),
            "ssm_a": Target("self_attn.forget_gate.A_log", How.CHANNEL_DECAY),
            "ssm_dt.bias": "self_attn.forget_gate.dt_bias",
            "ssm_f_a": "self_attn.forget_gate.f_a_proj",
            "ssm_f_b": "self_attn.forget_gate.f_b_proj",
            "ssm_g_a": "self_attn.g_a_proj",
            "ssm_g_b": "self_attn.g_b_proj",
            "ssm_beta": "self_attn.b_proj",
            "ssm_norm": "self_attn.o_norm",
        },
        {
            **RMS,
            **LATENT_FIELDS,
            **MIXTURE,
            **EXPERT_WIDTH,
            "attention.head_count_kv": "",
            "expert_count": "num_local_experts",
            "expert_shared_count": "n_shared_experts",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_gating_func": "",
            "leading_dense_block_count": "first_k_dense_replace",
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            "kda.head_dim": "linear_head_dim",
        },
        says={"norm_topk_prob": True},
        has_latents=True,
    ),
}
