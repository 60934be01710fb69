"""Let dice accept draft tokens inside of a step: a variant of `fuse_step` for benchmarks alone.

What a step costs follows from its shape, what it yields from the draft. With acceptance drawn from
given probabilities a step of random weights shows its speed at any acceptance. A hook of the host
between verification and acceptance would cut the step into several graphs and read tokens back;
the stage `draw` added here is four small operators and leaves the step in one piece.

The draws are made beforehand, one for each node of the tree, row of a sequence and place in the
batch, and a step looks up those of the row that each sequence has reached: nothing counts steps,
nothing depends on what was generated, and a run that is repeated draws the same.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from specc.passes.fuse_step import StepProgram
from specc.tree import TokenTree

aten = torch.ops.aten

STAGE = "draw"
VALUES, PARENTS = "draw_values", "draw_parents"


@dataclass(frozen=True)
class Draws:
    """Where each sequence's walk goes, ahead of time.

    Args:
        tree: of the plan.
        probabilities: of the first, second, … sibling; a sibling that a node lacks is rejected.
        max_batch: sequences of a step at most.
        period: committed rows after which the draws of a sequence repeat.
        seed: the same seed gives the same draws.
    """

    tree: TokenTree
    probabilities: tuple[float, ...]
    max_batch: int
    period: int
    seed: int = 0

    def accepted(self) -> list[list[bool]]:
        """Whether a node wins among its siblings: [max_batch * period][N - 1], without the root.

        Sequence b with n committed rows takes row b * period + n % period.
        """
        bounds = list(itertools.accumulate(self.probabilities))
        chance = random.Random(self.seed)
        families: dict[int, list[int]] = {}
        for node, parent in enumerate(self.tree.parents[1:], start=1):
            families.setdefault(parent, []).append(node)
        rows = []
        for _ in range(self.max_batch * self.period):
            row = [False] * (self.tree.num_nodes - 1)
            for siblings in families.values():
                value = chance.random()
                rank = next((i for i, bound in enumerate(bounds) if value < bound), len(siblings))
                if rank < len(siblings):
                    row[siblings[rank] - 1] = True
            rows.append(row)
        return rows


def draw_acceptance(
    step: StepProgram,
    probabilities: Sequence[float],
    *,
    max_batch: int,
    period: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> StepProgram:
    """A step whose acceptance is drawn; draft, verification, acceptance and commit stay.

    The target's logits of the child that a draw accepts become infinite, those of its siblings
    negatively so: the target's greedy choice is that child, or, where none is accepted, the best
    token that no child carries. Leaves keep their logits, so the bonus token is the target's.

    Args:
        step: of a plan that speculates.
        probabilities: of the first, second, … sibling; at most 1 in sum.
        max_batch: sequences of a step at most.
        period: rows after which draws repeat; longer than what a benchmark generates.
        dtype: of the target's logits.
        seed: of the draws.
    """
    tree = step.plan.tree
    assert tree.num_nodes > 1, "plan off has nothing to accept"
    assert period > 0
    assert max_batch * period < 1 << 31, "rows are int32"
    draws = Draws(tree, tuple(probabilities), max_batch, period, seed)
    won = torch.tensor(draws.accepted())
    values = torch.where(won, math.inf, -math.inf).to(dtype)
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
