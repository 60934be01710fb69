"""Rows of `gguf_architectures` of older models: most project queries, keys and values at once.

Source: https://github.com/ggml-org/llama.cpp, conversion/, src/models/.
"""

from __future__ import annotations

from specc.artifact.decoders.gguf_names import (
    DENSE,
    GPT2,
    GPT2_FIELDS,
    KV,
    LAYER_NORM,
    NORMS,
    RMS,
    SIZES,
    less_one,
)
from specc.artifact.decoders.gguf_targets import Architecture, How, Target

OLDER: dict[str, Architecture] = {
    "phi2": Architecture(
        ("phi",),
        {
            **DENSE,
            "output_norm": "model.final_layernorm",
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        {**SIZES, **KV, LAYER_NORM: "layer_norm_eps"},
        is_partial=True,
    ),
    "gpt2": Architecture(
        ("gpt2",),
        {
            **GPT2,
            **{
                f"{key}.weight": Target(f"{GPT2[key]}.weight", How.TRANSPOSED)
                for key in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
            },
        },
        GPT2_FIELDS,
        "transformer.h",
    ),
    "starcoder": Architecture(
        ("gpt_bigcode",),
        GPT2,
        {**GPT2_FIELDS, "attention.head_count_kv": ""},
        "transformer.h",
        says={"multi_query": True},
    ),
    "starcoder2": Architecture(
        ("starcoder2",),
        {**DENSE, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        {**SIZES, **KV, LAYER_NORM: "norm_epsilon"},
    ),
    "gptneox": Architecture(
        ("gpt_neox",),
        {
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "lm_head",
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_qkv": Target("attention.query_key_value", How.HEAD_GROUPS),
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        {
            **SIZES,
            LAYER_NORM: "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
        },
        "gpt_neox.layers",
        is_partial=True,
    ),
    "bloom": Architecture(
        ("bloom",),
        {
            "token_embd": "transformer.word_embeddings",
            "token_embd_norm": "transformer.word_embeddings_layernorm",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_qkv": Target("self_attention.query_key_value", How.HEAD_GROUPS),
            "attn_output": "self_attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        {
            "context_length": "",
            "embedding_length": "hidden_size",
            "block_count": "n_layer",
            "feed_forward_length": "",
            "attention.head_count": "n_head",
            "attention.head_count_kv": "",
            LAYER_NORM: "layer_norm_epsilon",
        },
        "transformer.h",
    ),
    "mpt": Architecture(
        ("mpt",),
        {
            "token_embd": "transformer.wte",
            "output_norm": "transformer.norm_f",
            "output": "lm_head",
            "attn_norm": "norm_1",
            "ffn_norm": "norm_2",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        {
            "context_length": "max_seq_len",
            "embedding_length": "d_model",
            "block_count": "n_layers",
            "feed_forward_length": "",
            "attention.head_count": "n_heads",
            LAYER_NORM: "layer_norm_epsilon",
            "attention.max_alibi_bias": "",
            "attention.clamp_kqv": "",
        },
        "transformer.blocks",
    ),
    "falcon": Architecture(
        ("falcon",),
        {
            "token_embd": "transformer.word_embeddings",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
            "attn_norm": "input_layernorm",
            "attn_qkv": Target("self_attention.query_key_value", How.HEAD_GROUPS),
            "attn_output": "self_attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        {
            **SIZES,
            "feed_forward_length": "ffn_hidden_size",
            "attention.head_count_kv": "num_kv_heads",
            LAYER_NORM: "layer_norm_epsilon",
            "tensor_data_layout": "",
        },
        "transformer.h",
        names_beside={
            "blk.0.attn_norm_2.weight": {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
        },
    ),
    "stablelm": Architecture(
        ("stablelm",),
        {
            **DENSE,
            "attn_q_norm.weight": Target("self_attn.q_layernorm.norms.{}.weight", How.NORMS),
            "attn_k_norm.weight": Target("self_attn.k_layernorm.norms.{}.weight", How.NORMS),
        },
        {
            **SIZES,
            **KV,
            LAYER_NORM: "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
        },
        is_partial=True,
    ),
    "nemotron": Architecture(
        ("nemotron",),
        {**DENSE, **less_one({**NORMS, "output_norm": "model.norm"})},
        {**RMS, "attention.layer_norm_rms_epsilon": "", LAYER_NORM: "norm_eps"},
        is_partial=True,
    ),
}
