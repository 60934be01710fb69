"""EAGLE-3 and 3.1 heads as one module, for passes over flat tokens.

A row pairs what is known of token i with token i + 1: the target's hidden states at i where the
target has run there, else what the row before it has handed on. It predicts token i + 2.
Sources: SafeAILab/EAGLE eagle/model/cnets.py; vllm-project/speculators models/eagle3/core.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specc.passes.drafters.head_modules import (
    MLP,
    Attention,
    Layer,
    RMSNorm,
    by_target_ids,
    columns_of_ids,
    fill_buffers,
    linear_of,
)
from specc.passes.drafters.head_spec import EagleSpec


class FeatureHead(nn.Module):
    """An EAGLE-3 or 3.1 head; parameters are named as those of speculators."""

    columns: Tensor | None

    def __init__(self, spec: EagleSpec) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        config = spec.config
        width, eps = spec.width, config.rms_norm_eps
        self.config = config
        self.spec = spec
        self.embed_tokens = nn.Embedding(spec.target.vocab_size, width)
        self.fc = linear_of(spec, "fc", spec.feature_columns, width)
        self.input_norm = RMSNorm(spec.feature_columns, eps) if spec.flags.norm_before_fc else None
        self.fc_norm: nn.ModuleList | None = None
        if spec.flags.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(spec.target.width, eps) for _ in spec.boundaries)
        self.layers = nn.ModuleList(
            (Layer if i else _FirstLayer)(spec, i) for i in range(len(spec.windows))
        )
        self.norm = RMSNorm(width, eps)
        self.lm_head = nn.Linear(width, spec.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.register_buffer("columns", columns_of_ids(spec), persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        features: Tensor,
        own_features: Tensor,
        is_tapped: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Predict the token after each row's.

        Args:
            input_ids: [1, Nt] int64, token i + 1 of the row of token i.
            position_ids: [1, Nt] int64, i; all rows of a sequence count from the same token on.
            features: [1, Nt, A · H], the target's hidden states at token i, side by side in the
                order of `HeadSpec.boundaries`.
            own_features: [1, Nt, d], what the row of token i - 1 has handed on.
            is_tapped: [1, Nt, 1] bool, whether the row reads `features`, else `own_features`.
        Returns:
            what each row hands on [1, Nt, d], and logits [1, Nt, V] by the target's ids: -inf of
            those that the head has no row for.
        """
        x = torch.where(is_tapped, self.fc(self._normed(features)), own_features)
        x = self.through_layers(x, input_ids, position_ids)
        normed = self.norm(x)
        logits = self.lm_head(normed)
        logits = by_target_ids(logits, self.columns)
        return (normed if self.spec.flags.norm_output else x), logits

    def through_layers(self, x: Tensor, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Rows [1, Nt, d] after the last layer, of what they know of the token before."""
        embedded = self.embed_tokens(input_ids)
        rotation = self.rotary_emb(embedded, position_ids)
        x = self.layers[0](embedded, x, position_ids, rotation)
        for layer in self.layers[1:]:
            x = layer(x, position_ids, rotation)
        return x

    def _normed(self, features: Tensor) -> Tensor:
        if self.input_norm is not None:
            return self.input_norm(features)
        if self.fc_norm is not None:
            taps = features.split(self.spec.target.width, dim=-1)
            normed = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
            return torch.cat(normed, dim=-1)
        return features

    def _init_weights(self, module: Any) -> None:
        """Fill the buffers of what was made on the meta device."""
        fill_buffers(self, module)


class _FirstLayer(nn.Module):
    """The layer that reads tokens and features, side by side, each with a norm of its own."""

    def __init__(self, spec: EagleSpec, index: int) -> None:
        super().__init__()
        width, eps = spec.width, spec.config.rms_norm_eps
        self.is_residual_normed = spec.flags.norm_before_residual
        self.input_layernorm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.self_attn = Attention(spec, index, 2 * width)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(spec, index)

    def forward(self, embedded: Tensor, x: Tensor, positions: Tensor, rotation: Any) -> Tensor:
        normed = self.hidden_norm(x)
        both = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        x = (normed if self.is_residual_normed else x) + self.self_attn(both, positions, rotation)
        return x + self.mlp(self.post_attention_layernorm(x))
