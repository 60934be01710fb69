"""EAGLE-3 and 3.1 by their formulas: dense, without caches, from a checkpoint's own tensors.

Written from descriptions of the published heads, and of nothing in specc. Row i pairs g_i with
token i + 1, at position i: g_i is fc(taps of token i) as far as the target has run, then what row
i - 1 has handed on.

    x_i = [norm_e(E(t_{i+1})), norm_h(g_i)]
    y = r + attention(x), r = g_i or norm_h(g_i);  y = y + mlp(norm_p(y));  logits = W norm(y)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.heads import HEADS, KV_HEADS, LAYERS, Case


class Reference:
    """A head.

    Args:
        embedding: of the target, [V, H].
    """

    def __init__(self, case: Case, tensors: dict[str, Tensor], embedding: Tensor) -> None:
        self.case = case
        names = {key.replace("midlayer.", "layers.0."): value for key, value in tensors.items()}
        self.w = {"embed_tokens.weight": embedding, **names}
        scaling = case.layer.get("rope_scaling", {})
        parameters = case.layer.get("rope_parameters", {"rope_theta": 1000.0})
        theta = case.layer.get("rope_theta", parameters["rope_theta"])
        half = torch.arange(0, case.head_dim, 2) / case.head_dim
        self.frequencies = theta**-half / scaling.get("factor", 1.0)
        # keys and values of the rows of the last run, [n, HK, D] each, by layer
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def logits(self, taps: Tensor, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        """[V] logits after the last token of a path of drafted tokens.

        Args:
            taps: [n, A · H] hidden states of the target for tokens 0 … n - 1.
            tokens: n + 1 of them; the target has not run over the last one.
        """
        g = self.project(taps)
        ids = list(tokens[1:])
        assert len(ids) == len(g)
        for token in path:
            handed_on, _ = self.run(g, ids)
            g = torch.cat([g, handed_on[-1:]])
            ids.append(token)
        return self.run(g, ids)[1][-1]

    def project(self, taps: Tensor) -> Tensor:
        """[n, d] features of tokens that the target has run over."""
        config = self.case.config
        if config.get("norm_before_fc"):
            taps = self.norm("input_norm", taps)
        if config.get("fc_norm"):
            parts = taps.chunk(len(self.case.boundaries), dim=-1)
            taps = torch.cat([self.norm(f"fc_norm.{i}", x) for i, x in enumerate(parts)], -1)
        return self.linear("fc", taps)

    def run(self, g: Tensor, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What rows hand on [n, d], and their logits [n, V]."""
        config = self.case.config
        embedded = self.w["embed_tokens.weight"][list(ids)]
        normed = self.norm("layers.0.hidden_norm", g)
        x = torch.cat([self.norm("layers.0.input_layernorm", embedded), normed], dim=-1)
        y = normed if config.get("norm_before_residual") else g
        for i in range(self.case.num_layers):
            if i:
                x = self.norm(f"layers.{i}.input_layernorm", y)
            y = y + self.attention(i, x)
            x = self.norm(f"layers.{i}.post_attention_layernorm", y)
            gate, up = (self.linear(f"layers.{i}.mlp.{key}_proj", x) for key in ("gate", "up"))
            y = y + self.linear(f"layers.{i}.mlp.down_proj", gate * torch.sigmoid(gate) * up)
        last = self.norm("norm", y)
        own = last @ self.w["lm_head.weight"].T
        logits = torch.full((len(own), self.case.vocab), float("-inf"))
        logits[:, torch.arange(self.case.rows) + self.w.get("d2t", torch.zeros(()).long())] = own
        return (last if config.get("norm_output") else y), logits

    def attention(self, layer: int, x: Tensor) -> Tensor:
        name, size, n = f"layers.{layer}.self_attn", self.case.head_dim, len(x)
        q, k, v = (self.linear(f"{name}.{key}_proj", x).view(n, -1, size) for key in "qkv")
        if self.case.has_qk_norm:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        q, k = self.rotate(q), self.rotate(k)
        self.kept[layer] = k, v
        row, column = torch.arange(n)[:, None], torch.arange(n)
        seen = column <= row
        if self.case.layer.get("layer_types", ["full_attention"] * LAYERS)[layer][0] == "s":
            seen = seen & (column > row - self.case.layer["sliding_window"])
        heads = []
        for head in range(HEADS):
            own = head * KV_HEADS // HEADS
            scores = q[:, head] @ k[:, own].T / size**0.5
            heads.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v[:, own])
        return self.linear(f"{name}.o_proj", torch.cat(heads, dim=-1))

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.arange(len(x))[:, None, None] * self.frequencies
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", torch.zeros(()))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.w[f"{name}.weight"]


def hidden_states(target: Any, tokens: Sequence[int], boundaries: Sequence[int]) -> Tensor:
    """[T, A · H] of a model of transformers, side by side; boundaries before its last."""
    with torch.no_grad():
        states = target(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
    return torch.cat([states[place][0] for place in boundaries], dim=-1)
