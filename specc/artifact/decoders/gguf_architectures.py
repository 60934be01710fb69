"""Architectures of llama.cpp: one row for each, and what rows have in common.

A row says of a `general.architecture` which model types of transformers it is, which parameter each
tensor is and how the converter changed it, and which of the file's fields are which of the
configuration. An architecture without a row is refused; so is a field, or a tensor, that its row
does not name. Names that rows share are in `gguf_names`.
Source: https://github.com/ggml-org/llama.cpp, conversion/, gguf-py/gguf/tensor_mapping.py, and
src/models/ for what no field says.
"""

from __future__ import annotations

from specc.artifact.decoders.gguf_hybrid_architectures import HYBRIDS
from specc.artifact.decoders.gguf_names import (
    BIASED_ROUTER,
    CAPS,
    DENSE,
    EXPERT_WIDTH,
    EXPERTS,
    KV,
    LATENT_FIELDS,
    LATENTS,
    LAYER_NORM,
    LOCAL,
    MIXTURE,
    MULTIPLIERS,
    NO_BIAS,
    NORMS,
    PAIRED,
    POST_NORMS,
    QK_NORMS,
    RMS,
    ROUTED,
    SANDWICH,
    SIZES,
    experts,
    less_one,
    shared_experts,
)
from specc.artifact.decoders.gguf_older_architectures import OLDER
from specc.artifact.decoders.gguf_targets import Architecture, How, Target

