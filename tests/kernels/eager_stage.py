"""What builds a draft stage, run at once on tables of logits in place of a graph and models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from specc.drafters.registry import model_draft
from specc.passes.step.draft_budget import draft_budget
from specc.passes.step.proposer import Grower
from specc.passes.step.step_graph import StepGraph
from specc.speculation.dynamic_tree import BudgetTree
from specc.speculation.plans import SpecPlan
from tests.kernels.distribution import Proposals, State


class EagerStage(StepGraph):
    """A stage whose nodes are tensors: what is called is computed.

    Args:
        operators: namespace of specc's.
        values: of the environment.
    """

    def __init__(self, operators: Any, values: Mapping[str, Tensor]) -> None:
        # no graph: its inputs and nodes are never asked for
        self.is_padded, self.block_size, self.windowed = False, 0, ()
        self.operators, self.values = operators, dict(values)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def constant(self, name: str, value: Tensor) -> Any:
        return self.values.setdefault(name, value)

    def call(self, target: Callable, *args: Any, **kwargs: Any) -> Any:
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "specc":
            target = getattr(self.operators, target._schema.name.removeprefix("specc::"))
        return target(*args, **kwargs)


class TableGrower(Grower):
    """A draft model that is a table of logits after two tokens."""

    reads_rows = False

    def __init__(self, table: Tensor, last_tokens: Tensor) -> None:
        super().__init__(model_draft(0))
        # of the level that is asked about next: tokens before its nodes
        self.table, self.last_tokens = table, last_tokens
        self.above = last_tokens[:, -1:]

    def propose(self, g: StepGraph, plan: SpecPlan, column: int) -> Any:
        raise NotImplementedError

    def first_level(self, g: StepGraph) -> Any:
        return self.table[self.last_tokens[:, -2], self.last_tokens[:, -1]]

    def parents_of_best(self, g: StepGraph, rows: Any, first: int) -> Any:
        return rows.long() - first

    def feed_level(
        self,
        g: StepGraph,
        tokens: Any,
        ancestors: Any,
        first_slot: Any,
        count: int,
        depth: int,
        parents: Any = None,
    ) -> Any:
        before, self.above = self.above.gather(1, parents), tokens
        return self.table[before, tokens].flatten(0, 1)


def budget_tree(operators: Any, table: Tensor, levels: tuple[int, ...], state: State) -> Proposals:
    """Levels that are shared out, as steps do it."""
    names = {"sampling_values": state.values, "sampling_words": state.words}
    names |= {"cache_len": state.cache_len, "last_tokens": state.last_tokens}
    stage, plan = EagerStage(operators, names), SpecPlan.from_dynamic(BudgetTree.of(levels))
    root: Any = state.last_tokens[:, -1:]
    made: Any = draft_budget(stage, TableGrower(table, state.last_tokens), plan, root)
    return Proposals(
        made["tokens"],
        made["parents"],
        len(levels),
        made["image"],
        stage.values["q_rows"].tolist(),
        [made[f"q_{depth}"] for depth in range(len(levels))],
    )
