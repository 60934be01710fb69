"""Lookups of what a request had before, inside the step."""

from __future__ import annotations

import torch

from specc.drafters.drafter import Drafter
from specc.drafters.lookup import Lookup
from specc.passes.drafters.compiler_drafter import CompilerDrafter
from specc.passes.step.proposer import Proposals, Proposer
from specc.passes.step.step_graph import HISTORY, StepGraph
from specc.speculation.plans import SpecPlan


class LookupProposer(Proposer):
    """A chain that may end early."""

    def propose(self, g: StepGraph, plan: SpecPlan, column: int) -> Proposals:
        assert isinstance(self.drafter, Lookup)
        num_nodes = plan.tree_of(self.drafter).num_nodes
        tokens, parents = g.parts(
            torch.ops.specc.lookup.default,
            2,
            g[HISTORY], g["block_table"], g["cache_len"], g["last_tokens"],
            self.drafter.ngram, num_nodes - 1,
        )  # fmt: skip
        return Proposals(tokens, [-1] * num_nodes, parents)


class CompilerLookup(CompilerDrafter):
    def proposer(self, g: StepGraph, plan: SpecPlan, drafter: Drafter) -> Proposer:
        return LookupProposer(drafter)


DRAFTER = CompilerLookup()
