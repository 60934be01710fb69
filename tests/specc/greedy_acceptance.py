"""What steps accept of greedy requests, for many rows of logits at once."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.kernels import ops
from specc.kernels.reference import accept_greedy_reference

# rows that the operator of steps walks, too; its oracle takes them one by one
NUM_CHECKED = 40


def accept_greedily(
    logits: Tensor, tokens: Tensor, parents: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Path, accepted tokens and output of trees; arguments as of `accept_greedy_reference`."""
    found = accept_greedy_reference(logits, tokens, parents, max_depth)
    count, num_nodes = min(NUM_CHECKED, len(tokens)), tokens.shape[1]
    walked = ops.accept(
        logits[: count * num_nodes],
        tokens[:count],
        parents[:count],
        max_depth,
        *(None, None, []),
        torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]]).repeat(count, 1),
        torch.zeros(count, 4, dtype=torch.int64),
        torch.zeros(count, dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(count, 1, dtype=torch.int32),
    )
    for all_rows, some_rows in zip(found, walked, strict=True):
        assert torch.equal(all_rows[:count], some_rows)
    return found
