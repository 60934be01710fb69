"""LiLiCorr's transformer by its formulas, of one sequence: dense, with torch's own attention.

Written from descriptions of the published head, and of nothing in specc. With ℓ the log
probabilities of the K best tokens of a row over all ids, r their ranks, and E an embedding:

    node (j, c) = T E[c] + P h_j + MLP(LayerNorm[ℓ, e^ℓ, ℓ - max ℓ, r / (K - 1), r = 0]) + slot_j
                  + rank_r
    x = x + attention(norm(x));  x = x + W₂ silu(W₁ norm(x))     over all nodes, no mask
    scores of attention + relative[head, j_query - j_key + B - 1] + same[head] of equal slots
    a = norm(C ctx), o = norm(x), z = silu(F [o; a; o * a])
    out, in = unit(O z), unit(I z); start = unit(A a)
    score(c) = scale ⟨start, in_c⟩ of the first slot, score(c after p) = scale ⟨out_p, in_c⟩
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LiLiCorrCase:
    """A transformer.

    Args:
        width: w; 0 is the drafter's d.
        layers: of it.
        heads: of its attention.
        middle: columns of an MLP's middle, relative to w.
        factors: f.
        count: K.
        scale: of scores.
        is_early: its MLPs are numbered lists in the file.
    """

    width: int = 0
    layers: int = 1
    heads: int = 2
    middle: float = 2.0
    factors: int = 5
    count: int = 4
    scale: float = 6.0
    is_early: bool = False

    def config(self) -> dict[str, object]:
        """Keys of `dflash_config`."""
        return {
            "projector_type": "lilicorr",
            "lilicorr_enabled": True,
            "lilicorr_candidate_topk": self.count,
            "lilicorr_hidden_size": self.width,
            "lilicorr_num_layers": self.layers,
            "lilicorr_num_heads": self.heads,
            "lilicorr_mlp_ratio": self.middle,
            "lilicorr_factor_dim": self.factors,
            "lilicorr_vector_eps": 1e-6,
            "lilicorr_logit_scale": self.scale,
        }

    def shapes(self, d: int, size: int) -> dict[str, tuple[int, ...]]:
        """Of its tensors, by name; B rows of d columns."""
        w = self.width or d
        middle = int(w * self.middle)
        linear = {
            "pass_hidden_proj": (w, d), "feature_mlp.up_proj": (w, 5),
            "feature_mlp.down_proj": (w, w), "context_proj": (w, d),
            "factor_input_proj": (w, 3 * w), "out_head": (self.factors, w),
            "in_head": (self.factors, w), "anchor_out_head": (self.factors, w),
        }  # fmt: skip
        if w != d:
            linear["token_proj"] = (w, d)
        own: dict[str, tuple[int, ...]] = {
            "feature_norm.weight": (5,), "feature_norm.bias": (5,),
            "slot_embedding": (1, 1, size - 1, 1, w), "rank_embedding": (1, 1, 1, self.count, w),
            "relative_slot_bias": (self.heads, 2 * size - 1), "same_slot_bias": (self.heads,),
            "output_norm.weight": (w,), "anchor_norm.weight": (w,),
        }  # fmt: skip
        for i in range(self.layers):
            name = f"layers.{i}"
            linear[f"{name}.attn.out_proj"] = (w, w)
            linear[f"{name}.mlp.up_proj"], linear[f"{name}.mlp.down_proj"] = (
                (middle, w),
                (w, middle),
            )
            own |= {f"{name}.attn_norm.weight": (w,), f"{name}.mlp_norm.weight": (w,)}
            own |= {f"{name}.attn.in_proj_weight": (3 * w, w)}
            own |= {f"{name}.attn.in_proj_bias": (3 * w,)}
        for name, shape in linear.items():
            own |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        return {f"lilicorr.{name}": shape for name, shape in own.items()}


def early(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same under names of early files."""
    found = {}
    for name, value in tensors.items():
        if name.startswith("lilicorr."):
            name = name.replace("feature_norm.", "feature_mlp.0.")
            name = name.replace("feature_mlp.up_proj", "feature_mlp.1")
            name = name.replace("feature_mlp.down_proj", "feature_mlp.3")
            name = name.replace("mlp.up_proj", "mlp.0").replace("mlp.down_proj", "mlp.2")
        found[name] = value
    return found


