"""Dice of acceptance: where in a tree steps end, of numbers that are spread evenly.

Independent numbers would leave an error of about 10% in the mean length of 30 steps. Evenly spaced
ones give every path its odds in the long run, and a mean close to the expected one in a short run.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

from specc.cost.acceptance import node_acceptance
from specc.speculation.tree import TokenTree

# the multiples of this, modulo 1, fill the unit interval as evenly as those of any number: every
# stretch of them does, so it matters little how many steps are averaged
_GOLDEN = (math.sqrt(5) - 1) / 2


def even_quantile(start: float, step: int, place: int, num_places: int) -> float:
    """The number in [0, 1) that a step takes.

    The steps of one request are spread evenly, and so are those that a batch takes together.

    Args:
        start: of step 0 at place 0.
        step: 0, 1, …
        place: of the request in its batch.
    """
    return (start + place / num_places + step * _GOLDEN) % 1


class StepEnds:
    """Where in a tree a step ends, as a random variable.

    Args:
        acceptance: by depth and sibling rank; see specc/cost/acceptance.py. A rank that a node
            lacks is rejected.
    Raises:
        ConfigError: acceptance that is no table of probabilities.
    """

    def __init__(self, tree: TokenTree, acceptance: Sequence[Sequence[float]]) -> None:
        self.tree = tree
        reached, ended = [1.0], [1.0]
        shares = node_acceptance(tree, acceptance)
        for parent, share in zip(tree.parents[1:], shares[1:], strict=True):
            reached.append(reached[parent] * share)
            ended.append(reached[-1])
            ended[parent] -= reached[-1]
        # the deepest first: steps that accept d tokens or more are one interval from 0
        possible = (node for node in range(tree.num_nodes) if ended[node] > 1e-12)
        self._nodes = sorted(possible, key=lambda node: -tree.depths[node])
        self._bounds = list(itertools.accumulate(ended[node] for node in self._nodes))
        self.mean_length = sum(reached)

    def at(self, quantile: float) -> int:
        """The node where a step ends, of a number in [0, 1)."""
        index = bisect.bisect_right(self._bounds, quantile)
        return self._nodes[min(index, len(self._nodes) - 1)]

    def length(self, quantile: float) -> int:
        """Tokens that the step emits, bonus token included."""
        return 1 + self.tree.depths[self.at(quantile)]

    def path(self, quantile: float) -> list[int]:
        """Accepted nodes from the root to the end."""
        node = self.at(quantile)
        nodes = [node]
        while node > 0:
            node = self.tree.parents[node]
            nodes.append(node)
        return nodes[::-1]
