"""Let dice accept draft tokens inside of a step: a variant of `fuse_step` for benchmarks alone.

What a step costs follows from its shape, what it yields from the draft. With acceptance drawn from
given probabilities a step of random weights shows its speed at any acceptance. A hook of the host
between verification and acceptance would cut the step into several graphs and read tokens back;
the stage `draw` added here is four small operators and leaves the step in one piece.

The draws are made beforehand, one for each row of a sequence and place in the batch, and a step
looks up those of the row that each sequence has reached: nothing counts steps, nothing depends on
what was generated, and a run that is repeated draws the same. More rounds therefore average
nothing, so the draws themselves are even (specc/cost/dice.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from specc.cost.dice import StepEnds, even_quantile
from specc.passes.step.fuse_step import StepProgram
from specc.speculation.tree import TokenTree

aten = torch.ops.aten

STAGE = "draw"
VALUES, PARENTS = "draw_values", "draw_parents"
# sequences whose start is tried: many starts of a single one, one of a large batch
_TRIED = 64


@dataclass(frozen=True)
class DrawnAcceptance:
    """Where each sequence's walk goes, ahead of time.

    Step k of sequence b takes an even quantile from `shift` on. Rows that no walk from `start`
    reaches have draws too, independent ones.

    Args:
        probabilities: of the first, second, … sibling; a sibling that a node lacks is rejected.
        max_batch: sequences of a step at most.
        period: committed rows after which the draws of a sequence repeat: the tokens that a
            sequence is to grow by.
        start: committed rows of a sequence before its first step.
        seed: the same seed gives the same draws.
    """

    tree: TokenTree
    probabilities: tuple[float, ...]
    max_batch: int
    period: int
    start: int = 0
    seed: int = 0

    @cached_property
    def ends(self) -> StepEnds:
        return StepEnds(self.tree, [self.probabilities])

    @cached_property
    def shift(self) -> float:
        """The start that gives the mean nearest to the expected one, of several."""
        chance = random.Random(self.seed)
        tried = [chance.random() for _ in range(max(1, _TRIED // self.max_batch))]
        return min(tried, key=self.deviation)

    def quantiles(self, place: int, shift: float) -> Iterator[float]:
        """Of step 0, 1, … of the sequence at a place of the batch; without end."""
        size = self.max_batch
        return (even_quantile(shift, step, place, size) for step in itertools.count())

    def deviation(self, shift: float) -> float:
        """How far the mean length is off where a benchmark takes it, in tokens; the worse of two.

        Over as many steps as fit if all is accepted, and over the steps that emit `period` tokens;
        prefill yields the first of these, and the last step is cut.
        """
        fewest = max(1, self.period // (self.tree.max_depth + 1))
        wanted = max(1, self.period - 1)
        first_tokens = num_steps = 0
        for place in range(self.max_batch):
            total = 0
            for step, quantile in enumerate(self.quantiles(place, shift)):
                if total >= wanted and step >= fewest:
                    break
                length = self.ends.length(quantile)
                first_tokens += length if step < fewest else 0
                num_steps += total < wanted
                total += length
        means = (first_tokens / (fewest * self.max_batch), wanted * self.max_batch / num_steps)
        return max(abs(mean - self.ends.mean_length) for mean in means)

    def accepted(self) -> list[list[bool]]:
        """Whether a node is accepted: [max_batch * period][N - 1], without the root.

        Sequence b with n committed rows takes row b * period + n % period.
        """
        chance = random.Random(self.seed)
        rows = []
        for place in range(self.max_batch):
            # row i after the start; those that the walk does not reach stay independent
            values = [chance.random() for _ in range(self.period)]
            row = 0
            for quantile in self.quantiles(place, self.shift):
                if row >= self.period:
                    break
                values[row] = quantile
                row += self.ends.length(quantile)
            begin = self.start % self.period
            turned = values[self.period - begin :] + values[: self.period - begin]
            rows += [self._wins(value) for value in turned]
        return rows

    def _wins(self, quantile: float) -> list[bool]:
        """Whether a node is accepted: [N - 1], without the root."""
        wins = [False] * self.tree.num_nodes
        for node in self.ends.path(quantile):
            wins[node] = True
        return wins[1:]


def draw_acceptance(
    step: StepProgram,
    probabilities: Sequence[float],
    *,
    max_batch: int,
    period: int,
    dtype: torch.dtype,
    start: int = 0,
    seed: int = 0,
) -> StepProgram:
    """A step whose acceptance is drawn; draft, verification, acceptance and commit stay.

    The target's logits of the child that a draw accepts become so large that no other token has
    any probability left, those of its siblings so small that they have none: the target's choice,
    greedy or drawn, is that child, or, where none is accepted, a token that no child carries.
    Leaves keep their logits, so the bonus token is the target's.

    Args:
        probabilities: of the first, second, … sibling; at most 1 in sum.
        max_batch: sequences of a step at most.
        period: tokens that a sequence is to grow by; draws repeat after as many rows.
        dtype: of the target's logits.
        start: committed rows of a sequence before its first step; walks from there are even.
    """
    tree = step.plan.tree
    assert tree.num_nodes > 1, "plan off has nothing to accept"
    assert step.plan.tile is None, "a plan in tiles has no logits to edit"
    assert period > 0
    assert max_batch * period < 1 << 31, "rows are int32"
    draws = DrawnAcceptance(tree, tuple(probabilities), max_batch, period, start, seed)
    won = torch.tensor(draws.accepted())
    # infinite ones have no difference, of which probabilities are made; a temperature divides it
    far = torch.finfo(dtype).max / 8
    values = torch.where(won, far, -far).to(dtype)
    constants = {VALUES: values, PARENTS: torch.tensor(tree.parents[1:], dtype=torch.int64)}
    stages = {}
    for name, graph in step.stages.items():
        if name == "accept_commit":
            stages[STAGE] = _draw_stage(tree.num_nodes, period)
        stages[name] = graph
    return dataclasses.replace(step, constants=step.constants | constants, stages=stages)


def _draw_stage(num_nodes: int, period: int) -> fx.Graph:
    """Edit the logits [B * N, V] in place, on the device, whatever the batch is."""
    graph = fx.Graph()
    names = ("cache_len", "tokens", "logits", VALUES, PARENTS)
    cache_len, tokens, logits, values, parents = map(graph.placeholder, names)

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return graph.call_function(target, args, kwargs)

    def arange(end: Any, step: int, dtype: torch.dtype) -> fx.Node:
        device = torch.device("cpu")
        return call(aten.arange.start_step, 0, end, step, dtype=dtype, device=device)

    batch = call(aten.sym_size.int, cache_len, 0)
    # padding has negative lengths: the remainder of torch has the sign of the divisor
    row = call(aten.remainder.Scalar, cache_len, period)
    starts = arange(call(operator.mul, batch, period), period, torch.int32)
    drawn = call(aten.index_select.default, values, 0, call(aten.add.Tensor, row, starts))
    children = call(aten.slice.Tensor, tokens, 1, 1, num_nodes)
    roots = arange(call(operator.mul, batch, num_nodes), num_nodes, torch.int64)
    nodes = call(aten.add.Tensor, call(aten.unsqueeze.default, roots, 1), parents)
    call(aten.index_put_.default, logits, [nodes, children], drawn)
    graph.output({})
    graph.lint()
    return graph
