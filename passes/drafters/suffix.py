"""Proposals of the host's index."""

from __future__ import annotations

from specc.drafters.drafter import Drafter
from specc.passes.drafters.compiler_drafter import CompilerDrafter
from specc.passes.step.proposer import Proposals, Proposer, chain_of
from specc.passes.step.step_graph import PROPOSALS, StepGraph
from specc.speculation.plans import SpecPlan


class SuffixProposer(Proposer):
    """A chain that a step is given."""

    def propose(self, g: StepGraph, plan: SpecPlan, column: int) -> Proposals:
        num_nodes = plan.tree_of(self.drafter).num_nodes
        tokens, parents = chain_of(g, g[PROPOSALS], num_nodes)
        return Proposals(tokens, [-1] * num_nodes, parents)


class CompilerSuffix(CompilerDrafter):
    def proposer(self, g: StepGraph, plan: SpecPlan, drafter: Drafter) -> Proposer:
        return SuffixProposer(drafter)


DRAFTER = CompilerSuffix()
