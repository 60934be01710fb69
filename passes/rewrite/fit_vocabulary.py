"""Fit a draft to the target's vocabulary where the two are padded to other sizes."""

from __future__ import annotations

import torch

from specc.passes.base import Pass, PassResult
from specc.passes.facts import logits_are_selected
from specc.passes.program import Program, emit_call

aten = torch.ops.aten


class FitVocabulary(Pass):
    """Cut logits of ids that the target does not have; read ids that the draft lacks as its last.

    Both keep greedy output unchanged: a draft only proposes. Without them a padded draft could
    propose an id past the target's embedding, or the target emit one past the draft's.

    Args:
        num_ids: rows of the target's vocabulary projection.
    """

    requires = (logits_are_selected,)

    def __init__(self, num_ids: int) -> None:
        self.num_ids = num_ids

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        graph = program.graph
        (output,) = graph.find_nodes(op="output")
        own = int(program.logits.meta["val"].shape[-1])
        if own > self.num_ids:
            with graph.inserting_before(output):
                cut = emit_call(graph, aten.slice.Tensor, program.logits, 1, 0, self.num_ids)
            program.logits = cut
            result.rewrites += 1
        elif own < self.num_ids:
            tokens = program.placeholder("tokens")
            first = next(node for node in graph.nodes if node.op != "placeholder")
            with graph.inserting_before(first):
                known = emit_call(graph, aten.clamp.default, tokens, 0, own - 1)
            tokens.replace_all_uses_with(known, delete_user_cb=lambda user: user is not known)
            result.rewrites += 1
        else:
            result.decline("tokens", "both models have the same number of ids")
        return result
