"""A load for adaptive lengths: acceptance by dice, latency by a formula with noise."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from specc.runtime.policies.adaptive_length import AdaptiveLength


@dataclass(frozen=True)
class Load:
    """What steps cost and yield; an off step takes 1.

    Args:
        acceptance: probability of depth 1, 2, …, given the depth before; the last one repeats.
        draft: seconds of a draft token.
        verify: seconds of a further node.
        fixed: seconds of any step that drafts.
    """

    acceptance: tuple[float, ...]
    draft: float
    verify: float
    fixed: float

    def seconds(self, length: int) -> float:
        return 1 + (self.fixed + (self.draft + self.verify) * length if length else 0)

    def mean_tokens(self, length: int) -> float:
        total = share = 1.0
        for depth in range(length):
            share *= self.acceptance[min(depth, len(self.acceptance) - 1)]
            total += share
        return total

    def rate(self, length: int) -> float:
        return self.mean_tokens(length) / self.seconds(length)

    def best(self, lengths: tuple[int, ...]) -> int:
        return max(lengths, key=self.rate)

    def draw(self, chooser: random.Random, most: int) -> int:
        """Draft tokens that the target would accept."""
        count = 0
        while count < most:
            if chooser.random() >= self.acceptance[min(count, len(self.acceptance) - 1)]:
                break
            count += 1
        return count


@dataclass
class Round:
    """One step: what ran, what it gave, and what the best length would have, with the same dice."""

    length: int
    tokens: float
    seconds: float
    best_tokens: float
    best_seconds: float


def simulate(
    machine: AdaptiveLength,
    lengths: tuple[int, ...],
    load_at: Callable[[int], Load],
    num_rounds: int,
    batch: int,
    seed: int,
) -> list[Round]:
    chooser = random.Random(seed)
    rounds = []
    for number in range(num_rounds):
        load, length = load_at(number), machine.current
        best = load.best(lengths)
        runs = [load.draw(chooser, lengths[-1]) for _ in range(batch)]
        noise = max(0.5, chooser.gauss(1, 0.05))
        tokens = [min(run, length) + 1 for run in runs]
        seconds = load.seconds(length) * noise
        machine.observe(seconds, tokens if batch > 1 else tokens[0])
        best_tokens = sum(min(run, best) + 1 for run in runs)
        rounds.append(Round(length, sum(tokens), seconds, best_tokens, load.seconds(best) * noise))
    return rounds


def share_of_optimum(rounds: list[Round]) -> float:
    """Tokens a second over those of the best length on the same dice and noise."""
    rate = sum(r.tokens for r in rounds) / sum(r.seconds for r in rounds)
    best = sum(r.best_tokens for r in rounds) / sum(r.best_seconds for r in rounds)
    return rate / best
