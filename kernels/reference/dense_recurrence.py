"""Oracles of convolutions and recurrences as models call them: over all tokens of one sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def dense_conv_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str = ""
) -> Tensor:
    """A causal convolution of each channel: y[t] = Σ weight[j] · x[t - K + 1 + j] + bias.

    Args:
        x: [1, T, C]; before the first token there are zeros.
        weight: [C, K], of the oldest token first.
        bias: [C], or None.
        activation: `silu`, or none.
    Returns:
        [1, T, C] in the dtype of x; sums are in float32.
    """
    width, count = weight.shape[1], x.shape[1]
    padded = F.pad(x.float(), (0, 0, width - 1, 0))
    total = padded.new_zeros(x.shape) if bias is None else bias.float().expand(x.shape)
    for j in range(width):
        total = total + weight[:, j].float() * padded[:, j : j + count]
    return (F.silu(total) if activation == "silu" else total).to(x.dtype)


def dense_recurrence_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None
) -> Tensor:
    """Gated linear attention, with `beta` by the delta rule, from a state S of zeros.

    For each token and head: S ← exp(g) S; with beta: S ← S + k (beta (v - Sᵀ k))ᵀ, without:
    S ← S + k vᵀ; the result is Sᵀ q.

    Args:
        q: [1, T, HK, DK], scaled and normalized before.
        k: [1, T, HK, DK]; HK divides HV, value head h reads key head h // (HV / HK).
        v: [1, T, HV, DV].
        g: natural logarithm of the decay, [1, T, HV], or [1, T, HV, DK] of each row of S.
        beta: [1, T, HV], or None.
    Returns:
        [1, T, HV, DV] in the dtype of v; all is computed in float32.
    Source: gated delta rule, arXiv:2412.06464 §3; KDA, arXiv:2510.26692 §3; Mamba-2,
        arXiv:2405.21060 §2.
    """
    heads = v.shape[2]
    q, k = (x[0].float().repeat_interleave(heads // x.shape[2], 1) for x in (q, k))
    decay = (g if g.dim() == 4 else g[..., None])[0].float().exp()
    state = v.new_zeros(heads, k.shape[2], v.shape[3], dtype=torch.float32)
    results = []
    for t in range(v.shape[1]):
        state = decay[t][..., None] * state
        added = v[0, t].float()
        if beta is not None:
            found = torch.einsum("hkv,hk->hv", state, k[t])
            added = beta[0, t].float()[:, None] * (added - found)
        state = state + k[t][..., None] * added[:, None]
        results.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(results)[None].to(v.dtype)
