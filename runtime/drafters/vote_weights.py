"""How much each draft's vote counts, from how often the target agrees with it.

The voted chain is one draft's, or what several agree on, and what the target accepts of it says
nothing of a draft that was outvoted: its tokens were not verified. Counting accepted votes alone
would keep the leader in the lead. So each draft leads now and then, and only a leader's chain
is counted, its own tokens up to the first that the target refuses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# of so many steps, one is led by each draft in turn
PERIOD = 16
# counts fade: of a few hundred steps
_MEMORY = 0.995
# a vote counts as the log of its odds against one of so many other tokens (Nitzan and Paroush,
# International Economic Review 23(2), 1982, for two choices)
_OTHERS = 9.0
_LEAST, _MOST = 0.1, 10.0


class VoteWeights:
    """Weights of the drafts of one plan.

    Args:
        num_drafts: S.
        led: drafts that have to lead to be counted; the others are counted at every step.
    Source: Minions, arXiv:2402.15678 §3: majority voting with adaptive weights. Turns and odds
    are specc's own.
    """

    def __init__(self, num_drafts: int, led: Sequence[int] | None = None) -> None:
        self._led = list(range(num_drafts)) if led is None else list(led)
        self._hits = [1.0] * num_drafts
        self._misses = [1.0] * num_drafts
        self._num_rows = 0

    @property
    def values(self) -> list[float]:
        """[S] weights by what has been counted."""
        odds = (_OTHERS * h / m for h, m in zip(self._hits, self._misses, strict=True))
        return [min(_MOST, max(_LEAST, math.log(x))) for x in odds]

    def next_row(self) -> list[float]:
        """[S] weights of the next step."""
        turn = self._num_rows % PERIOD
        self._num_rows += 1
        if turn >= len(self._led):
            return self.values
        row = [1.0] * len(self._hits)
        row[self._led[turn]] = float(len(row))
        return row

    def observe(self, draft: int, counts: Sequence[int], most: int) -> None:
        """Count a draft's own chains.

        Args:
            draft: its place.
            counts: tokens of each chain that are the target's, up to the first that is not.
            most: tokens of a chain; one of so many has no miss.
        """
        self._hits[draft] = _MEMORY * self._hits[draft] + sum(counts)
        self._misses[draft] = _MEMORY * self._misses[draft] + sum(c < most for c in counts)


def leader(row: Sequence[float]) -> int | None:
    """The draft that outvotes all others together, if one does."""
    first = max(range(len(row)), key=lambda draft: row[draft])
    return first if row[first] > sum(row) - row[first] else None
