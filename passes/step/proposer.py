"""What the draft stage asks of a plan's drafts: trees that they propose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from specc.drafters.drafter import Drafter
from specc.passes.step.step_graph import StepGraph
from specc.speculation.plans import SpecPlan
from specc.speculation.tree import TokenTree

aten = torch.ops.aten


@dataclass
class Proposals:
    """What one draft proposes.

    Args:
        tokens: [B, n] int64, the root first.
        q_rows: of each node, which row of logits it was drawn from; -1 is none.
        parents: [B, n] int32; None of a static tree.
        logits: [B * F, V] of each level.
        confidence: how likely the target accepts a child of nodes, where the draft says that.
    """

    tokens: fx.Node
    q_rows: list[int]
    parents: fx.Node | None = None
    logits: list[fx.Node] = field(default_factory=list)
    confidence: list[fx.Node] = field(default_factory=list)


class Proposer(ABC):
    """A draft in the draft stage of a plan.

    Args:
        drafter: what proposes.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    @abstractmethod
    def propose(self, g: StepGraph, plan: SpecPlan, column: int) -> Proposals:
        """A tree of the plan's static shape.

        Args:
            g: the stage.
            plan: whose shape it is.
            column: proposal column of the root; the other nodes' follow.
        """

    def propose_best(self, g: StepGraph, plan: SpecPlan, root: fx.Node) -> dict[str, fx.Node]:
        """The nodes that it finds likeliest below a root [B, 1]; outputs as of `draft_stage`."""
        raise NotImplementedError(f"{self.drafter.name} has no dynamic trees")

    def propose_budget(self, g: StepGraph, plan: SpecPlan, root: fx.Node) -> dict[str, fx.Node]:
        """Levels of static sizes, shared out below a root [B, 1]; outputs as of `draft_stage`."""
        raise NotImplementedError(f"{self.drafter.name} has no dynamic trees")


class Grower(Proposer):
    """A draft that is asked level by level."""

    # whether `feed_level` reads rows of caches: slots and ancestors of its nodes
    reads_rows = True

    @abstractmethod
    def first_level(self, g: StepGraph) -> fx.Node:
        """Logits [B, V] of the children of the root."""

    @abstractmethod
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
        """Feed `count` nodes of one depth; returns their logits [B * count, V].

        Args:
            g: the stage.
            tokens: [B, count].
            ancestors: [B * count, W]; None where it reads no rows.
            first_slot: the draft's row of the first node, the others after it; or all rows,
                [count].
            count: nodes of a sequence.
            depth: of all of them.
            parents: what `parents_of` or `parents_of_best` says of them.
        """

    def parents_of(
        self, g: StepGraph, name: str, tree: TokenTree, nodes: list[int]
    ) -> fx.Node | None:
        """What it reads of the parents of some nodes of one depth of a static tree."""
        return None

    def parents_of_best(self, g: StepGraph, rows: fx.Node, first: int) -> fx.Node | None:
        """The same of a level of a dynamic tree.

        Args:
            g: the stage.
            rows: [B, k] int32 of the parents. Nodes of a level have rows one after the other.
            first: row of the first node of the level above; 0 is the root's.
        """
        return None


def places_above(tree: TokenTree, nodes: list[int]) -> Tensor:
    """[n] int64: which of the nodes with children, of the depth above, is the parent of each."""
    leaves = set(tree.leaves)
    above = [node for node in tree.levels[tree.depths[nodes[0]] - 1] if node not in leaves]
    return torch.tensor([above.index(tree.parents[node]) for node in nodes])


def chain_of(g: StepGraph, proposals: fx.Node, num_nodes: int) -> list[fx.Node]:
    """Tokens and parents of chains [B, L] that end with -1."""
    alive = g.call(aten.ge.Scalar, proposals, 0)
    above = g.arange(0, num_nodes - 1, 1, torch.int32)
    parents = g.call(aten.where.ScalarOther, alive, above, -1)
    root = g.last(g["last_tokens"], 1)
    no_parent = g.call(aten.full_like.default, root, -1, dtype=torch.int32)
    tokens = g.cat(root, g.call(aten.clamp.default, proposals, 0))
    return [tokens, g.cat(no_parent, parents)]
