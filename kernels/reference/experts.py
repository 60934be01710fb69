"""Oracle of the experts of a mixture: the feed-forward layers that a router chose for tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from specc.kernels.reference.fused import ACTIVATIONS


def experts_reference(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """Add up what the chosen experts make of each token, each with its weight.

    Args:
        x: [N, H] tokens.
        ids: [N, K] int64, experts of each token; one outside of 0 … E - 1 adds nothing.
        weights: [N, K] of these experts, in float32 or the dtype of x.
        gate_up: [E, 2 I, H] in the dtype of x; the first I rows of an expert are the gate's.
        down: [E, H, I] in the dtype of x.
        activation: `silu`, `gelu`, `gelu_tanh` or `relu`.
    Returns:
        [N, H] in the dtype of x. Products and sums are in float32; rounded are what the second
        product reads, which has the dtype of its weights, and the result.
    Source: mixtures of experts as of Mixtral, arXiv:2401.04088 §2.1.
    """
    num_tokens, top_k = ids.shape
    flat = ids.reshape(-1)
    found = x.new_zeros(flat.shape[0], down.shape[1], dtype=torch.float32)
    for expert in range(gate_up.shape[0]):
        pairs = (flat == expert).nonzero()[:, 0]
        if not len(pairs):
            continue
        rows = functional.linear(x[pairs // top_k].float(), gate_up[expert].float())
        gate, up = rows.chunk(2, dim=-1)
        inner = (ACTIVATIONS[activation](gate) * up).to(x.dtype)
        found[pairs] = functional.linear(inner.float(), down[expert].float())
    weighted = found.view(num_tokens, top_k, -1) * weights.float()[:, :, None]
    is_expert = (ids >= 0) & (ids < gate_up.shape[0])
    return weighted.masked_fill(~is_expert[:, :, None], 0.0).sum(dim=1).to(x.dtype)
