"""Let a draft of another vocabulary, or of another number of ids, speak the target's token ids.

The two may have the same tokens, and be padded to different numbers of ids.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from specc.passes.base import Pass, PassResult
from specc.passes.facts import logits_are_selected
from specc.passes.program import Program, add_placeholder, emit_call
from specc.speculation.vocabulary_map import INPUTS, LACKING, OUTPUTS, VocabularyMap

aten = torch.ops.aten


class MapVocabulary(Pass):
    """tokens → draft ids before the first use; logits [R, own] → [R, V] in target ids.

    A target id that no draft id means has -inf, before any noise is added: to rules and trees it is
    a token of probability 0, as one that a filter has removed. Where several draft ids mean one
    token, it has the largest of their logits: which of them a context makes likely depends on the
    draft's own tokenizer, and the first one alone may be one that it never emits.

    Args:
        num_ids: V, rows of the target's vocabulary projection.
    """

    requires = (logits_are_selected,)
    ensures = (logits_are_selected,)

    def __init__(self, vocabulary: VocabularyMap, num_ids: int) -> None:
        self._vocabulary, self._num_ids = vocabulary, num_ids

    def run(self, program: Program) -> PassResult:
        graph, result = program.graph, PassResult()
        (output,) = graph.find_nodes(op="output")
        logits, tokens = program.logits, program.placeholder("tokens")
        sizes = self._num_ids, int(logits.meta["val"].shape[-1])
        table = _constant(program, INPUTS, self._vocabulary.inputs(*sizes))
        first = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(first):
            own = emit_call(graph, aten.index.Tensor, table, [tokens])
        tokens.replace_all_uses_with(own, delete_user_cb=lambda user: user is not own)
        ids, known = self._vocabulary.outputs(*sizes)
        columns = [
            _constant(program, OUTPUTS + (f"_{rank}" if rank else ""), row)
            for rank, row in enumerate(ids)
        ]
        mask = _constant(program, LACKING, ~known)
        with graph.inserting_before(output):
            best, *others = (
                emit_call(graph, aten.index_select.default, logits, 1, c) for c in columns
            )
            for other in others:
                best = emit_call(graph, aten.maximum.default, best, other)
            found = emit_call(graph, aten.masked_fill.Scalar, best, mask, -torch.inf)
        program.logits = found
        result.rewrites += 2
        return result


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


def fits_target(vocabulary: VocabularyMap | None, num_ids: int) -> Pass:
    """The pass that has a draft take and propose the V ids of its target."""
    if vocabulary is None:
        return FitVocabulary(num_ids)
    return MapVocabulary(vocabulary, num_ids)


def _constant(program: Program, name: str, value: Tensor) -> fx.Node:
    """An input that is this constant, before those that a pass brings."""
    inputs = program.graph.find_nodes(op="placeholder")
    first = next(node for node in inputs if node.target in program.runtime_inputs)
    fake = program.placeholder("tokens").meta["val"].new_empty(value.shape, dtype=value.dtype)
    node = add_placeholder(program, name, fake, first.prev)
    program.constants[name] = value.contiguous()
    return node
