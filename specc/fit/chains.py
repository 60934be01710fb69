"""How far greedy chains come along the target's own greedy texts, as an engine drafts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specc.fit.texts import Texts


@dataclass(frozen=True)
class Followed:
    """What was accepted, of all texts.

    Args:
        num_texts: that were followed.
        steps: of an engine.
        acceptance_length: tokens of a step, the target's own among them.
        accepted_at_depth: share of steps in which so many drafted tokens or more are accepted.
    """

    num_texts: int
    steps: int
    acceptance_length: float
    accepted_at_depth: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """For a report."""
        return {**vars(self), "accepted_at_depth": list(self.accepted_at_depth)}


class Chains:
    """Counts steps along texts.

    Args:
        depth: of a chain.
    """

    def __init__(self, depth: int) -> None:
        self._reached = torch.zeros(depth)
        self._texts = self._steps = self._accepted = 0

    def follow(self, text: Texts, hits: Tensor) -> None:
        """Count what steps along a text accept.

        Args:
            text: one row, greedy from `begins` on.
            hits: [roots, depth] bool, whether the draft proposes the token that came. A root is the
                last known token, which the target has not read; the first one is the first that
                the target has written.
        """
        begin, last = int(text.begins[0]), int(text.ends[0]) - 1
        self._texts += 1
        root = begin
        while root < last:
            own, count = hits[root - begin], 0
            # the token after those that are accepted is the target's own, the last one, too
            while count < min(len(self._reached), last - 1 - root) and own[count]:
                self._reached[count] += 1
                count += 1
            self._steps += 1
            self._accepted += count
            root += count + 1

    def figures(self) -> Followed:
        """Of all texts until now."""
        steps = max(1, self._steps)
        return Followed(
            self._texts,
            self._steps,
            round(1 + self._accepted / steps, 4),
            tuple(round(x, 4) for x in (self._reached / steps).tolist()),
        )