ARCHITECTURES: dict[str, Architecture] = {
    **OLDER,
    **HYBRIDS,
    "llama": Architecture(
        ("llama", "mistral", "mixtral"),
        {**DENSE, **PAIRED, **EXPERTS},
        {**RMS, **LOCAL},
    ),
    "mistral3": Architecture(
        ("ministral3",),
        {**DENSE, **PAIRED},
        {**RMS, "attention.temperature_scale": "", "rope.scaling.yarn_log_multiplier": ""},
    ),
    "llama4": Architecture(
        ("llama4_text",),
        {
            **DENSE,
            **shared_experts("feed_forward.shared_expert"),
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
            "ffn_gate_inp": "feed_forward.router",
            "ffn_gate_exps.weight": Target(
                "feed_forward.experts.gate_up_proj", How.TURNED_HALVES, 0
            ),
            "ffn_up_exps.weight": Target("feed_forward.experts.gate_up_proj", How.TURNED_HALVES, 1),
            "ffn_down_exps.weight": Target("feed_forward.experts.down_proj", How.TURNED),
        },
        {
            **RMS,
            **LOCAL,
            "feed_forward_length": "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
    ),
    "smollm3": Architecture(("smollm3",), {**DENSE, **PAIRED}, RMS),
    "arcee": Architecture(("arcee",), {**DENSE, **PAIRED}, RMS),
    "apertus": Architecture(
        ("apertus",),
        {
            **DENSE,
            **QK_NORMS,
            "attn_norm": "attention_layernorm",
            "ffn_norm": "feedforward_layernorm",
        },
        RMS,
        layer_numbers={
            "xielu.alpha_n": ("mlp.act_fn.alpha_n", (1,)),
            "xielu.alpha_p": ("mlp.act_fn.alpha_p", (1,)),
            "xielu.beta": ("mlp.act_fn.beta", ()),
            "xielu.eps": ("mlp.act_fn.eps", ()),
        },
    ),
    "granite": Architecture(("granite",), {**DENSE, **PAIRED}, {**RMS, **MULTIPLIERS}),
    "granitemoe": Architecture(
        ("granitemoe", "granitemoeshared"),
        {
            **DENSE,
            **PAIRED,
            **experts("block_sparse_moe", "router"),
            "ffn_gate_shexp.weight": Target("shared_mlp.input_linear.weight", How.JOINED, 0),
            "ffn_up_shexp.weight": Target("shared_mlp.input_linear.weight", How.JOINED, 1),
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        {
            **RMS,
            **MULTIPLIERS,
            **LOCAL,
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
    ),
    "olmo": Architecture(
        ("olmo",),
        {**DENSE, **PAIRED},
        {**SIZES, **KV, "attention.clamp_kqv": "clip_qkv", LAYER_NORM: ""},
    ),
    "olmo2": Architecture(
        ("olmo2", "olmo3"),
        {**DENSE, **QK_NORMS, **POST_NORMS},
        RMS,
        window_every=4,
        has_own_rotary_by_layer=True,
    ),
    "olmoe": Architecture(
        ("olmoe",),
        {**DENSE, **QK_NORMS, **EXPERTS},
        {**RMS, **MIXTURE, "expert_count": "num_experts"},
        says={"norm_topk_prob": False, "clip_qkv": None},
    ),
    "qwen2": Architecture(("qwen2",), DENSE, RMS),
    "qwen2moe": Architecture(
        ("qwen2_moe",),
        {
            **DENSE,
            **EXPERTS,
            **shared_experts("mlp.shared_expert"),
            "ffn_gate_inp_shexp.weight": Target("mlp.shared_expert_gate.weight", How.ROW),
        },
        {
            **RMS,
            **MIXTURE,
            **EXPERT_WIDTH,
            "expert_count": "num_experts",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        says={"norm_topk_prob": False},
    ),
    "qwen3": Architecture(("qwen3",), {**DENSE, **QK_NORMS}, RMS, says=NO_BIAS),
    "qwen3moe": Architecture(
        ("qwen3_moe",),
        {**DENSE, **QK_NORMS, **EXPERTS},
        {**RMS, **MIXTURE, **EXPERT_WIDTH, "expert_count": "num_experts"},
        # llama.cpp divides by the sum, whatever a field says
        says=NO_BIAS | {"norm_topk_prob": True},
    ),
    "gemma": Architecture(
        ("gemma",), {**DENSE, **less_one({**NORMS, "output_norm": "model.norm"})}, RMS
    ),
    "gemma2": Architecture(
        ("gemma2",),
        {**DENSE, **less_one({**SANDWICH, "output_norm": "model.norm"})},
        {**RMS, **CAPS},
        window_every=2,
    ),
    "gemma3": Architecture(
        ("gemma3_text",),
        {**DENSE, **less_one({**SANDWICH, **QK_NORMS, "output_norm": "model.norm"})},
        {**RMS, "final_logit_softcapping": "final_logit_softcapping"},
        window_every=6,
        window_base=10000.0,
        has_own_rotary_by_layer=True,
    ),
    "gemma4": Architecture(
        ("gemma4_text",),
        {
            **DENSE,
            **SANDWICH,
            **QK_NORMS,
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "layer_output_scale.weight": "layer_scalar",
        },
        {
            **RMS,
            "final_logit_softcapping": "final_logit_softcapping",
            "attention.head_count_kv": "",
            "feed_forward_length": "",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "attention.key_length_swa": "",
            "attention.value_length_swa": "",
            "rope.dimension_count_swa": "",
        },
        window_base=10000.0,
        has_own_rotary_by_layer=True,
    ),
    "phi3": Architecture(
        ("phi3",),
        {
            **DENSE,
            "attn_qkv": "self_attn.qkv_proj",
            "ffn_up": "mlp.gate_up_proj",
        },
        RMS,
        is_partial=True,
    ),
    "phimoe": Architecture(
        ("phimoe",),
        {**DENSE, **experts("mlp", "router")},
        {**RMS, **LOCAL},
        says={"attention_bias": True, "lm_head_bias": True},
    ),
    "command-r": Architecture(
        ("cohere",),
        {**DENSE, **QK_NORMS},
        {**SIZES, **KV, LAYER_NORM: "layer_norm_eps", "logit_scale": "logit_scale"},
    ),
    "cohere2": Architecture(
        ("cohere2",),
        DENSE,
        {**SIZES, **KV, LAYER_NORM: "layer_norm_eps", "logit_scale": "logit_scale"},
        window_every=4,
    ),
    "chatglm": Architecture(
        ("glm",), {**DENSE, "ffn_up": "mlp.gate_up_proj"}, RMS, is_partial=True
    ),
    "glm4": Architecture(
        ("glm4",),
        {
            **DENSE,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        RMS,
        is_partial=True,
    ),
    "glm4moe": Architecture(
        ("glm4_moe",),
        {
            **DENSE,
            **QK_NORMS,
            **EXPERTS,
            **BIASED_ROUTER,
            **shared_experts("mlp.shared_experts"),
            "post_attention_norm": "post_attention_layernorm",
        },
        {**RMS, **ROUTED, "expert_gating_func": "", "nextn_predict_layers": ""},
        says={"norm_topk_prob": False, "n_group": 1, "topk_group": 1},
        is_partial=True,
    ),
    "ernie4_5": Architecture(("ernie4_5",), DENSE, RMS),
    "hunyuan-dense": Architecture(
        ("hunyuan_v1_dense",),
        {
            **DENSE,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
        RMS,
    ),
    "seed_oss": Architecture(
        ("seed_oss",), {**DENSE, "post_attention_norm": "post_attention_layernorm"}, RMS
    ),
    "exaone4": Architecture(("exaone4",), {**DENSE, **QK_NORMS, **POST_NORMS}, RMS, window_every=4),
    "minimax-m2": Architecture(
        ("minimax_m2",),
        {
            **DENSE,
            **QK_NORMS,
            **EXPERTS,
            "exp_probs_b.bias": "mlp.e_score_correction_bias",
        },
        {
            **RMS,
            **LOCAL,
            "expert_feed_forward_length": "intermediate_size",
            "expert_gating_func": "",
        },
        is_partial=True,
    ),
    "gpt-oss": Architecture(
        ("gpt_oss",),
        {
            **DENSE,
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps.weight": Target("mlp.experts.gate_up_proj", How.TURNED_ALTERNATING, 0),
            "ffn_up_exps.weight": Target("mlp.experts.gate_up_proj", How.TURNED_ALTERNATING, 1),
            "ffn_gate_exps.bias": Target("mlp.experts.gate_up_proj_bias", How.ALTERNATING, 0),
            "ffn_up_exps.bias": Target("mlp.experts.gate_up_proj_bias", How.ALTERNATING, 1),
            "ffn_down_exps.weight": Target("mlp.experts.down_proj", How.TURNED),
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        {**RMS, **LOCAL, "expert_feed_forward_length": ""},
        window_every=2,
    ),
    "deepseek2": Architecture(
        ("deepseek_v3", "deepseek_v2", "glm4_moe_lite"),
        {
            **DENSE,
            **EXPERTS,
            **BIASED_ROUTER,
            **shared_experts("mlp.shared_experts"),
            **LATENTS,
            "attn_k_b.weight": Target("self_attn.kv_b_proj.weight", How.LATENT, 0),
            "attn_v_b.weight": Target("self_attn.kv_b_proj.weight", How.LATENT, 1),
        },
        {
            **RMS,
            **ROUTED,
            **LATENT_FIELDS,
            "attention.head_count_kv": "",
            "expert_gating_func": "",
            "nextn_predict_layers": "",
            "rope.scaling.yarn_log_multiplier": "",
        },
        says={"norm_topk_prob": False},
        has_latents=True,
    ),
    "minicpm3": Architecture(
        ("minicpm3",), {**DENSE, **LATENTS}, {**RMS, **LATENT_FIELDS}, has_latents=True
    ),
}
