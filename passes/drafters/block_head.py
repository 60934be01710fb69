"""DFlash drafters as one module, for passes over flat tokens of two kinds.

A row of the context is a token whose hidden states in the target are known: it has a key and a
value in every layer, made of those, and nothing reads what else is computed of it. A row of a block
is the anchor, or a mask: its embedding goes through the layers. Which rows see which is what a
pass's `ancestors` say, and where layers differ `passes/drafters/see_blocks.py`; what is traced here
is causal, as of every model. Of DFlash 2, attention and MLP of each layer read a convolution of
their rows and those before them in the block, and what they return goes through another one; rows
of the context keep keys and values as of DFlash 1.
Source: z-lab/dflash dflash/model.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from specc.drafters.block import CONFIDENCE_TENSORS, OF_TOKEN, bias_tensors, joint_shapes
from specc.kernels import ops
from specc.passes.drafters.block_parts import Conv
from specc.passes.drafters.block_spec import BlockSpec
from specc.passes.drafters.head_modules import (
    MLP,
    RMSNorm,
    attend,
    by_target_ids,
    columns_of_ids,
    fill_buffers,
    linear_of,
)
from specc.passes.program import Weight


class BlockHead(nn.Module):
    """A DFlash drafter; parameters are named as in its files."""

    columns: Tensor | None

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        config = spec.config
        width, eps = spec.width, config.rms_norm_eps
        self.config = config
        self.spec = spec
        self.embed_tokens = nn.Embedding(spec.target.vocab_size, width)
        self.fc = nn.Linear(spec.feature_columns, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps)
        self.layers = nn.ModuleList(_Layer(spec, i) for i in range(len(spec.windows)))
        self.norm = RMSNorm(width, eps)
        self.lm_head = nn.Linear(width, spec.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.register_buffer("columns", columns_of_ids(spec), persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        features: Tensor,
        is_tapped: Tensor,
        places: Tensor | None = None,
    ) -> Tensor:
        """Logits of the rows of a block.

        Args:
            input_ids: [1, Nt] int64, the anchor and masks; of rows of the context any ids.
            position_ids: [1, Nt] int64.
            features: [1, Nt, A · H], the target's hidden states of rows of the context, side by
                side in the order of `HeadSpec.boundaries`.
            is_tapped: [1, Nt, 1] bool, whether a row is one of the context.
            places: [1, Nt, 1] int32, of a drafter with convolutions: see `block_conv`.
        Returns:
            [1, Nt, V] by the target's ids: -inf of those that the head has no row for. Of rows of
            the context they mean nothing; what they are projected from is what becomes of these,
            where steps read that.
        """
        context = self.hidden_norm(self.fc(features))
        x = self.embed_tokens(input_ids)
        rotation = self.rotary_emb(x, position_ids)
        for layer in self.layers:
            x = layer(x, context, is_tapped, position_ids, rotation, places)
        x = self.norm(x)
        if self.spec.block.reads_context:
            x = torch.where(is_tapped, context, x)
        logits, scale = self.lm_head(x), self.spec.scale
        if scale.factor != 1:
            logits = logits * scale.factor
        if scale.cap:
            logits = torch.tanh(logits / scale.cap) * scale.cap
        return by_target_ids(logits, self.columns)

    def _init_weights(self, module: Any) -> None:
        """Fill the buffers of what was made on the meta device."""
        fill_buffers(self, module)


def step_weights(
    spec: BlockSpec, dtype: torch.dtype
) -> tuple[dict[str, Weight], dict[str, Tensor]]:
    """What steps read of a drafter besides its logits: weights and tables by key."""
    block, rank = spec.block, spec.rank
    if not block.is_biased:
        return {}, {}
    own = bias_tensors(block.bias_kind)
    shapes: dict[str, tuple[int, ...]] = {
        own["bias_in"]: (spec.target.vocab_size, rank),
        own["bias_out"]: (spec.draft_vocab_size, rank),
    }
    shapes |= joint_shapes(block.bias_kind, rank, spec.width)
    if block.confidence:
        weight, offset = CONFIDENCE_TENSORS.values()
        read = spec.width + (rank if block.confidence == OF_TOKEN else 0)
        shapes |= {weight: (1, read), offset: (1,)}
    columns = columns_of_ids(spec)
    tables = {} if columns is None else {own["bias_columns"]: columns}
    return {key: Weight((key,), dtype, shape) for key, shape in shapes.items()}, tables


class _Layer(nn.Module):
    def __init__(self, spec: BlockSpec, index: int) -> None:
        super().__init__()
        width, eps = spec.width, spec.config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = _Attention(spec, index)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(spec, index)
        self.attention_conv = None if spec.conv is None else _BlockConv(spec.conv, width)
        self.mlp_conv = None if spec.conv is None else _BlockConv(spec.conv, width)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        is_tapped: Tensor,
        positions: Tensor,
        rotation: Any,
        places: Tensor | None,
    ) -> Tensor:
        def attend(read: Tensor) -> Tensor:
            # hidden states of the target have had their norm
            kept = torch.where(is_tapped, context, read)
            return self.self_attn(read, kept, positions, rotation)

        x = x + _between(self.attention_conv, self.input_layernorm(x), places, attend)
        return x + _between(self.mlp_conv, self.post_attention_layernorm(x), places, self.mlp)


class _BlockConv(nn.Module):
    """Convolutions before and after a part of a layer, both by factors of what the first reads."""

    def __init__(self, conv: Conv, width: int) -> None:
        super().__init__()
        self.taps, self.size = conv.taps, conv.size
        self.base_kernel = nn.Parameter(torch.empty(2, conv.taps, width))
        columns = 2 * conv.taps * width // conv.size
        self.kernel_projection = nn.Linear(width, columns, bias=False)

    def factors(self, x: Tensor) -> Tensor:
        """[Nt, 2, T, d / size] of rows [1, Nt, d]."""
        groups = x.shape[-1] // self.size
        return self.kernel_projection(x).view(-1, 2, self.taps, groups)

    def forward(self, x: Tensor, factors: Tensor, places: Tensor, side: int) -> Tensor:
        """[1, Nt, d] of rows [1, Nt, d].

        Args:
            factors: see there.
            places: [1, Nt, 1] int32, see `block_conv`.
            side: 0 before the part, 1 after it.
        """
        given = (x.squeeze(0), self.base_kernel[side], factors[:, side], places.squeeze(0))
        return ops.block_conv(*given).unsqueeze(0)


def _between(
    conv: _BlockConv | None, x: Tensor, places: Tensor | None, part: Callable[[Tensor], Tensor]
) -> Tensor:
    """A part of a layer between its two convolutions, or without any."""
    if conv is None:
        return part(x)
    assert places is not None
    factors = conv.factors(x)
    return conv(part(conv(x, factors, places, 0)), factors, places, 1)


class _Attention(nn.Module):
    """Queries of what layers make of a row, keys and values of what is kept of it."""

    def __init__(self, spec: BlockSpec, index: int) -> None:
        super().__init__()
        config, name = spec.config, f"layers.{index}.self_attn"
        self.head_dim, self.window = int(config.head_dim), spec.window_of(index)
        self.group = config.num_attention_heads // config.num_key_value_heads
        size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.q_proj = linear_of(spec, f"{name}.q_proj", spec.width, size)
        self.k_proj = linear_of(spec, f"{name}.k_proj", spec.width, kv_size)
        self.v_proj = linear_of(spec, f"{name}.v_proj", spec.width, kv_size)
        self.o_proj = linear_of(spec, f"{name}.o_proj", size, spec.width)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, kept: Tensor, positions: Tensor, rotation: Any) -> Tensor:
        heads = (*x.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)
        k = self.k_norm(self.k_proj(kept).view(heads)).transpose(1, 2)
        v = self.v_proj(kept).view(heads).transpose(1, 2)
        return self.o_proj(attend(q, k, v, rotation, positions, self.group, self.window))
