"""Heads that are asked level by level and read hidden states: EAGLE-3 heads and MTP modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from specc.drafters.drafter import Drafter
from specc.passes.drafters.compiler_drafter import CompilerDrafter
from specc.passes.drafters.model import ModelGrower
from specc.passes.program import RowInput
from specc.passes.rewrite.read_features import IS_TAPPED, OWN_FEATURES, TAPPED
from specc.passes.step.proposer import Proposer
from specc.passes.step.step_graph import StepGraph, int32
from specc.speculation.plans import SpecPlan
from specc.speculation.tree import TokenTree

aten = torch.ops.aten


class HeadGrower(ModelGrower):
    """Reads the target's features of the token before each of its own, and overwrites what it has
    drafted from features of its own.

    Its rows are one behind the target's: `rows_before` is the one that pairs the target's features
    of the last committed token with the root.
    """

    def __init__(self, drafter: Drafter, num_first: int, rows_before: fx.Node) -> None:
        super().__init__(drafter, num_first, rows_before)
        self.rows_before = rows_before

    def first_features(self, g: StepGraph, slots: fx.Node) -> list[fx.Node]:
        return [feature_rows(g, slots, is_own=False)]

    def features(self, g: StepGraph, parents: fx.Node | None) -> list[fx.Node]:
        assert parents is not None, "a head reads what its parents hand on"
        # below 0 where a sequence is padding
        above = g.call(aten.unsqueeze.default, self.length, 1)
        above = g.flat(g.call(aten.add.Tensor, above, parents))
        return [feature_rows(g, above, is_own=True)]

    def parents_of(
        self, g: StepGraph, name: str, tree: TokenTree, nodes: list[int]
    ) -> fx.Node | None:
        """The draft's row of each one's parent, [count] int32."""
        return g.constant(f"{name}_parents", int32([tree.parents[node] for node in nodes]))

    def parents_of_best(self, g: StepGraph, rows: fx.Node, first: int) -> fx.Node:
        return rows


def feature_rows(g: StepGraph, rows: fx.Node, is_own: bool) -> fx.Node:
    """[Nt, 2] int32 of rows [Nt] that tokens read: the target's, or the head's own."""
    none = g.call(aten.full_like.default, rows, -1)
    return g.call(aten.stack.default, [none, rows] if is_own else [rows, none], 1)


class CompilerHead(CompilerDrafter):
    """Of all kinds of such heads."""

    def proposer(self, g: StepGraph, plan: SpecPlan, drafter: Drafter) -> Proposer:
        before = g.call(aten.sub.Tensor, g["cache_len"], 1)
        return HeadGrower(drafter, drafter.first_level(plan.catch_up), before)

    def rows(self, spec: Any, dtype: torch.dtype) -> tuple[RowInput, ...]:
        return (
            RowInput(TAPPED, spec.feature_columns, dtype),
            RowInput(OWN_FEATURES, spec.width, dtype),
            RowInput(IS_TAPPED, 1, torch.bool),
        )


DRAFTER = CompilerHead()
