"""Cross entropy of a linear layer's logits with the target's likeliest tokens, some rows at a time.

Logits of all rows would be written to memory and read again several times; those of some rows stay
in the processor's caches. Gradients are computed with the loss, and logits are never kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ROWS = 256


class SoftCrossEntropy(torch.autograd.Function):
    """Σ_i share_i · Σ_k odds_ik · -log softmax(W x_i)[place_ik], and where a guess is likeliest."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        places: Tensor,
        odds: Tensor,
        shares: Tensor,
        guesses: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Products are computed in bfloat16, the rest in float32.

        Args:
            ctx: of the library.
            x: [n, d].
            weight: W, [V, d].
            places: [n, K] int64, entries of each row; one may be there more than once.
            odds: [n, K] float32, 0 or more; rows may sum to anything.
            shares: [n] float32, of the rows.
            guesses: [n] int64, an entry of each row.
        Returns:
            the loss, a scalar; and [n] bool, whether no entry has more than the row's guess.
        """
        narrow, matrix = x.bfloat16(), weight.bfloat16()
        x_grad = torch.empty_like(x)
        weight_grad = torch.zeros_like(weight)
        total, best = x.new_zeros(()), []
        for start in range(0, len(x), _ROWS):
            part = slice(start, start + _ROWS)
            place, goal, share = places[part], odds[part], shares[part, None]
            scores = (narrow[part] @ matrix.T).float()
            # argmax takes as long as all the rest
            scores -= scores.amax(-1, keepdim=True)
            best.append(scores.gather(-1, guesses[part, None])[:, 0] >= 0)
            inner = (goal * scores.gather(-1, place)).sum(-1, keepdim=True)
            own = scores.exp_()
            sums, mass = own.sum(-1, keepdim=True), goal.sum(-1, keepdim=True)
            total += (share * (mass * sums.log() - inner)).sum()
            grad = own.mul_(share * mass / sums)
            grad = grad.scatter_add_(-1, place, -share * goal).bfloat16()
            x_grad[part] = grad @ matrix
            weight_grad += grad.T @ narrow[part]
        ctx.save_for_backward(x_grad, weight_grad)
        is_best = torch.cat(best)
        ctx.mark_non_differentiable(is_best)
        return total, is_best

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """Scale what the forward pass has computed."""
        x_grad, weight_grad = ctx.saved_tensors
        return grad * x_grad, grad * weight_grad, None, None, None, None
