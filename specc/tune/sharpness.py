"""How sharp draft models should be: factors of their logits by depth, from the target's outputs.

Coupled drafts are right where the best of β · s + noise is the token that came, which the noise of
the request's own seed made the best of the target's. So all factors are tried on the same tokens
and noise: a factor is taken if it makes more of them right than chance explains, depth by depth,
among the places that a chain with the factors so far would have reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specc.speculation.sharpness import expected_gain

# that are tried, about a sixth apart
FACTORS = (
    0.3, 0.35, 0.42, 0.5, 0.6, 0.7, 0.85, 1.0, 1.15, 1.35, 1.6, 1.9, 2.2, 2.6, 3.0, 4.0,
)  # fmt: skip
# standard errors by which one has to be better than what stands
_MARGIN = 2.0

# factor → of each output, the rank of each of its tokens among the draft's children
Ranks = Mapping[float, Sequence[Sequence[int]]]


def choose_factors(ranks: Ranks, depth: int) -> list[float]:
    """β of depth 1, 2, …: the factor of the depth before, or one that is better beyond chance.

    Args:
        ranks: of the factors that are tried, 1 among them; rank 0 is a first child.
        depth: levels at most.
    """
    roots = [(i, root) for i, line in enumerate(ranks[1.0]) for root in range(len(line))]
    found: list[float] = []
    best = 1.0
    for level in range(depth):
        places = [(i, root + level) for i, root in roots if root + level < len(ranks[1.0][i])]
        hits = {
            factor: [lines[i][place] == 0 for i, place in places] for factor, lines in ranks.items()
        }
        # of equal ones that which changes less
        other = max(hits, key=lambda factor: (sum(hits[factor]), -abs(factor - best)))
        if expected_gain(hits[other], hits[best]) > _MARGIN:
            best = other
        found.append(best)
        is_right = dict(zip(places, hits[best], strict=True))
        roots = [(i, root) for i, root in roots if is_right.get((i, root + level), False)]
    return found


def chains_with(ranks: Ranks, factors: Sequence[float]) -> list[list[int]]:
    """Ranks of the tokens after each place of the outputs, each by the factor of its depth.

    Args:
        factors: by depth.
    """
    return [
        [ranks[factor][i][root + level] for level, factor in enumerate(factors)
         if root + level < len(line)]
        for i, line in enumerate(ranks[1.0])
        for root in range(len(line))
    ]  # fmt: skip
