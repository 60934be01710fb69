"""Acceptance by dice: the target's choice at each node is replaced, so that drafts do not matter.

What a step costs depends on its shape, how much it yields on the draft. With acceptance drawn from
given probabilities, the same engine shows its speed at any acceptance, also of drafts that do not
exist yet.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor

from specc.cost.dice import StepEnds, even_quantile
from specc.runtime.backends.step_io import StepValues
from specc.speculation.plans import SpecPlan


class SyntheticAcceptance:
    """Edits what the target wants between verification and acceptance.

    Set as `before_accept` of a step program. For each request dice say where its step ends, and
    the logits of the nodes down to there are made to agree; of a plan in tiles, whose logits are
    gone by then, their winners are. Siblings that the plan does not have count as rejected. A leaf
    keeps what it has, so the bonus token is the target's.

    Args:
        probabilities: of the first, second, … sibling.
        seed: of the dice; the same seed gives the same acceptance.
    """

    def __init__(self, probabilities: Sequence[float], plan: SpecPlan, seed: int = 0) -> None:
        self.seconds = 0.0
        self._ends = StepEnds(plan.tree, [probabilities])
        self._start = random.Random(seed).random()
        self._num_steps = 0
        self._is_tiled = plan.tile is not None
        parents = plan.tree.parents
        self._children: list[list[int]] = [[] for _ in parents]
        for node, parent in enumerate(parents[1:], start=1):
            self._children[parent].append(node)

    def __call__(self, values: StepValues) -> None:
        begin = time.perf_counter()
        tokens = values["tokens"].tolist()
        if self._is_tiled:
            winners = values["winners"]
            found = [_Winners(own) for own in winners.tolist()]
            for b, (one, row) in enumerate(zip(found, tokens, strict=True)):
                self._edit(one, row, self._draw(b, len(tokens)))
            values["winners"] = winners.new_tensor([one.tokens for one in found])
        else:
            logits = values["logits"]
            for b, row in enumerate(tokens):
                own = _Logits(logits[b * len(row) : (b + 1) * len(row)])
                self._edit(own, row, self._draw(b, len(tokens)))
        self._num_steps += 1
        self.seconds += time.perf_counter() - begin

    def _edit(self, wanted: _Logits | _Winners, tokens: Sequence[int], path: list[int]) -> None:
        """Let the nodes of a path be accepted, and no child of its last one."""
        for node, child in pairwise(path):
            wanted.choose(node, tokens[child])
        if children := self._children[path[-1]]:
            wanted.refuse(path[-1], [tokens[child] for child in children])

    def _draw(self, place: int, num_places: int) -> list[int]:
        """Nodes that a request's step accepts."""
        return self._ends.path(even_quantile(self._start, self._num_steps, place, num_places))


_CERTAIN = float("inf")


class _Logits:
    """The target's logits [N, V] of one tree, edited in place."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def choose(self, node: int, token: int) -> None:
        self._logits[node, token] = _CERTAIN

    def refuse(self, node: int, taken: Sequence[int]) -> None:
        """The target's best token that no child carries."""
        row = self._logits[node]
        best = row.topk(min(len(taken) + 1, len(row))).indices.tolist()
        self.choose(node, next(token for token in best if token not in taken))


class _Winners:
    """The target's tokens [N] after the nodes of one tree."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def choose(self, node: int, token: int) -> None:
        self.tokens[node] = token

    def refuse(self, node: int, taken: Sequence[int]) -> None:
        """The target's own token, or else the first that no child carries."""
        own = [self.tokens[node], *range(len(taken) + 1)]
        self.choose(node, next(token for token in own if token not in taken))


def make_hook(
    probabilities: Sequence[float] | None, plan: SpecPlan
) -> Callable[[], SyntheticAcceptance] | None:
    """A maker of fresh hooks, one for each run; None where the plan does not speculate."""
    if probabilities is None or not plan.speculates:
        return None
    return lambda: SyntheticAcceptance(probabilities, plan)
