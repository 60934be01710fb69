"""Requests of a simulated load: when they come, how long they are, what of their drafts is right.

Everything follows from one seed by a counter-based generator: what a request is, and whether the
draft is right at one of its positions, depends on the seed, the request and the position alone. So
every policy meets the same requests and the same dice.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specc.cost.acceptance import Rows, check_acceptance, row_at

_MASK = (1 << 64) - 1
_RANK = 4


def uniform(*counters: int) -> float:
    """A number in 0 … 1 (1 excluded), the same for the same counters (splitmix64)."""
    value = 0
    for counter in counters:
        value = (value ^ counter) + 0x9E3779B97F4A7C15 & _MASK
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
        value ^= value >> 31
    return (value >> 11) / (1 << 53)


@dataclass(frozen=True)
class Drafting:
    """How often the drafts of a request are right.

    Args:
        acceptance: draft → acceptance by depth and sibling rank; see specc/cost/acceptance.py.
    Raises:
        ConfigError: acceptance that is no table of probabilities.
    """

    acceptance: Mapping[str, Sequence[Sequence[float]]]
    rows: Mapping[str, Rows] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rows = {draft: check_acceptance(table) for draft, table in self.acceptance.items()}
        object.__setattr__(self, "rows", rows)

    def bounds(self, draft: str, depth: int) -> list[float]:
        """Cumulated acceptance by rank of the children of a node of this depth, 0 of the root."""
        return list(itertools.accumulate(row_at(self.rows[draft], depth)))


@dataclass(frozen=True)
class SimulatedRequest:
    """One request.

    Args:
        arrival_s: seconds from the start.
        num_prompt_tokens: 1 or more.
        num_output_tokens: 1 or more.
        drafting: how right its drafts are.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    drafting: Drafting


@dataclass(frozen=True)
class Load:
    """Requests in order of arrival, and the seed of their dice."""

    requests: Sequence[SimulatedRequest]
    seed: int = 0

    def rank(self, request: int, draft: str, depth: int, position: int) -> int | None:
        """Which child of a node is the target's choice; None is none of them.

        Args:
            request: index in the load.
            depth: of the node, 0 of the root.
            position: of the children in the sequence. Their dice are the same at every depth.
        """
        one = self.requests[request]
        # drafts are right at the same positions more often than by chance: they share the dice
        value = uniform(self.seed, _RANK, request, position)
        for rank, bound in enumerate(one.drafting.bounds(draft, depth)):
            if value < bound:
                return rank
        return None
