"""What block drafters make of the tokens drafted before, as modules to train.

Modules and parameters have the names that they have in published files. A score gives the logits of
tokens of a row after the token before: `MarkovHead` (DSpark, arXiv:2602.06036) of all tokens,
`Selector` (DFlash 2, z-lab/dflash) and `PairTransformer` (LiLiCorr, arXiv:2608.20530) of the K best
ones of the row. `BlockConv` is DFlash 2's convolution along the rows of a block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

# no score: the logits of a row are what they are after any tokens
MARGINAL = "marginal"
MARKOV, SELECTOR, LILICORR = CONDITIONAL = ("markov", "selector", "lilicorr")
SCORES = (MARGINAL, *CONDITIONAL)


class MarkovHead(nn.Module):
    """Adds a product of rank r to all logits."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        # nothing is added at first
        nn.init.zeros_(self.markov_w2.weight)


class Selector(nn.Module):
    """Adds a product of rank r to the logits of candidates, by the token before and the row."""

    def __init__(self, vocab_size: int, width: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, rank) * 0.3)
        # nothing is added at first
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def forward(self, base: Tensor, known: Tensor, previous: Tensor, chosen: Tensor) -> Tensor:
        """[..., K] logits.

        Args:
            base: [..., K] of the row alone.
            known: [..., d] of the row.
            previous: [...] int64 tokens before.
            chosen: [..., K] int64 candidates.
        """
        factors = self.predecessor_codebook[previous] * self.hidden_projection(known)
        return base + (factors[..., None, :] * self.successor_codebook[chosen]).sum(-1)


