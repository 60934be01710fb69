"""Let arithmetic with the places of tokens in a pass read their positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from specc.passes.base import Pass, PassResult
from specc.passes.facts import attention_is_a_tree
from specc.passes.program import Program, bind_args

aten = torch.ops.aten


class ReadPlaces(Pass):
    """`arange(tokens)`, converted to floats → `positions`.

    Models that scale something by how far a sequence has come count 0, 1, 2, … over the tokens of
    a pass, and add the rows that their own cache has. Of a sequence that begins in the pass, as in
    a trace, that is each token's position, and positions say it of a part of a sequence, too.

    Only floats are arithmetic with places. Integers may sort, or name rows: what a model looks up
    by places in a table of positions is left, and refused by the proof that keeps tokens apart, as
    the length of such a table would bound the sequence.
    """

    requires = (attention_is_a_tree,)
    ensures = (attention_is_a_tree,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        positions = program.placeholder("positions")
        for node in program.calls(aten.to.dtype):
            source = counted(node.args[0])
            if source is None or not node.meta["val"].dtype.is_floating_point:
                continue
            value, places = source.meta["val"], positions.meta["val"]
            is_of_tokens = value.dim() == 1 and str(value.shape[0]) == str(places.shape[0])
            if not is_of_tokens:
                result.decline(node.name, f"it counts to {value.shape[0]}, not over tokens")
                continue
            if value.dtype != places.dtype:
                result.decline(node.name, f"places of {value.dtype}")
                continue
            node.replace_input_with(node.args[0], positions)
            result.rewrites += 1
        program.graph.eliminate_dead_code()
        return result


def counted(node: Any) -> fx.Node | None:
    """The values 0, 1, 2, … that this is, if it is that."""
    while isinstance(node, fx.Node) and node.target is aten.add.Tensor:
        bound = bind_args(node)
        if type(bound["other"]) is not int or bound["other"] != 0:
            return None
        node = bound["self"]
    is_plain = (
        isinstance(node, fx.Node) and node.target is aten.arange.default and len(node.args) == 1
    )
    return node if is_plain else None
