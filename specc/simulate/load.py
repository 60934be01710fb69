"""Requests of a simulated load: when they come, how long they are, what of their drafts is right.

Everything follows from one seed by a counter-based generator: what a request is, and whether the
draft is right at one of its positions, depends on the seed, the request and the position alone. So
every policy meets the same requests and the same dice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specc.cost.acceptance import Rows, check_acceptance, row_at
from specc.errors import ConfigError

_MASK = (1 << 64) - 1
_ARRIVAL, _PROMPT, _OUTPUT, _KIND, _RANK = range(5)


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
class Lengths:
    """Numbers of tokens: log-normal, cut off at both ends.

    Args:
        mean: before the ends are cut off.
        spread: standard deviation over mean; 0 is always the mean.
        least: tokens.
        most: tokens.
    Raises:
        ConfigError: no such distribution.
    """

    mean: float
    spread: float = 0.0
    least: int = 1
    most: int = 1 << 20

    def __post_init__(self) -> None:
        if not (0 < self.mean < math.inf and 0 <= self.spread < math.inf):
            raise ConfigError(
                f"lengths of mean {self.mean:g} and spread {self.spread:g}",
                "a mean above 0, a spread of 0 or more",
                "for example a mean of 128 and a spread of 0.5",
            )
        if not 1 <= self.least <= self.most:
            raise ConfigError(
                f"lengths of {self.least} … {self.most} tokens", "1 or more, rising", "swap them"
            )

    def draw(self, *counters: int) -> int:
        variance = math.log(1 + self.spread**2)
        # Box and Muller
        radius = math.sqrt(-2 * math.log(1 - uniform(*counters, 0)))
        normal = radius * math.cos(2 * math.pi * uniform(*counters, 1))
        value = self.mean * math.exp(math.sqrt(variance) * normal - variance / 2)
        return min(max(round(value), self.least), self.most)


@dataclass(frozen=True)
class Drafting:
    """How right the drafts of a request are.

    Args:
        start: draft → acceptance by depth and sibling rank; see specc/cost/acceptance.py.
        end: likewise, at the end of what it drifts over; None is no drift.
        over: drifts over the `output` of each request, or over the `load` of all of them.
    Raises:
        ConfigError: acceptance that is no table of probabilities.
    """

    start: Mapping[str, Sequence[Sequence[float]]]
    end: Mapping[str, Sequence[Sequence[float]]] | None = None
    over: str = "output"
    rows: Mapping[str, tuple[Rows, Rows]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.over not in ("output", "load"):
            raise ConfigError(f"drift over {self.over!r}", "output or load", "choose one of them")
        end = self.start if self.end is None else self.end
        rows = {
            draft: (check_acceptance(table), check_acceptance(end[draft]))
            for draft, table in self.start.items()
        }
        object.__setattr__(self, "rows", rows)

    def bounds(self, draft: str, depth: int, share: float) -> list[float]:
        """Cumulated acceptance by rank of a node's children.

        Args:
            depth: of the node, 0 of the root.
            share: of the drift that has passed, 0 … 1.
        """
        start, end = (row_at(rows, depth) for rows in self.rows[draft])
        total, bounds = 0.0, []
        for rank in range(max(len(start), len(end))):
            a = start[rank] if rank < len(start) else 0.0
            b = end[rank] if rank < len(end) else 0.0
            total += a + share * (b - a)
            bounds.append(total)
        return bounds


@dataclass(frozen=True)
class SimulatedRequest:
    """One request.

    Args:
        arrival_s: seconds from the start.
        num_prompt_tokens: 1 or more.
        num_output_tokens: 1 or more.
        drafting: how right its drafts are.
        load_share: of the load that came before it, 0 … 1.
        speculative: False decodes it plainly.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    drafting: Drafting
    load_share: float = 0.0
    speculative: bool = True


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
        share = one.load_share
        if one.drafting.over == "output":
            share = min(1.0, (position - one.num_prompt_tokens) / one.num_output_tokens)
        # drafts are right at the same positions more often than by chance: they share the dice
        value = uniform(self.seed, _RANK, request, position)
        for rank, bound in enumerate(one.drafting.bounds(draft, depth, share)):
            if value < bound:
                return rank
        return None


def make_load(
    rate: float,
    num_requests: int,
    drafting: Sequence[tuple[float, Drafting]],
    prompts: Lengths,
    outputs: Lengths,
    *,
    seed: int = 0,
    burst: int = 1,
    plain_share: float = 0.0,
) -> Load:
    """Requests at random times.

    Args:
        rate: requests a second on average.
        drafting: kinds of requests, each with its weight.
        seed: of everything.
        burst: so many come at a time, at times that are a Poisson process; 1 is one by one.
        plain_share: of requests with `speculative=False`.
    Raises:
        ConfigError: a rate or a number that makes no load.
    """
    total = sum(weight for weight, _ in drafting)
    if not (0 < rate < math.inf and num_requests >= 1 and burst >= 1 and total > 0):
        raise ConfigError(
            f"a load of {num_requests} requests, {rate:g} a second, in bursts of {burst},"
            f" of {len(drafting)} kinds",
            "a rate above 0, and at least one request, one a burst, and one kind with a weight",
            "raise them",
        )
    requests, now_s = [], 0.0
    for i in range(num_requests):
        if i % burst == 0:
            now_s -= math.log(1 - uniform(seed, _ARRIVAL, i)) * burst / rate
        left = uniform(seed, _KIND, i, 0) * total
        kind = drafting[-1][1]
        for weight, one in drafting:
            left -= weight
            if left < 0:
                kind = one
                break
        requests.append(
            SimulatedRequest(
                now_s,
                prompts.draw(seed, _PROMPT, i),
                outputs.draw(seed, _OUTPUT, i),
                kind,
                load_share=i / max(1, num_requests - 1),
                speculative=uniform(seed, _KIND, i, 1) >= plain_share,
            )
        )
    return Load(requests, seed)
