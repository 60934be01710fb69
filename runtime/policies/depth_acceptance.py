"""Acceptance by depth, learned from steps of any length.

A step of length s shows, for every depth d ≤ s, whether depth d was accepted where depth d - 1 was.
Counted that way, each step informs about all lengths, the shorter ones in full: the estimator of
survival by Kaplan and Meier (1958), where a longer step that ended by its length says nothing about
the depths after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


class DepthAcceptance:
    """Counts by depth, which fade.

    Args:
        max_depth: longest step.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        # index d - 1: sequences that accepted depth d - 1 in a step of depth d or more, and depth d
        self._asked = [0.0] * max_depth
        self._accepted = [0.0] * max_depth

    def add(self, length: int, num_tokens: Sequence[int]) -> None:
        """Count one step.

        Args:
            length: of the step, at most `max_depth`.
            num_tokens: of each sequence, bonus token included: 1 … length + 1.
        """
        for tokens in num_tokens:
            for d in range(min(tokens, length)):
                self._asked[d] += 1
            for d in range(tokens - 1):
                self._accepted[d] += 1

    def merge(self, other: DepthAcceptance, fade: float) -> None:
        """Let these counts weigh less, and add the other ones."""
        self._asked = [
            fade * mine + new for mine, new in zip(self._asked, other._asked, strict=True)
        ]
        self._accepted = [
            fade * mine + new for mine, new in zip(self._accepted, other._accepted, strict=True)
        ]

    def rate(self, depth: int) -> float:
        """Probability that depth 1, 2, … is accepted where the one before it is; .5 if unknown."""
        return (self._accepted[depth - 1] + 0.5) / (self._asked[depth - 1] + 1)

    def rate_toward(self, depth: int, prior: float, weight: float) -> float:
        """The same, drawn toward a prior that counts for so many observations, above 0."""
        accepted, asked = self._accepted[depth - 1], self._asked[depth - 1]
        return (accepted + weight * prior) / (asked + weight)

    def survival(self, length: int) -> list[float]:
        """Probability that depth 0 … length is accepted."""
        shares = [1.0]
        for depth in range(1, length + 1):
            shares.append(shares[-1] * self.rate(depth))
        return shares

    def mean_tokens(self, length: int) -> float:
        """Expected tokens of a sequence in a step of this length, bonus token included."""
        return sum(self.survival(length))

    def variance(self, length: int) -> float:
        """Of one sequence's tokens in a step of this length."""
        shares = self.survival(length)
        squares = sum((2 * depth + 1) * share for depth, share in enumerate(shares))
        return squares - sum(shares) ** 2

    def error(self, length: int) -> float:
        """Standard error of `mean_tokens`, from how often each depth was seen (delta method)."""
        shares = self.survival(length)
        total, behind = 0.0, 0.0
        for depth in range(length, 0, -1):
            behind += shares[depth]
            rate, asked = self.rate(depth), self._asked[depth - 1] + 1
            total += (behind / rate) ** 2 * rate * (1 - rate) / asked
        return math.sqrt(total)
