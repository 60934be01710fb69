"""Requests of one batch that are drawn in different ways."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.sampling.rows import Rule

# greedy; filtered; penalized; each rule of static trees; greedy and penalized
_ROWS = (
    ((0.0, 1.0, 0.0, 1.0, 0.0, 0.0), (11, 0, Rule.COUPLED, 1)),
    ((0.7, 0.9, 0.0, 1.0, 0.0, 0.0), (12, 40, Rule.COUPLED, 1)),
    ((1.2, 1.0, 0.01, 1.3, 0.5, -0.25), (13, 0, Rule.DELTA, 2)),
    ((1.0, 1.0, 0.0, 1.0, 0.0, 0.0), (14, 0, Rule.MSS, 3)),
    ((0.8, 0.95, 0.0, 1.0, 0.0, 0.0), ((1 << 62) + 15, 0, Rule.SWOR, 4)),
    ((0.0, 1.0, 0.0, 1.2, 0.3, 0.1), (16, 0, Rule.SWOR, 5)),
)


def mixed_sampling(
    batch: int, first: int = 0, is_greedy: bool = False, rules: tuple[Rule, ...] = tuple(Rule)
) -> tuple[Tensor, Tensor]:
    """`sampling_values` [B, 6] and `sampling_words` [B, 4], see `specc.sampling.rows`.

    Args:
        first: which kind comes first.
        is_greedy: all are greedy, without penalties.
    """
    kinds = [row for row in _ROWS if row[0][0] == 0 or row[1][2] in rules]
    rows = [kinds[0 if is_greedy else (first + b) % len(kinds)] for b in range(batch)]
    return torch.tensor([values for values, _ in rows]), torch.tensor([words for _, words in rows])
