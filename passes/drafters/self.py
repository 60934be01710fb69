"""Self-drafts: the target's program, or a second one of its layers, over the target's cache."""

from __future__ import annotations

import torch
from torch import fx

from specc.drafters.drafter import Drafter
from specc.passes.drafters.compiler_drafter import CompilerDrafter
from specc.passes.drafters.model import ModelGrower
from specc.passes.drafters.view_inputs import ViewInputs
from specc.passes.step.proposer import Proposer
from specc.passes.step.step_graph import STATES, TARGET, StepGraph
from specc.speculation.plans import SpecPlan


class SelfGrower(ModelGrower):
    """Reads and writes the target's cache.

    Args:
        drafter: what proposes.
        program: that is called.
        view: what it sees by another block table; None where it sees all, or cuts itself.
        length: [B] int32 committed rows of the target.
    """

    def __init__(
        self, drafter: Drafter, program: str, view: ViewInputs | None, length: fx.Node
    ) -> None:
        super().__init__(drafter, 1, length if view is None else view.cache_len)
        self.program, self.view = program, view

    def first_level(self, g: StepGraph) -> fx.Node:
        """Feed the root alone: of other tokens it would overwrite the target's rows with what it
        computes from less than they were computed from.
        """
        root = g.constant("view_root", torch.ones(1, 1, dtype=torch.int64))
        ancestors = g.repeat_rows(root, g.batch)
        return self.feed_level(g, g.last(g["last_tokens"], 1), ancestors, 0, 1, 0)

    def states(self, g: StepGraph) -> list[fx.Node]:
        """No node is certain, the root neither: the states are the target's, which folds it.

        Rows that nodes leave are written again by verification, as those of K and V are.
        """
        if TARGET not in g.stateful:
            return []
        places = g.column(g[STATES], 0, 1)
        return [g.cat(places, g.call(torch.ops.aten.full_like.default, places, 0))]

    def adapters(self, g: StepGraph, count: int) -> list[fx.Node]:
        """Those of verification, where it is the target's own program."""
        return g.adapter_rows(count) if self.program == TARGET else []

    def slots(self, g: StepGraph, nodes: fx.Node, depths: fx.Node) -> tuple[fx.Node, fx.Node]:
        slots, positions = super().slots(g, nodes, depths)
        if self.view is not None:
            slots, _ = g.rows(nodes, depths, self.view.cache_len)
        return slots, positions

    def block_table(self, g: StepGraph) -> fx.Node:
        return g["block_table"] if self.view is None else self.view.block_table


class CompilerSelf(CompilerDrafter):
    def proposer(self, g: StepGraph, plan: SpecPlan, drafter: Drafter) -> Proposer:
        """What a view sees is computed here, once for all levels."""
        cuts_itself = drafter.name in g.windowed
        program = drafter.name if cuts_itself or drafter.has_second_program else TARGET
        view = None if cuts_itself else ViewInputs.of(g, plan, drafter.view)
        return SelfGrower(drafter, program, view, g["cache_len"])


DRAFTER = CompilerSelf()
