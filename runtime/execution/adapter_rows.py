"""What passes are told of adapters: the number of each sequence's, or of each token's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specc.runtime.scheduling.request import Request


def adapters_of(requests: Sequence[Request]) -> Tensor | None:
    """[B] int32 adapter of each request, -1 for none; None where the target has no adapters."""
    numbers = [request.adapter for request in requests if request.adapter is not None]
    return torch.tensor(numbers, dtype=torch.int32) if numbers else None


def rows_of_tokens(numbers: Tensor, counts: Sequence[int]) -> Tensor:
    """[Nt, 1] int32 of the tokens of a pass.

    Args:
        numbers: [B] int32 of sequences.
        counts: tokens of each.
    """
    return numbers.repeat_interleave(torch.tensor(counts))[:, None]
