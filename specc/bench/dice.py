"""Acceptance by dice: the target's choice at each node is replaced, so that drafts do not matter.

What a step costs depends on its shape, how much it yields on the draft. With acceptance drawn from
given probabilities, the same engine shows its speed at any acceptance, also of drafts that do not
exist yet.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from specc.errors import ConfigError
from specc.runtime.backends.program import StepValues
from specc.speculation.plans import SpecPlan
from specc.speculation.tree import TokenTree


def parse_probabilities(text: str) -> tuple[float, ...]:
    """Probabilities of the first, second, … sibling, such as `0.7,0.1`.

    Raises:
        ConfigError: no numbers, one outside 0 … 1, or a sum above 1.
    """
    do = "for example --synthetic-acceptance 0.7,0.1,0.05"
    try:
        probabilities = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--synthetic-acceptance {text}", "numbers separated by commas", do
        ) from error
    if not all(0 <= p <= 1 for p in probabilities):
        raise ConfigError(f"--synthetic-acceptance {text}", "probabilities, each in 0 … 1", do)
    total = sum(probabilities)
    if total > 1 + 1e-9:
        raise ConfigError(
            f"--synthetic-acceptance {text}, {total:g} in sum",
            "at most 1 in sum: one of the siblings is accepted, or none",
            do,
        )
    return probabilities


def expected_length(probabilities: Sequence[float], tree: TokenTree) -> float:
    """Mean acceptance length that the dice lead to, bonus token included."""
    reached = [1.0]
    for node, parent in enumerate(tree.parents[1:], start=1):
        rank = tree.children(parent).index(node)
        chance = probabilities[rank] if rank < len(probabilities) else 0.0
        reached.append(reached[parent] * chance)
    return sum(reached)


class SyntheticAcceptance:
    """Edits what the target wants between verification and acceptance.

    Set as `before_accept` of a step program. For each sequence it walks from the root down; at
    every node one draw says which child is accepted, or that none is, and the logits of the node
    are made to agree; of a plan in tiles, whose logits are gone by then, its winner is. Siblings
    that the plan does not have count as rejected. The last node keeps what it has, so the bonus
    token is the target's.

    Args:
        probabilities: of the first, second, … sibling.
        plan: whose tree is verified.
        seed: of the draws; the same seed gives the same acceptance.
    """

    def __init__(self, probabilities: Sequence[float], plan: SpecPlan, seed: int = 0) -> None:
        self.seconds = 0.0
        self._bounds = list(itertools.accumulate(probabilities))
        self._random = random.Random(seed)
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
            for one, row in zip(found, tokens, strict=True):
                self._walk(one, row)
            values["winners"] = winners.new_tensor([one.tokens for one in found])
        else:
            logits = values["logits"]
            for b, row in enumerate(tokens):
                self._walk(_Logits(logits[b * len(row) : (b + 1) * len(row)]), row)
        self.seconds += time.perf_counter() - begin

    def _walk(self, wanted: _Logits | _Winners, tokens: Sequence[int]) -> None:
        node = 0
        while children := self._children[node]:
            rank = self._draw()
            if rank is None or rank >= len(children):
                wanted.refuse(node, [tokens[child] for child in children])
                return
            wanted.choose(node, tokens[children[rank]])
            node = children[rank]

    def _draw(self) -> int | None:
        value = self._random.random()
        return next((rank for rank, bound in enumerate(self._bounds) if value < bound), None)


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
