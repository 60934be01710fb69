"""A small hybrid target: gated delta net and full attention, 3 : 1, in transformers' Qwen3.5 form.

It is as wide as the pair's target, which lends it its embedding and the MLPs of every other layer.
"""

from __future__ import annotations

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3ForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

# between which a token's share of time is drawn at first, evenly in their logarithms
_LEAST_TIME, _MOST_TIME = 1e-3, 0.1
_LEAST_DECAY, _MOST_DECAY = 1.0, 16.0


def hybrid_config(teacher: Qwen3ForCausalLM, num_layers: int) -> Qwen3_5TextConfig:
    """Sizes of a hybrid that are not the teacher's: half of its layers, state of small heads."""
    own = teacher.config
    return Qwen3_5TextConfig(
        vocab_size=own.vocab_size,
        hidden_size=own.hidden_size,
        intermediate_size=own.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=own.num_attention_heads,
        num_key_value_heads=own.num_key_value_heads,
        head_dim=own.head_dim,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=own.num_attention_heads,
        linear_num_value_heads=2 * own.num_attention_heads,
        linear_key_head_dim=own.head_dim // 2,
        linear_value_head_dim=own.head_dim // 2,
        max_position_embeddings=own.max_position_embeddings,
        rms_norm_eps=own.rms_norm_eps,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": own.rope_parameters["rope_theta"],
            "partial_rotary_factor": 0.25,
            # a quarter of a head in pairs, shared out as Qwen3.5 does
            "mrope_section": _sections(own.head_dim // 8),
            "mrope_interleaved": True,
        },
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
    )


def _sections(pairs: int) -> list[int]:
    """Of time, height and width: of text, which has but one position, any will do."""
    third = pairs // 3
    return [pairs - 2 * third, third, third]


@torch.no_grad()
def build_hybrid(teacher: Qwen3ForCausalLM, num_layers: int = 4) -> Qwen3_5ForCausalLM:
    """A hybrid to train, in float32.

    Args:
        teacher: lends what it has in common: embedding, last norm, and of layer 2 i + 1 the MLP of
            layer i; norms of Qwen3.5 count from 1.
        num_layers: half of the teacher's, or fewer.
    """
    hybrid = Qwen3_5ForCausalLM(hybrid_config(teacher, num_layers))
    hybrid.generation_config.do_sample = False
    source = teacher.model
    hybrid.model.embed_tokens.weight.copy_(source.embed_tokens.weight)
    hybrid.model.norm.weight.copy_(source.norm.weight - 1)
    for own, first, second in zip(
        hybrid.model.layers, source.layers[::2], source.layers[1::2], strict=False
    ):
        own.mlp.load_state_dict(second.mlp.state_dict())
        own.input_layernorm.weight.copy_(first.input_layernorm.weight - 1)
        own.post_attention_layernorm.weight.copy_(second.post_attention_layernorm.weight - 1)
    for module in hybrid.modules():
        if isinstance(module, Qwen3_5GatedDeltaNet):
            _draw_decays(module)
    return hybrid


def _draw_decays(layer: Qwen3_5GatedDeltaNet) -> None:
    """As of Mamba-2 (arXiv:2405.21060): heads forget within a token or within a thousand.

    The library's own initialization leaves a head's state a few tokens.
    """
    times = torch.empty(layer.num_v_heads).uniform_(0, 1)
    times = _LEAST_TIME * (_MOST_TIME / _LEAST_TIME) ** times
    # inverse of softplus
    layer.dt_bias.copy_(times + torch.log(-torch.expm1(-times)))
    layer.A_log.copy_(torch.empty_like(times).uniform_(_LEAST_DECAY, _MOST_DECAY).log())
