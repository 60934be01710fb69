"""Block drafters as modules to train, and their checkpoints as they are published.

A block is the anchor, the newest token, and masks after it. Row k predicts token k + 1 after the
anchor or, where the anchor's row predicts nothing, token k. Its rows see each other, and of the
tokens before the anchor what each layer makes of their hidden states in the target (DFlash,
arXiv:2602.06036). What the token before the one that a row predicts changes is a score
(`block_scores.py`); files are those of z-lab/dflash, of deepseek-ai/DeepSpec for DSpark.
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

from specc.fit.drafters.block_scores import (
    LILICORR,
    MARGINAL,
    MARKOV,
    SELECTOR,
    BlockConv,
    MarkovHead,
    PairTransformer,
    Selector,
)
from specc.fit.drafters.draft_files import save_draft
from specc.fit.drafters.fitter import LayerShape
from specc.fit.target import Sizes

Rotation = tuple[Tensor, Tensor]
_CLASSES = {
    MARGINAL: "DFlashDraftModel",
    MARKOV: "Qwen3DSparkModel",
    SELECTOR: "DFlash2DraftModel",
    LILICORR: "LiLiCorrDraftModel",
}
# of DFlash 2's convolutions: rows, and channels that share a factor
_CONV_ROWS, _CONV_GROUP = 2, 16
# of LiLiCorr's transformer: columns, layers, heads, and columns of the middle of MLPs for each
_INNER, _LAYERS, _HEADS, _RATIO = 64, 2, 4, 2.0
# rows whose logits are in memory at once
_ROWS = 256


class BlockDrafter(nn.Module):
    """A drafter; its parameters have the names that they have in the checkpoint.

    Args:
        config: of its layers.
        embedding: [V, d] of the target; stays as it is.
        output: [V, d] of the target's head, likewise.
        num_taps: A, hidden states of the target that it reads.
        block_size: B.
        mask_token_id: what stands for tokens that are not known.
        rank: r, of the score's products.
        score: of `SCORES`.
        from_anchor: the anchor's row predicts the token after it.
        candidates: K, of scores of the best tokens of a row.
        is_causal: a row sees the block up to itself (JetSpec); else all of it.
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
        score: str = MARKOV,
        from_anchor: bool = True,
        candidates: int = 0,
        is_causal: bool = False,
    ) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.num_taps, self.is_causal = config, num_taps, is_causal
        self.score, self.from_anchor = score, from_anchor
        self.candidates = candidates if score in (SELECTOR, LILICORR) else 0
        self.block_size, self.mask_token_id = block_size, mask_token_id
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("output", output, persistent=False)
        self.fc = nn.Linear(num_taps * width, width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(width, eps)
        self.layers = nn.ModuleList(
            _Layer(config, score == SELECTOR, is_causal) for _ in range(config.num_hidden_layers)
        )
        self.norm = Qwen3RMSNorm(width, eps)
        if score == MARKOV:
            self.markov_head = MarkovHead(config.vocab_size, rank)
        elif score == SELECTOR:
            self.candidate_selector = Selector(config.vocab_size, width, rank)
        elif score == LILICORR:
            sizes = self.num_proposed, candidates, _LAYERS, _HEADS, _RATIO
            self.lilicorr = PairTransformer(width, _INNER, *sizes, rank, eps)
        self.rotary = Qwen3RotaryEmbedding(config)

    @property
    def num_proposed(self) -> int:
        """P, tokens that a block predicts."""
        return self.block_size - (not self.from_anchor)

    def context(self, taps: Tensor) -> Tensor:
        """[..., d] that layers read of the target's hidden states [..., A · d]."""
        context: Tensor = self.hidden_norm(self.fc(taps.to(self.fc.weight.dtype)))
        return context

    def forward(self, taps: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
        """What rows of blocks that predict know, after the last norm.

        Args:
            taps: [rows, T, A · d], the target's hidden states at all tokens of texts.
            tokens: [rows, T] int64.
            anchors: [rows, n] int64, places of the first tokens of blocks.
        Returns:
            [rows, n, P, d].
        """
        size, (rows, count) = self.block_size, anchors.shape
        ids = tokens.new_full((rows, count, size), self.mask_token_id)
        ids[..., 0] = tokens.gather(1, anchors)
        x = self.embedding[ids].float().flatten(1, 2)
        context = self.context(taps)
        places = anchors[..., None] + torch.arange(size, device=anchors.device)
        length = torch.arange(taps.shape[1], device=anchors.device)
        # of the tokens before the anchor alone
        hidden = length >= anchors.repeat_interleave(size, 1)[..., None]
        before, own = self.rotary(x, length[None]), self.rotary(x, places.flatten(1))
        for layer in self.layers:
            x = layer(x, context, hidden[:, None], (before, own), size)
        hidden_states: Tensor = self.norm(x).view(rows, count, size, -1)
        return hidden_states[:, :, size - self.num_proposed :]

    def join(self, known: Tensor, previous: Tensor) -> Tensor:
        """[..., d + r]: rows, and what is known of the token before the one that each predicts.

        Without a score of all tokens, rows alone.

        Args:
            known: [..., d].
            previous: [...] int64.
        """
        if self.score != MARKOV:
            return known
        return torch.cat([known, self.markov_head.markov_w1(previous).to(known.dtype)], -1)

    def head(self) -> Tensor:
        """[V, d + r], which `join` is multiplied with."""
        if self.score != MARKOV:
            return self.output.float()
        return torch.cat([self.output.float(), self.markov_head.markov_w2.weight], -1)

    @torch.no_grad()
    def best(self, known: Tensor, is_exact: bool = False) -> tuple[Tensor, Tensor]:
        """Candidates [..., K] of rows [..., d], the best first, and the log-sum-exp of all logits,
        [..., 1].

        Args:
            is_exact: products in float32, not in bfloat16.
        """
        dtype = torch.float32 if is_exact else torch.bfloat16
        matrix, chosen, sums = self.output.to(dtype), [], []
        for part in known.flatten(0, -2).split(_ROWS):
            logits = (part.to(dtype) @ matrix.T).float()
            chosen.append(logits.topk(self.candidates, -1).indices)
            sums.append(logits.logsumexp(-1, keepdim=True))
        shape = known.shape[:-1]
        return torch.cat(chosen).view(*shape, -1), torch.cat(sums).view(*shape, 1)

    def among(
        self, known: Tensor, previous: Tensor, chosen: Tensor, sums: Tensor, context: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits [n, P, K] of candidates after the tokens before, and where there are any.

        Args:
            known: [n, P, d] of blocks.
            previous: [n, P] int64, the token before the one that each row predicts.
            chosen: [n, P, K] int64.
            sums: [n, P, 1], see `best`.
            context: [n, d] of the last token before each anchor.
        Returns:
            logits, and [n, P] bool: LiLiCorr has none after a token that is no candidate of its
            row, nor in the rows after it.
        """
        base = (known[..., None, :] * self.output[chosen]).sum(-1)
        if self.score == SELECTOR:
            logits: Tensor = self.candidate_selector(base, known, previous, chosen)
            return logits, torch.ones_like(previous, dtype=torch.bool)
        tokens = self.embedding[chosen].float()
        first, pairs = self.lilicorr(tokens, base - sums, known, context)
        is_parent = chosen[:, :-1] == previous[:, 1:, None]
        later = (pairs * is_parent[..., None]).sum(2)
        there = torch.cat([torch.ones_like(is_parent[:, :1, 0]), is_parent.any(-1)], 1)
        return torch.cat([first[:, None], later], 1), there.cumprod(1).bool()


class _Layer(nn.Module):
    def __init__(self, config: Any, has_conv: bool, is_causal: bool) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Qwen3RMSNorm(width, eps)
        self.self_attn = _Attention(config, is_causal)
        self.post_attention_layernorm = Qwen3RMSNorm(width, eps)
        self.mlp = Qwen3MLP(config)
        self.has_conv = has_conv
        if has_conv:
            group = next(n for n in range(_CONV_GROUP, 0, -1) if width % n == 0)
            self.attention_conv = BlockConv(width, _CONV_ROWS, group)
            self.mlp_conv = BlockConv(width, _CONV_ROWS, group)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        hidden: Tensor,
        rotations: tuple[Rotation, Rotation],
        size: int,
    ) -> Tensor:
        normed = self.input_layernorm(x)
        if not self.has_conv:
            x = x + self.self_attn(normed, context, hidden, rotations, size)
            return x + self.mlp(self.post_attention_layernorm(x))
        # one kernel goes around a part: it is made of what the part reads
        conv, factors = self.attention_conv, self.attention_conv.factors(normed)
        normed = conv(normed, factors, size, 0)
        x = x + conv(self.self_attn(normed, context, hidden, rotations, size), factors, size, 1)
        normed = self.post_attention_layernorm(x)
        conv, factors = self.mlp_conv, self.mlp_conv.factors(normed)
        return x + conv(self.mlp(conv(normed, factors, size, 0)), factors, size, 1)


class _Attention(nn.Module):
    def __init__(self, config: Any, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
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
        near = (q.reshape(blocks) @ keys.transpose(-1, -2)).float()
        if self.is_causal:
            later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
            near = near.masked_fill(later, float("-inf"))
        shares = (
            (torch.cat([far, near.flatten(2, 3)], -1) * self.size**-0.5).softmax(-1).to(q.dtype)
        )
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
    **others: Any,
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
        others: further arguments of `BlockDrafter`.
    """
    fields = shape.fields(sizes, trained_length) | {"num_hidden_layers": num_layers}
    config = Qwen3Config(**fields)
    ends = sizes.embedding, sizes.output
    drafter = BlockDrafter(config, *ends, num_taps, block_size, mask_token_id, rank, **others)
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
    keys = {
        "mask_token_id": drafter.mask_token_id,
        # of layers, after which hidden states are read
        "target_layer_ids": [boundary - 1 for boundary in boundaries],
    }
    config: dict[str, Any] = {
        "architectures": [_CLASSES[drafter.score]],
        "model_type": "qwen3",
        "layer_types": drafter.config.layer_types,
        "block_size": drafter.block_size,
        "num_target_layers": num_target_layers,
    }
    if drafter.score == MARKOV:
        config |= {
            **keys,
            "markov_head_type": "vanilla",
            "markov_rank": drafter.markov_head.markov_w1.embedding_dim,
            "enable_confidence_head": False,
        }
        # what is not as readers take it for granted
        config |= {} if drafter.from_anchor else {"sample_from_anchor": False}
    else:
        config["dflash_config"] = keys | _keys(drafter)
        # as z-lab's files of DFlash 2 say, and other readers may need
        config |= {"is_causal": False} if drafter.score == SELECTOR else {}
        config["dflash_config"] |= {"causal_head": True} if drafter.is_causal else {}
    save_draft(drafter, drafter.config, config, directory)


def _keys(drafter: BlockDrafter) -> dict[str, Any]:
    """Of `dflash_config`, beside those of DFlash 1."""
    if drafter.score == SELECTOR:
        conv: Any = drafter.layers[0].attention_conv
        return {
            "conv_kernel_size": conv.taps,
            "conv_group_size": conv.group,
            "selector_rank": drafter.candidate_selector.hidden_projection.out_features,
            "selector_top_k": drafter.candidates,
        }
    return drafter.lilicorr.keys() if drafter.score == LILICORR else {}
