"""DFlash (1 and 2) and DSpark drafters by their formulas: dense, from a checkpoint's own tensors.

Written from descriptions of the published drafters, and of nothing in specc. With c_i the features
of token i, and x_j the rows of a block (anchor, masks) at positions n, n + 1, …:

    c_i = norm_h(fc(taps of token i))
    k, v of layer l: of c_0 … c_{n-1} and of norm_l(x_0) … norm_l(x_{B-1});  q: of norm_l(x_j)
    x = x + attention;  x = x + mlp(norm_p(x));  logits = W norm(x)

Row j sees all rows of its block, or those up to itself; and c_i of all tokens, or of a window w:
those with i > n + j - w, and of files of speculators those with i ≥ n - w. Of DSpark, the logits
after a token t are those of its row, and W2 · m, with h what W projects there, e = W1[t], and s
what the token before has left, 0 of the anchor:

    vanilla: m = e
    gated:   m = sigmoid(G [h e] + g) * e
    rnn:     m = tanh(o), s ← f * s + (1 - f) * tanh(c), [f' c o] = J [s e h] + j, f = sigmoid(f')

Of DFlash 2 the same with m = P h * e, of the K best tokens of the row alone; attention reads
conv_0(norm_l(x)) in place of norm_l(x), conv_1 of what it returns is added to x, and so of the MLP.
With y the rows that it convolves, and f = F norm(x_j) of the row alone, in both of them,

    conv_s(y)_j = Σ_t (base[s, t] + f[s, t] of each group of channels) * y_{j-t},   t ≤ j
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.block_heads import MASK, BlockCase
from tests.heads import HEADS, KV_HEADS
from tests.lilicorr_reference import LiLiCorrReference


class BlockReference:
    """A drafter.

    Args:
        embedding: of the target, [V, H].
        head: of the target, [V, H].
    """

    def __init__(
        self, case: BlockCase, tensors: dict[str, Tensor], embedding: Tensor, head: Tensor
    ) -> None:
        self.case = case
        self.w = {"embed_tokens.weight": embedding, "lm_head.weight": head, **tensors}
        parameters = case.layer.get("rope_parameters", {"rope_theta": 1000.0})
        half = torch.arange(0, case.head_dim, 2) / case.head_dim
        self.frequencies = parameters["rope_theta"] ** -half

    def proposed(self, taps: Tensor, anchor: int) -> Tensor:
        """[γ, V] logits of the tokens after an anchor, whose own hidden states are not known.

        Args:
            taps: [n, A · H] hidden states of the target for all tokens before it.
            anchor: the newest token, at position n.
        """
        rows = self.rows(taps, anchor)
        return rows if self.case.from_anchor else rows[1:]

    def after(self, taps: Tensor, anchor: int, path: Sequence[int]) -> Tensor:
        """[V] logits of the token after a path of drafted ones; see `proposed`."""
        logits = self.proposed(taps, anchor)[len(path)]
        if self.case.lilicorr:
            context = self.context(taps)[-1] if len(taps) else None
            rows, hidden = self.proposed(taps, anchor), self.hidden(taps, anchor)[1:]
            transformer = LiLiCorrReference(self.case.lilicorr, self.w)
            return transformer.logits(rows, hidden, context, path)
        if self.case.bias_kind == "selector":
            first = 0 if self.case.from_anchor else 1
            h = self.hidden(taps, anchor)[first + len(path)]
            e = self.w["candidate_selector.predecessor_codebook"][([anchor, *path])[-1]]
            m = self.linear("candidate_selector.hidden_projection", h) * e
            best = logits.argsort(descending=True, stable=True)[: self.case.candidates]
            own = logits[best] + self.w["candidate_selector.successor_codebook"][best] @ m
            return torch.full_like(logits, float("-inf")).index_put((best,), own)
        if self.case.rank:
            first = 0 if self.case.from_anchor else 1
            hidden = self.hidden(taps, anchor)[first:]
            state, known = torch.zeros(self.case.rank), torch.zeros(self.case.rank)
            for h, token in zip(hidden, [anchor, *path], strict=False):
                state, known = self.unrolled(state, token, h)
            logits[self.ids] += self.w["markov_head.markov_w2.weight"] @ known
        return logits

    def confidence(self, taps: Tensor, anchor: int, path: Sequence[int]) -> Tensor:
        """[] how likely the token after a path of drafted ones is accepted."""
        first = 0 if self.case.from_anchor else 1
        read = self.hidden(taps, anchor)[first + len(path)]
        if self.case.confidence_reads_token:
            known = self.w["markov_head.markov_w1.weight"][path[-1] if path else anchor]
            read = torch.cat([read, known])
        return self.linear("confidence_head.proj", read)[0].sigmoid()

    def unrolled(self, state: Tensor, token: int, h: Tensor) -> tuple[Tensor, Tensor]:
        """What a token leaves to those after it, and what W2 takes, [r] both."""
        e = self.w["markov_head.markov_w1.weight"][token]
        if self.case.bias_kind == "gated":
            gate = self.linear("markov_head.gate_proj", torch.cat([h, e]))
            return state, gate.sigmoid() * e
        if self.case.bias_kind == "rnn":
            joint = self.linear("markov_head.joint_proj", torch.cat([state, e, h]))
            gate, candidate, output = joint.view(3, -1)
            gate = gate.sigmoid()
            return gate * state + (1 - gate) * candidate.tanh(), output.tanh()
        return state, e

    @property
    def ids(self) -> Tensor:
        """[Vd] of the target, which the head has rows for."""
        return torch.arange(self.case.rows) + self.w.get("d2t", torch.zeros(()).long())

    def context(self, taps: Tensor) -> Tensor:
        """[n, d]."""
        return self.norm("hidden_norm", taps @ self.w["fc.weight"].T)

    def kept(self, taps: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the context in a layer, [n, HK, D]: what a cache of it holds."""
        return self.keys(layer, self.context(taps), 0)

    def rows(self, taps: Tensor, anchor: int) -> Tensor:
        """[B, V] logits of all rows of a block."""
        own = self.hidden(taps, anchor) @ self.w["lm_head.weight"].T
        if self.case.scale:
            factor, cap = self.case.scale
            own = cap * torch.tanh(factor * own / cap)
        logits = torch.full((len(own), self.case.vocab), float("-inf"))
        logits[:, self.ids] = own
        return logits

    def hidden(self, taps: Tensor, anchor: int) -> Tensor:
        """[B, d] that logits are projected from."""
        case, n = self.case, len(taps)
        x = self.w["embed_tokens.weight"][[anchor] + [MASK] * (case.size - 1)]
        for layer in range(case.num_layers):
            normed = self.norm(f"layers.{layer}.input_layernorm", x)
            convolve = self.convolutions(f"layers.{layer}.attention_conv", normed)
            normed = convolve(normed, 0)
            own, before = self.keys(layer, normed, n), self.kept(taps, layer)
            k, v = (torch.cat(pair) for pair in zip(before, own, strict=True))
            x = x + convolve(self.attention(layer, normed, k, v), 1)
            normed = self.norm(f"layers.{layer}.post_attention_layernorm", x)
            convolve = self.convolutions(f"layers.{layer}.mlp_conv", normed)
            normed = convolve(normed, 0)
            gate = self.linear(f"layers.{layer}.mlp.gate_proj", normed)
            up = self.linear(f"layers.{layer}.mlp.up_proj", normed)
            y = self.linear(f"layers.{layer}.mlp.down_proj", gate * torch.sigmoid(gate) * up)
            x = x + convolve(y, 1)
        return self.norm("norm", x)

    def convolutions(self, name: str, x: Tensor) -> Callable[[Tensor, int], Tensor]:
        """Those before and after a part of a layer, of rows [B, d], by factors of rows x."""
        if not self.case.conv:
            return lambda y, side: y
        taps, group = self.case.conv
        base = self.w[f"{name}.base_kernel"]
        factors = self.linear(f"{name}.kernel_projection", x).view(len(x), 2, taps, -1)

        def convolve(y: Tensor, side: int) -> Tensor:
            found = torch.zeros_like(y)
            for j in range(len(y)):
                for t in range(min(taps, j + 1)):
                    kernel = base[side, t] + factors[j, side, t].repeat_interleave(group)
                    found[j] += kernel * y[j - t]
            return found

        return convolve

    def keys(self, layer: int, x: Tensor, first: int) -> tuple[Tensor, Tensor]:
        name = f"layers.{layer}.self_attn"
        k, v = (self.linear(f"{name}.{key}_proj", x).view(len(x), KV_HEADS, -1) for key in "kv")
        return self.rotate(self.norm(f"{name}.k_norm", k), first), v

    def attention(self, layer: int, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        name, size = f"layers.{layer}.self_attn", self.case.head_dim
        n = len(k) - len(x)
        q = self.linear(f"{name}.q_proj", x).view(len(x), HEADS, size)
        q = self.rotate(self.norm(f"{name}.q_norm", q), n)
        row, column = n + torch.arange(len(x))[:, None], torch.arange(len(k))
        is_causal, window = self.case.sees_up_to_itself(layer), self.case.windows[layer]
        seen = (column <= row) if is_causal else torch.ones(len(x), len(k)).bool()
        if window:
            first = n - window if self.case.is_anchored else row - window + 1
            seen = seen & ((column >= first) | (column >= n))
        heads = []
        for head in range(HEADS):
            own = head * KV_HEADS // HEADS
            scores = q[:, head] @ k[:, own].T / size**0.5
            heads.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v[:, own])
        return self.linear(f"{name}.o_proj", torch.cat(heads, dim=-1))

    def rotate(self, x: Tensor, first: int) -> Tensor:
        angles = (first + torch.arange(len(x)))[:, None, None] * self.frequencies
        one, two = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", torch.zeros(()))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.w[f"{name}.weight"]