class LiLiCorrReference:
    """A transformer.

    Args:
        weights: of the checkpoint, by the names of later files, and `embed_tokens.weight`.
    """

    def __init__(self, case: LiLiCorrCase, weights: Mapping[str, Tensor]) -> None:
        self.case, self.weights = case, weights

    def logits(
        self, rows: Tensor, hidden: Tensor, context: Tensor | None, path: Sequence[int]
    ) -> Tensor:
        """[V] logits of what follows a path of drafted tokens.

        Args:
            rows: [S, V] logits of the pass.
            hidden: [S, d] of the same rows.
            context: [d] of the last row of the context, or None where there is none.
        """
        case, slot = self.case, len(path)
        chosen = rows.argsort(dim=1, descending=True, stable=True)[:, : case.count]
        start, left, right = self.vectors(rows, hidden, context, chosen)
        source = start
        if path:
            # a token that is no candidate stands for the best one
            place = (chosen[slot - 1] == path[-1]).int().argmax()
            source = left[slot - 1, place]
        found = torch.full_like(rows[0], float("-inf"))
        for c, token in enumerate(chosen[slot].tolist()):
            found[token] = case.scale * (right[slot, c] @ source)
        return found

    def vectors(
        self, rows: Tensor, hidden: Tensor, context: Tensor | None, chosen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Those of the context [f], and left and right [S, K, f]."""
        case, (slots, count), d = self.case, chosen.shape, hidden.shape[1]
        w = case.width or d
        nodes = []
        for j in range(slots):
            odds = rows[j].log_softmax(0)[chosen[j]]
            for rank, token in enumerate(chosen[j].tolist()):
                told = torch.stack([
                    odds[rank], odds[rank].exp(), odds[rank] - odds.max(),
                    torch.tensor(rank / max(count - 1, 1)), torch.tensor(float(rank == 0)),
                ])  # fmt: skip
                told = F.layer_norm(
                    told, (5,), self.of("feature_norm.weight"), self.of("feature_norm.bias"), 1e-5
                )
                token_row = self.weights["embed_tokens.weight"][token]
                x = token_row if w == d else self.linear("token_proj", token_row)
                x = x + self.linear("pass_hidden_proj", hidden[j]) + self.mlp("feature_mlp", told)
                x = x + self.of("slot_embedding")[0, 0, j, 0]
                nodes.append(x + self.of("rank_embedding")[0, 0, 0, rank])
        x = torch.stack(nodes)
        slot = torch.arange(slots).repeat_interleave(count)
        size = self.of("relative_slot_bias").shape[1] // 2
        bias = torch.stack([
            relative[slot[:, None] - slot + size] + same * (slot[:, None] == slot)
            for relative, same in zip(
                self.of("relative_slot_bias"), self.of("same_slot_bias"), strict=True
            )
        ])  # fmt: skip
        for i in range(case.layers):
            normed = self.norm(f"layers.{i}.attn_norm", x)
            x = x + self.attention(f"layers.{i}.attn", w, normed, bias)
            x = x + self.mlp(f"layers.{i}.mlp", self.norm(f"layers.{i}.mlp_norm", x))
        x = self.norm("output_norm", x)
        anchor = torch.zeros(w) if context is None else self.linear("context_proj", context)
        anchor = self.norm("anchor_norm", anchor)
        beside = anchor.expand_as(x)
        z = F.silu(self.linear("factor_input_proj", torch.cat([x, beside, x * beside], 1)))
        sides = (
            F.normalize(self.linear(f"{side}_head", z), dim=-1, eps=1e-6) for side in ("out", "in")
        )
        left, right = (side.view(slots, count, -1) for side in sides)
        return F.normalize(self.linear("anchor_out_head", anchor), dim=-1, eps=1e-6), left, right

    def attention(self, name: str, w: int, x: Tensor, bias: Tensor) -> Tensor:
        module = nn.MultiheadAttention(w, self.case.heads, batch_first=True)
        names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
        module.load_state_dict({x: self.of(f"{name}.{x}") for x in names})
        with torch.no_grad():
            return module(x[None], x[None], x[None], attn_mask=bias, need_weights=False)[0][0]

    def mlp(self, name: str, x: Tensor) -> Tensor:
        return self.linear(f"{name}.down_proj", F.silu(self.linear(f"{name}.up_proj", x)))

    def of(self, name: str) -> Tensor:
        return self.weights[f"lilicorr.{name}"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.of(f"{name}.weight"), self.of(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.of(f"{name}.weight")
