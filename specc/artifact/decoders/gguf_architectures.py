"""Architectures of llama.cpp: which models of transformers they are, and names of tensors.

Source: https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py.
"""

from __future__ import annotations

import re

# general.architecture → model types of transformers whose names and norms are these
ARCHITECTURES = {"llama": ("llama", "mistral"), "qwen2": ("qwen2",), "qwen3": ("qwen3",)}
# whose converter takes rotary halves of queries and keys apart, pair by pair
PAIRED = ("llama",)
_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


def model_name(name: str) -> str:
    """What transformers calls a tensor of llama.cpp's name; others keep theirs."""
    found = _LAYER.fullmatch(name)
    if found is not None and found[2] in _NAMES:
        return f"model.layers.{found[1]}.{_NAMES[found[2]]}.{found[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name
