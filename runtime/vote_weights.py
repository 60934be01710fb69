"""How much each draft's vote counts, from how often the target agreed with it."""

from __future__ import annotations

import math
from collections.abc import Sequence

# how fast weights follow, and how far apart they may be
_RATE = 0.05
_LEAST, _MOST = 0.1, 10.0


class VoteWeights:
    """Weights of the drafts of one plan; they rise above the mean and fall below it.

    Args:
        num_drafts: S.
    Source: Minions, arXiv:2402.15678 §3: majority voting with adaptive weights.
    """

    def __init__(self, num_drafts: int) -> None:
        self.values = [1.0] * num_drafts

    def observe(self, agreed: Sequence[float]) -> None:
        """Take the outcome of a step.

        Args:
            agreed: [S] accepted tokens of a sequence that each draft itself proposed, on average.
        """
        mean = sum(agreed) / len(agreed)
        moved = [
            value * math.exp(_RATE * (count - mean))
            for value, count in zip(self.values, agreed, strict=True)
        ]
        scale = len(moved) / sum(moved)
        self.values = [min(_MOST, max(_LEAST, value * scale)) for value in moved]