class BlockConv(nn.Module):
    """Convolutions before and after a part of a layer; nothing but the row itself at first.

    Args:
        width: d.
        taps: T, rows that are added up: a row's own, and those before it.
        group: channels that share a factor.
    """

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.group = taps, group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * width // group, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0

    def factors(self, x: Tensor) -> Tensor:
        """[..., 2, T, groups] that rows [..., d] add to the kernels."""
        factors: Tensor = self.kernel_projection(x)
        return factors.view(*x.shape[:-1], 2, self.taps, x.shape[-1] // self.group)

    def forward(self, x: Tensor, factors: Tensor, size: int, side: int) -> Tensor:
        """Convolve rows of blocks, none of which reads rows of another block.

        Args:
            x: [rows, n · B, d].
            factors: see there.
            size: B.
            side: 0 before the part, 1 after it.
        """
        blocks = x.unflatten(1, (-1, size))
        factors = factors[..., side, :, :].unflatten(1, (-1, size))
        total = torch.zeros_like(blocks)
        for tap in range(min(self.taps, size)):
            before = F.pad(blocks, (0, 0, tap, 0))[:, :, :size]
            weight = factors[..., tap, :].repeat_interleave(self.group, -1)
            total = total + (self.base_kernel[side, tap].to(x.dtype) + weight) * before
        return total.flatten(1, 2)


class PairTransformer(nn.Module):
    """Scores pairs of candidates of neighboring rows, and candidates of the first row.

    Args:
        width: d.
        inner: w, columns of nodes.
        slots: S, rows that propose.
        count: K.
        num_layers: of it.
        num_heads: of its attention.
        ratio: columns of the middle of MLPs for each of w.
        factors: f, columns of what scores are products of.
        norm_eps: of norms.
    """

    vector_eps, scale = 1e-6, 10.0

    def __init__(
        self,
        width: int,
        inner: int,
        slots: int,
        count: int,
        num_layers: int,
        num_heads: int,
        ratio: float,
        factors: int,
        norm_eps: float,
    ) -> None:
        super().__init__()
        self.slots, self.count, self.ratio, self.num_heads = slots, count, ratio, num_heads
        self.inner = inner
        self.token_proj = nn.Linear(width, inner) if inner != width else None
        self.pass_hidden_proj = nn.Linear(width, inner)
        self.feature_norm, self.feature_mlp = nn.LayerNorm(5), _Mlp(5, inner, inner)
        self.slot_embedding = nn.Parameter(0.02 * torch.randn(1, 1, slots, 1, inner))
        self.rank_embedding = nn.Parameter(0.02 * torch.randn(1, 1, 1, count, inner))
        self.relative_slot_bias = nn.Parameter(torch.zeros(num_heads, 2 * slots + 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(num_heads))
        self.context_proj = nn.Linear(width, inner)
        self.layers = nn.ModuleList(
            _PairLayer(inner, num_heads, ratio, norm_eps) for _ in range(num_layers)
        )
        self.output_norm = Qwen3RMSNorm(inner, norm_eps)
        self.anchor_norm = Qwen3RMSNorm(inner, norm_eps)
        self.factor_input_proj = nn.Linear(3 * inner, inner)
        self.out_head, self.in_head = nn.Linear(inner, factors), nn.Linear(inner, factors)
        self.anchor_out_head = nn.Linear(inner, factors)

    def forward(
        self, tokens: Tensor, odds: Tensor, known: Tensor, context: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores [n, K] of the first slot, and [n, S - 1, K, K] after candidates of the one before.

        Args:
            tokens: [n, S, K, d] embeddings of candidates, the best one first.
            odds: [n, S, K] their log probabilities among all tokens.
            known: [n, S, d] of rows.
            context: [n, d] of the last token before each anchor.
        """
        device = odds.device
        rank = torch.arange(self.count, device=device) / max(self.count - 1, 1)
        ranks = [rank.expand_as(odds), (rank == 0).float().expand_as(odds)]
        features = torch.stack([odds, odds.exp(), odds - odds.amax(-1, keepdim=True), *ranks], -1)
        x = tokens if self.token_proj is None else self.token_proj(tokens)
        x = x + self.pass_hidden_proj(known)[:, :, None]
        x = x + self.feature_mlp(self.feature_norm(features))
        x = (x + self.slot_embedding[:, 0] + self.rank_embedding[:, 0]).flatten(1, 2)
        slot = torch.arange(self.slots, device=device).repeat_interleave(self.count)
        apart = slot[:, None] - slot
        bias = self.relative_slot_bias[:, apart + self.slots]
        bias = bias + self.same_slot_bias[:, None, None] * (apart == 0)
        for layer in self.layers:
            x = layer(x, bias)
        x = self.output_norm(x)
        anchor = self.anchor_norm(self.context_proj(context))
        wide = anchor[:, None].expand_as(x)
        z = F.silu(self.factor_input_proj(torch.cat([x, wide, x * wide], -1)))
        left, right = (
            self._unit(head(z)).unflatten(1, (self.slots, self.count))
            for head in (self.out_head, self.in_head)
        )
        start = self._unit(self.anchor_out_head(anchor))
        first = (start[:, None] * right[:, 0]).sum(-1)
        pairs = left[:, :-1] @ right[:, 1:].transpose(-1, -2)
        return self.scale * first, self.scale * pairs

    def keys(self) -> dict[str, Any]:
        """What `dflash_config` says of it."""
        return {
            "projector_type": "lilicorr",
            "lilicorr_enabled": True,
            "lilicorr_candidate_topk": self.count,
            "lilicorr_hidden_size": self.inner,
            "lilicorr_num_layers": len(self.layers),
            "lilicorr_num_heads": self.num_heads,
            "lilicorr_mlp_ratio": self.ratio,
            "lilicorr_factor_dim": self.out_head.out_features,
            "lilicorr_vector_eps": self.vector_eps,
            "lilicorr_logit_scale": self.scale,
        }

    def _unit(self, x: Tensor) -> Tensor:
        return F.normalize(x.float(), dim=-1, eps=self.vector_eps)


class _Mlp(nn.Module):
    def __init__(self, columns: int, middle: int, width: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(columns, middle), nn.Linear(middle, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.up_proj(x)))
        return output


class _PairLayer(nn.Module):
    def __init__(self, width: int, num_heads: int, ratio: float, eps: float) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = Qwen3RMSNorm(width, eps), Qwen3RMSNorm(width, eps)
        self.attn = nn.MultiheadAttention(width, num_heads, batch_first=True)
        self.mlp = _Mlp(width, int(width * ratio), width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        num_heads, width = self.attn.num_heads, x.shape[-1]
        parts = F.linear(self.attn_norm(x), self.attn.in_proj_weight, self.attn.in_proj_bias)
        parts = parts.view(*x.shape[:-1], 3, num_heads, width // num_heads)
        q, k, v = (parts[:, :, i].transpose(1, 2) for i in range(3))
        # torch's own function is slower where the bias learns
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5 + bias
        attended = scores.softmax(-1).to(v.dtype) @ v
        x = x + self.attn.out_proj(attended.transpose(1, 2).flatten(2))
        output: Tensor = x + self.mlp(self.mlp_norm(x))
        return output
