"""Biases that are added to a part of a sum: one rank alone may add them.

A bias that nothing else reads is zero in the files of all ranks but the first, and the graph stays
as it is. One that something else reads, or that is computed, is needed on every rank: it is added
once more plainly, after the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import fx

from specc.passes.program import Program, bind_args, emit_call
from specc.passes.proof.token_routing import name_of

aten = torch.ops.aten


class PartBiases:
    """The biases of products that leave each rank a part of a sum.

    Args:
        program: before the cut.
        products: that may be such.
    """

    def __init__(
        self, program: Program, products: Iterable[fx.Node], is_part: Callable[[fx.Node], bool]
    ) -> None:
        biases = {
            node: bias for node in products if is_part(node) and (bias := bias_of(node)) is not None
        }
        inputs: dict[str, list[fx.Node]] = {}
        for node in program.graph.find_nodes(op="placeholder"):
            if node.target in program.weights:
                inputs.setdefault(program.weights[node.target].key, []).append(node)
        # inputs whose values only the first rank has
        self.first_only: set[str] = set()
        # products whose bias every rank has
        self.shared: list[fx.Node] = []
        for node, bias in biases.items():
            weight = program.weights.get(str(bias.target)) if bias.op == "placeholder" else None
            # inputs of one key are one tensor of the weight file
            same = inputs[weight.key] if weight is not None else []
            if same and all(_adds(user, same, biases) for item in same for user in item.users):
                self.first_only |= {str(item.target) for item in same}
            else:
                self.shared.append(node)


def bias_of(node: fx.Node) -> fx.Node | None:
    """What a product adds to its result."""
    given = bind_args(node)
    return given["self"] if name_of(node) == "addmm" else given.get("bias")


def add_after(program: Program, products: Iterable[fx.Node]) -> None:
    """Products with a bias → the same products without, and additions.

    The factors of `addmm` are 1: others have no rule, so that what they multiply is not cut.
    """
    graph = program.graph
    for node in products:
        bias, given = bias_of(node), bind_args(node)
        with graph.inserting_before(node):
            if name_of(node) == "addmm":
                product = emit_call(graph, aten.mm.default, given["mat1"], given["mat2"])
            else:
                product = emit_call(graph, aten.linear.default, given["input"], given["weight"])
            total = emit_call(graph, aten.add.Tensor, product, bias)
        node.replace_all_uses_with(total)
        graph.erase_node(node)


def _adds(user: fx.Node, same: Collection[fx.Node], biases: dict[fx.Node, fx.Node]) -> bool:
    """Whether a reader of a bias is such a product, and reads it as nothing else."""
    read = [item for item in user.args + tuple(user.kwargs.values()) if item in same]
    return user in biases and len(read) == 1 and biases[user] in same
