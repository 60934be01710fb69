"""An EAGLE-3 head as a module to train, and its checkpoint as SafeAILab/EAGLE publishes heads.

Row i pairs what is known of token i with token i + 1, and predicts token i + 2. At depth 0 that is
the target's hidden states, `fc` of them; at depth d, what row i - 1 has handed on at depth d - 1,
because the target has not run there when a step drafts. `EagleHead.unroll` computes all depths of
all rows at once, with the keys that each would see in a step: row i of depth d sees rows up to
i - d of depth 0, which know the target, then row i - d + 1 of depth 1 and so on up to itself
(training-time test, arXiv:2503.01840).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from specc.fit.drafters.draft_files import save_draft
from specc.fit.drafters.fitter import LayerShape
from specc.fit.target import Sizes


class TapProjection(nn.Linear):
    """The projection of hidden states, learned in coordinates in which they are alike.

    A few directions of a target's residual stream are a hundred times as large as those that tell
    one token from another; a step of Muon, which is as long in every direction, would all but pass
    the latter by. While a head learns, `weight` is what reads the hidden states times `basis`.

    Args:
        inputs: A · H.
        width: d.
    """

    basis: Tensor | None

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(inputs, width, bias=False)
        # of a checkpoint of training; that of a head has none
        self.register_buffer("basis", None)

    def forward(self, taps: Tensor) -> Tensor:
        """[…, A · H] → […, d]."""
        return F.linear(taps, self.folded())

    def folded(self) -> Tensor:
        """[d, A · H], what a checkpoint has."""
        if self.basis is None:
            return self.weight
        # the smallest directions have the largest factors
        with torch.autocast(self.weight.device.type, enabled=False):
            return self.weight @ self.basis

    @torch.no_grad()
    def change_basis(self, taps: Tensor, floor: float = 0.01) -> None:
        """Learn in coordinates whose second moments are 1 from now on; results stay the same.

        Args:
            taps: [n, A · H] float32, an example of what is read.
            floor: of the moments of a direction, each input scaled to 1: smaller ones are noise.
        """
        # moments span more than float32 tells apart
        weight, wide = self.folded().double(), taps.double()
        sizes = wide.square().mean(0).sqrt().clamp_min(1e-6)
        scaled = wide / sizes
        moments, directions = torch.linalg.eigh(scaled.T @ scaled / len(scaled))
        roots = moments.clamp_min(floor).sqrt()
        self.weight.copy_((weight * sizes) @ directions * roots)
        self.basis = (directions.T / roots[:, None] / sizes).float()

    @torch.no_grad()
    def fold(self) -> None:
        """Leave the weight as a checkpoint has it."""
        self.weight.copy_(self.folded())
        self.basis = None


class EagleHead(nn.Module):
    """A head; its parameters have the names that they have in the checkpoint.

    Args:
        config: of its one layer; `vocab_size` is the target's.
        target_width: H.
        num_taps: A, hidden states of the target that it reads.
        kept: [Vd] int64, the target's ids that it proposes, ascending.
        embedding: [V, H] of the target, where that is the head's, too, and stays as it is.
        writes_embedding: it goes into the files all the same: readers would multiply the rows of
            such a target with a number, as it does.
    """

    kept: Tensor
    embedding: Tensor | None

    def __init__(
        self,
        config: Any,
        target_width: int,
        num_taps: int,
        kept: Tensor,
        embedding: Tensor | None = None,
        writes_embedding: bool = False,
    ) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.target_width = config, target_width
        if embedding is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.register_buffer("embedding", embedding, persistent=False)
        self.writes_embedding = writes_embedding
        self.fc = TapProjection(num_taps * target_width, width)
        self.midlayer = _Layer(config)
        self.norm = LlamaRMSNorm(width, eps)
        self.lm_head = nn.Linear(width, len(kept), bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.register_buffer("kept", kept, persistent=False)

    def embed(self, tokens: Tensor) -> Tensor:
        """[…] int64 → […, d]."""
        if self.embedding is None:
            return self.embed_tokens(tokens)
        return F.embedding(tokens, self.embedding).float()

    def unroll(self, taps: Tensor, tokens: Tensor, depths: int, begin: int) -> list[Tensor]:
        """What every row knows at every depth: `lm_head` makes logits of it.

        Args:
            taps: [rows, T, A · H], the target's hidden states at tokens 0 … T - 1.
            tokens: [rows, T] int64, tokens 1 … T.
            depths: D.
            begin: first row to return; those before it are computed as far as others need them.
        Returns:
            D times [rows, T - begin, d], after the last norm. At depth d the first d rows of a text
            mean nothing: nothing was handed on to them.
        """
        embedded = self.embed(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        rotation = self.rotary(embedded, places)
        # float32, whatever products are computed in: depths add to it one after another
        x = self.fc(taps.to(embedded.dtype)).float()
        seen: list[tuple[Tensor, Tensor]] = []
        known = []
        start = 0
        for depth in range(depths):
            if depth:
                x = _shifted(x, 1, dim=1)
                # of deeper rows, each needs the one before it, one depth before
                first = max(0, begin - (depths - 1 - depth))
                x, embedded = x[:, first - start :], embedded[:, first - start :]
                rotation = tuple(part[:, first - start :] for part in rotation)
                start = first
            x = self.midlayer(embedded, x, rotation, seen)
            known.append(self.norm(x[:, begin - start :]))
        return known


class _Layer(nn.Module):
    """The layer that reads tokens and features side by side."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(width, eps)
        self.hidden_norm = LlamaRMSNorm(width, eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, embedded: Tensor, x: Tensor, rotation: Any, seen: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(x)], -1)
        x = x + self.self_attn(both, rotation, seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, size = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size, self.group = size, heads // kv_heads
        self.q_proj = nn.Linear(2 * width, heads * size, bias=False)
        self.k_proj = nn.Linear(2 * width, kv_heads * size, bias=False)
        self.v_proj = nn.Linear(2 * width, kv_heads * size, bias=False)
        self.o_proj = nn.Linear(heads * size, width, bias=False)

    def forward(self, x: Tensor, rotation: Any, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend, and add keys and values of this depth to those that deeper ones see."""
        heads = (*x.shape[:-1], -1, self.size)
        q, k, v = (
            project(x).view(heads).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *rotation)
        seen.append((repeat_kv(k, self.group), repeat_kv(v, self.group)))
        keys, values = seen[0]
        depth, length = len(seen) - 1, keys.shape[2]
        # these are the last rows of the text
        place = torch.arange(length, device=x.device)
        own = place[length - x.shape[1] :, None]
        scores = [(q @ keys.transpose(-1, -2)).float()]
        scores[0].masked_fill_(place > own - depth, float("-inf"))
        # of depth d, row i - (depth - d)
        later = [
            [_shifted(part, depth - d, dim=2)[:, :, -x.shape[1] :] for part in seen[d]]
            for d in range(1, depth + 1)
        ]
        scores += [(q * key).sum(-1, keepdim=True).float() for key, _ in later]
        shares = (torch.cat(scores, -1) * self.size**-0.5).softmax(-1).to(q.dtype)
        attended = shares[..., :length] @ values
        for column, (_, value) in enumerate(later, length):
            attended = attended + shares[..., column : column + 1] * value
        return self.o_proj(attended.transpose(1, 2).flatten(2))


def _shifted(x: Tensor, rows: int, dim: int) -> Tensor:
    """Row i becomes row i + rows; the first ones are 0."""
    if not rows:
        return x
    pads = [0, 0] * (x.ndim - 1 - dim) + [rows, 0]
    return F.pad(x.narrow(dim, 0, x.shape[dim] - rows), pads)


def build_head(
    sizes: Sizes, num_taps: int, shape: LayerShape, trained_length: int, kept: Tensor
) -> EagleHead:
    """A head for a target, with random layers; what knows tokens begins as the target's.

    Args:
        sizes: of the target.
        num_taps: A.
        shape: of its layer; where it is as wide as the target, its embedding is the target's, and
            else begins with the d directions in which the target's rows differ most.
        trained_length: positions of the texts that it is going to learn from.
        kept: see `EagleHead`.
    """
    config = LlamaConfig(**shape.fields(sizes, trained_length))
    is_narrow = shape.width != sizes.width
    embedding = None if is_narrow else sizes.embedding
    writes = embedding is not None and sizes.is_scaled
    head = EagleHead(config, sizes.width, num_taps, kept, embedding, writes)
    rows, output = sizes.embedding, sizes.output
    with torch.no_grad():
        if is_narrow:
            directions = _directions(rows.float(), shape.width)
            head.embed_tokens.weight.copy_(rows.float() @ directions)
            output = output[kept].float() @ directions
        else:
            output = output[kept]
        head.lm_head.weight.copy_(output)
    return head.to(rows.device)


def _directions(rows: Tensor, count: int) -> Tensor:
    """[H, count], the directions in which rows [V, H] differ most, the first one most."""
    return torch.linalg.eigh(rows.T @ rows).eigenvectors[:, -count:].flip(1)


def save_head(head: EagleHead, boundaries: Sequence[int], directory: Path) -> None:
    """Write config.json and model.safetensors, weights in bfloat16.

    Args:
        head: trained.
        boundaries: of the target that it reads, see `Target.read`; not 1 first, which readers take
            for lists that count otherwise.
        directory: is made where there is none.
    """
    kept = head.kept.cpu()
    count, vocab_size = len(kept), head.config.vocab_size
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": count,
        "eagle_aux_hidden_state_layer_ids": list(boundaries),
    }
    if head.embedding is None:
        # readers take it for a head with an embedding of its own
        config["target_hidden_size"] = head.target_width
    more = {}
    if head.writes_embedding:
        assert head.embedding is not None
        more["embed_tokens.weight"] = head.embedding.cpu().bfloat16()
    if count < vocab_size:
        is_kept = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, kept, True)
        more |= {"d2t": kept - torch.arange(count), "t2d": is_kept}
    save_draft(head, head.config, config, directory, more)
