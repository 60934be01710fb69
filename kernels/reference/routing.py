"""Oracle of a mixture's router: which experts a token takes, and with what weight."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# what a token's logits become before its best experts are taken: `chosen` leaves them as they are,
# and takes the softmax over the best ones alone
SCORES = ("softmax", "sigmoid", "chosen")


def route_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    scores: str,
    top_k: int,
    normalize: bool,
    eps: float,
    scale: float,
    groups: int,
    top_groups: int,
    group_best: int,
    shared: int = 0,
    shared_gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token.

    Args:
        x: [N, H] tokens.
        weight: [E, H] in the dtype of x.
        bias: [E], likewise, or None.
        correction: [E] that scores are compared with, and not weighted with, or None.
        scores: one of `SCORES`.
        top_k: experts of a token.
        normalize: a token's weights are divided by their sum and `eps`.
        eps: see there.
        scale: factor of all weights.
        groups: that experts are divided into, E / groups side by side; 1 for none.
        top_groups: groups whose experts a token may take, those with the largest sums.
        group_best: experts whose scores add up to that of their group, the best ones.
        shared: experts E, E + 1, … that every token takes after those.
        shared_gate: [1, H] in the dtype of x, with which their weight is sigmoid(x · gate); without
            it is 1.
    Returns:
        [N, top_k + shared] int64 experts, the best first, and the lower one first where two are
        equal; NaN is better than all. And as many float32 weights. Everything is computed in
        float32, and logits are not rounded to the dtype of x.
    Source: mixtures of experts as of Mixtral, arXiv:2401.04088 §2.1; groups, DeepSeek-V2,
        arXiv:2405.04434 §2.2.2; correction, DeepSeek-V3, arXiv:2412.19437 §2.1.2.
    """
    logits = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if scores == "softmax":
        found = logits.softmax(dim=-1)
    else:
        found = logits.sigmoid() if scores == "sigmoid" else logits
    choice = found if correction is None else found + correction.float()
    if groups > 1:
        parts = choice.unflatten(-1, (groups, -1))
        of_groups = parts.sort(dim=-1, descending=True).values[..., :group_best].sum(dim=-1)
        is_taken = torch.zeros_like(of_groups, dtype=torch.bool)
        is_taken.scatter_(-1, _best(of_groups, top_groups), True)
        choice = parts.masked_fill(~is_taken[..., None], -torch.inf).flatten(-2)
    ids = _best(choice, top_k)
    weights = found.gather(-1, ids)
    if scores == "chosen":
        weights = weights.softmax(dim=-1)
    if normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + eps)
    weights = weights * scale
    if shared:
        every = torch.arange(shared, device=ids.device) + weight.shape[0]
        gate = torch.ones_like(weights[:, :1])
        if shared_gate is not None:
            gate = functional.linear(x.float(), shared_gate.float()).sigmoid()
        ids = torch.cat([ids, every.expand(len(ids), shared)], 1)
        weights = torch.cat([weights, gate.expand(-1, shared)], 1)
    return ids, weights


def _best(values: Tensor, count: int) -> Tensor:
    """[..., count] places of the largest, the first of equal ones first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
