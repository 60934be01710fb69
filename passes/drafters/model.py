"""Draft models: asked level by level, over a cache of their own."""

from __future__ import annotations

import torch
from torch import fx

from specc.drafters.drafter import Drafter
from specc.passes.drafters.compiler_drafter import CompilerDrafter
from specc.passes.drafters.draft_states import DraftStates
from specc.passes.step.draft_budget import draft_budget
from specc.passes.step.draft_dynamic import draft_dynamic
from specc.passes.step.draft_levels import draft_tree
from specc.passes.step.proposer import Grower, Proposals, Proposer
from specc.passes.step.step_graph import DRAFT_STATES, StepGraph
from specc.speculation.plans import SpecPlan
from specc.speculation.tree import TokenTree


class LevelGrower(Grower):
    """Proposes what its levels make."""

    def propose(self, g: StepGraph, plan: SpecPlan, column: int) -> Proposals:
        logits, tokens = draft_tree(g, self, plan, column)
        rows = q_rows_of(plan.tree_of(self.drafter))
        return Proposals(tokens, rows, logits=logits, confidence=self.confidence)

    def propose_best(self, g: StepGraph, plan: SpecPlan, root: fx.Node) -> dict[str, fx.Node]:
        return draft_dynamic(g, self, plan, root)

    def propose_budget(self, g: StepGraph, plan: SpecPlan, root: fx.Node) -> dict[str, fx.Node]:
        return draft_budget(g, self, plan, root)

    @property
    def confidence(self) -> list[fx.Node]:
        """See `Proposals`."""
        return []


class ModelGrower(LevelGrower):
    """A program with rows of a cache of its own.

    Args:
        drafter: what proposes.
        num_first: last tokens of a sequence that its first level reads.
        length: [B] int32 committed rows of its cache that a step begins with.
    """

    def __init__(self, drafter: Drafter, num_first: int, length: fx.Node) -> None:
        super().__init__(drafter)
        self.program, self.num_first, self.length = drafter.name, num_first, length
        # None: as many as of the target
        self.rows_before: fx.Node | None = None

    def first_level(self, g: StepGraph) -> fx.Node:
        """Feed the last tokens of each sequence causally.

        A draft model has not seen the leaf that the last step accepted, nor what only other drafts
        proposed. Feeding all that it can lack is idempotent and keeps the shape; tokens before the
        sequence have negative slots, which makes them dead. Where layers keep states, so are tokens
        that these have seen.
        """
        batch, count = g.batch, self.num_first
        nodes = g.arange(1 - count, 1, 1, torch.int32)
        slots, positions = g.rows(nodes, nodes, self.rows_before)
        states = DraftStates.of(g, self.program)
        if states is not None:
            slots = states.unseen(slots, count)
        total = g.multiple(batch, count)
        return g.model(
            self.program,
            g.flat(g.last(g["last_tokens"], count)),
            positions,
            g.arange(0, g.multiple(batch, count, 1), count, torch.int32),
            slots,
            self.length if states is None else states.seen,
            None,
            g["block_table"],
            g.arange(count - 1, total, count, torch.int64),
            *([] if states is None else [states.first]),
            *self.first_features(g, slots),
        )

    def first_features(self, g: StepGraph, slots: fx.Node) -> list[fx.Node]:
        """Rows of features of the first level's tokens, whose own rows are these."""
        return []

    def features(self, g: StepGraph, parents: fx.Node | None) -> list[fx.Node]:
        """Rows of features that nodes below it read."""
        return []

    def states(self, g: StepGraph) -> list[fx.Node]:
        """What nodes below the root are told of its layers' states, where they keep some."""
        return [g[DRAFT_STATES]] if self.program in g.stateful else []

    def adapters(self, g: StepGraph, count: int) -> list[fx.Node]:
        """Adapters of `count` nodes of each sequence, where its program takes some."""
        return []

    def slots(self, g: StepGraph, nodes: fx.Node, depths: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Rows of nodes, and their positions."""
        slots, positions = g.rows(nodes, depths, self.rows_before)
        return slots, positions

    def block_table(self, g: StepGraph) -> fx.Node:
        return g["block_table"]

    def feed_level(
        self,
        g: StepGraph,
        tokens: fx.Node,
        ancestors: fx.Node | None,
        first_slot: int | fx.Node,
        count: int,
        depth: int,
        parents: fx.Node | None = None,
    ) -> fx.Node:
        batch = g.batch
        if isinstance(first_slot, int):
            nodes = g.arange(first_slot, first_slot + count, 1, torch.int32)
        else:
            nodes = first_slot
        depths = g.call(torch.ops.aten.full_like.default, nodes, depth)
        slots, positions = self.slots(g, nodes, depths)
        features = self.features(g, parents)
        return g.model(
            self.program,
            g.flat(tokens),
            positions,
            g.arange(0, g.multiple(batch, count, 1), count, torch.int32),
            slots,
            self.length,
            ancestors,
            self.block_table(g),
            g.arange(0, g.multiple(batch, count), 1, torch.int64),
            *self.states(g),
            *self.adapters(g, count),
            *features,
        )


def q_rows_of(tree: TokenTree) -> list[int]:
    """Row of draft logits of each node's parent, counted over the nodes with children."""
    fed = [node for node in range(tree.num_nodes) if node not in tree.leaves]
    row = {node: i for i, node in enumerate(fed)}
    return [-1, *(row[parent] for parent in tree.parents[1:])]


class CompilerModel(CompilerDrafter):
    def proposer(self, g: StepGraph, plan: SpecPlan, drafter: Drafter) -> Proposer:
        return ModelGrower(drafter, drafter.first_level(plan.catch_up), g["cache_len"])


DRAFTER = CompilerModel()
