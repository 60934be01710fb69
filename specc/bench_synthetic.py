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
from specc.plans import SpecPlan
from specc.runtime.program import StepValues
from specc.tree import TokenTree


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
    """Edits the target's logits between verification and acceptance.

    Set as `before_accept` of a step program. For each sequence it walks from the root down; at
    every node one draw says which child is accepted, or that none is, and the logits of the node
    are made to agree. Siblings that the plan does not have count as rejected. The last node keeps
    its logits, so the bonus token is the target's.

    Args:
        probabilities: of the first, second, … sibling.
        plan: whose tree the logits belong to.
        seed: of the draws; the same seed gives the same acceptance.
    """

    def __init__(self, probabilities: Sequence[float], plan: SpecPlan, seed: int = 0) -> None:
        self.seconds = 0.0
        self._bounds = list(itertools.accumulate(probabilities))
        self._random = random.Random(seed)
        parents = plan.tree.parents
        self._children: list[list[int]] = [[] for _ in parents]
        for node, parent in enumerate(parents[1:], start=1):
            self._children[parent].append(node)

    def __call__(self, values: StepValues) -> None:
        begin = time.perf_counter()
        tokens = values["tokens"].tolist()
        logits = values["logits"]
        for b, row in enumerate(tokens):
            self._walk(logits[b * len(row) : (b + 1) * len(row)], row)
        self.seconds += time.perf_counter() - begin

    def _walk(self, logits: Tensor, tokens: Sequence[int]) -> None:
        node = 0
        while children := self._children[node]:
            rank = self._draw()
            if rank is None or rank >= len(children):
                logits[node, _other_token(logits[node], [tokens[c] for c in children])] = _CERTAIN
                return
            logits[node, tokens[children[rank]]] = _CERTAIN
            node = children[rank]

    def _draw(self) -> int | None:
        value = self._random.random()
        return next((rank for rank, bound in enumerate(self._bounds) if value < bound), None)


_CERTAIN = float("inf")


def _other_token(logits: Tensor, taken: Sequence[int]) -> int:
    """The target's best token that no child carries."""
    best = logits.topk(min(len(taken) + 1, len(logits))).indices.tolist()
    return next(token for token in best if token not in taken)


def make_hook(
    probabilities: Sequence[float] | None, plan: SpecPlan
) -> Callable[[], SyntheticAcceptance] | None:
    """A maker of fresh hooks, one for each run; None where the plan does not speculate."""
    if probabilities is None or not plan.speculates:
        return None
    return lambda: SyntheticAcceptance(probabilities, plan)
