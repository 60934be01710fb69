"""A block drafter (DSpark) as a module to train, and its checkpoint as deepseek-ai/DeepSpec has it.

A block is the anchor, the newest token, and masks after it; row k predicts token k + 1 after the
anchor. Its rows see each other, and of the tokens before the anchor what each layer makes of their
hidden states in the target. What is added to the logits of row k follows from the token before the
one that it predicts, by a product of low rank (arXiv:2602.06036; deepspec/modeling/dspark).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from specc.fit.drafters.draft_files import save_draft
from specc.fit.drafters.fitter import LayerShape
from specc.fit.target import Sizes

Rotation = tuple[Tensor, Tensor]


class BlockDrafter(nn.Module):
    """A drafter; its parameters have the names that they have in the checkpoint.

    Args:
        config: of its layers.
        embedding: [V, d] of the target; stays as it is.
        output: [V, d] of the target's head, likewise.
        num_taps: A, hidden states of the target that it reads.
        block_size: B.
        mask_token_id: what stands for tokens that are not known.
        rank: r, of what is added to logits.
    """

    embedding: Tensor
    output: Tensor

    def __init__(
        self,
        config: Any,
        embedding: Tensor,
        output: Tensor,
        num_taps: int,
        block_size: int,
        mask_token_id: int,
        rank: int,
    ) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.num_taps = config, num_taps
        self.block_size, self.mask_token_id = block_size, mask_token_id
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("output", output, persistent=False)
        self.fc = nn.Linear(num_taps * width, width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(width, eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(width, eps)
        self.markov_head = _MarkovHead(config.vocab_size, rank)
        self.rotary = Qwen3RotaryEmbedding(config)

    def forward(self, taps: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
        """What rows of blocks know, after the last norm.

        Args:
            taps: [rows, T, A · d], the target's hidden states at all tokens of texts.
            tokens: [rows, T] int64.
            anchors: [rows, n] int64, places of the first tokens of blocks.
        Returns:
            [rows, n, B, d]; `join` makes of them what `scores` reads.
        """
        size, (rows, count) = self.block_size, anchors.shape
        ids = tokens.new_full((rows, count, size), self.mask_token_id)
        ids[..., 0] = tokens.gather(1, anchors)
        x = self.embedding[ids].float().flatten(1, 2)
        context = self.hidden_norm(self.fc(taps.to(x.dtype)))
        places = anchors[..., None] + torch.arange(size, device=anchors.device)
        length = torch.arange(taps.shape[1], device=anchors.device)
        # of the tokens before the anchor alone
        hidden = length >= anchors.repeat_interleave(size, 1)[..., None]
        before, own = self.rotary(x, length[None]), self.rotary(x, places.flatten(1))
        for layer in self.layers:
            x = layer(x, context, hidden[:, None], (before, own), size)
        return self.norm(x).view(rows, count, size, -1)

    def join(self, known: Tensor, previous: Tensor) -> Tensor:
        """[..., d + r]: rows, and what is known of the token before the one that each predicts.

        Args:
            known: [..., d].
            previous: [...] int64.
        """
        return torch.cat([known, self.markov_head.markov_w1(previous).to(known.dtype)], -1)

    def head(self) -> Tensor:
        """[V, d + r], which `join` is multiplied with."""
        return torch.cat([self.output.float(), self.markov_head.markov_w2.weight], -1)


class _MarkovHead(nn.Module):
    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        # nothing is added at first
        nn.init.zeros_(self.markov_w2.weight)


class _Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Qwen3RMSNorm(width, eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = Qwen3RMSNorm(width, eps)
        self.mlp = Qwen3MLP(config)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        hidden: Tensor,
        rotations: tuple[Rotation, Rotation],
        size: int,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, hidden, rotations, size)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, size, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size, self.group = size, heads // kv_heads
        self.q_proj = nn.Linear(width, heads * size, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * size, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * size, bias=False)
        self.o_proj = nn.Linear(heads * size, width, bias=False)
        self.q_norm = Qwen3RMSNorm(size, eps)
        self.k_norm = Qwen3RMSNorm(size, eps)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        hidden: Tensor,
        rotations: tuple[Rotation, Rotation],
        size: int,
    ) -> Tensor:
        """Of rows of blocks: [rows, n · B, d].

        Args:
            x: [rows, n · B, d], normalized.
            context: [rows, T, d].
            hidden: [rows, 1, n · B, T] bool, the tokens that a row does not see.
            rotations: of the context, and of blocks.
            size: B.
        """
        q = self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2)
        before = self._keys(context, rotations[0])
        own = self._keys(x, rotations[1])
        q, _ = apply_rotary_pos_emb(q, q, *rotations[1])
        length = context.shape[1]
        far = (q @ before[0].transpose(-1, -2)).float().masked_fill(hidden, float("-inf"))
        blocks = (*q.shape[:2], -1, size, self.size)
        keys, values = (part.reshape(blocks) for part in own)
        near = (q.reshape(blocks) @ keys.transpose(-1, -2)).float().flatten(2, 3)
        shares = (torch.cat([far, near], -1) * self.size**-0.5).softmax(-1).to(q.dtype)
        attended = shares[..., :length] @ before[1]
        inside = shares[..., length:].reshape(*blocks[:4], size) @ values
        attended = attended + inside.flatten(2, 3)
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.size)

    def _keys(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values, [rows, H, tokens, D] each."""
        k = self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2)
        v = self._heads(self.v_proj(x)).transpose(1, 2)
        k, _ = apply_rotary_pos_emb(k, k, *rotation)
        return repeat_kv(k, self.group), repeat_kv(v, self.group)


def build_drafter(
    sizes: Sizes,
    num_taps: int,
    num_layers: int,
    shape: LayerShape,
    trained_length: int,
    block_size: int,
    mask_token_id: int,
    rank: int,
) -> BlockDrafter:
    """A drafter for a target, as wide as it, with random layers.

    Args:
        sizes: of the target.
        num_taps: A.
        num_layers: of the drafter.
        shape: of its layers.
        trained_length: positions of the texts that it is going to learn from.
        block_size: B.
        mask_token_id: see `BlockDrafter`.
        rank: r.
    """
    fields = shape.fields(sizes, trained_length) | {"num_hidden_layers": num_layers}
    config = Qwen3Config(**fields)
    ends = sizes.embedding, sizes.output
    drafter = BlockDrafter(config, *ends, num_taps, block_size, mask_token_id, rank)
    return drafter.to(sizes.embedding.device)


def save_drafter(
    drafter: BlockDrafter, boundaries: Sequence[int], num_target_layers: int, directory: Path
) -> None:
    """Write config.json and model.safetensors, weights in bfloat16.

    Embedding and head are left out: they are the target's.

    Args:
        drafter: trained.
        boundaries: of the target that it reads, see `Target.read`.
        num_target_layers: n.
        directory: is made where there is none.
    """
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "layer_types": drafter.config.layer_types,
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_token_id,
        # of layers, after which hidden states are read
        "target_layer_ids": [boundary - 1 for boundary in boundaries],
        "num_target_layers": num_target_layers,
        "markov_head_type": "vanilla",
        "markov_rank": drafter.markov_head.markov_w1.embedding_dim,
        "enable_confidence_head": False,
    }
    save_draft(drafter, drafter.config, config, directory)
