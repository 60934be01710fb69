"""The experts of mixtures: stored in blocks, and read by the CPU's own product of few rows."""

from __future__ import annotations

import dataclasses

from torch import fx

from specc.artifact.weight_layout import UNITS
from specc.kernels import ops
from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.lower.cpu.linear import inputs_of_blocks
from specc.passes.program import Program, bind_args, emit_call, replace
from specc.passes.quantize.quantize_experts import source_of
from specc.passes.rewrite.turn_stack import turn_stack


class PackExperts(Pass):
    """Weights of `specc.grouped_mm` → the same graph, the weights marked `in_blocks`.

    What a product reads is the transpose of an input [E, N, K]. An input [E, K, N] becomes one, see
    `Weight.is_turned`. What something else reads keeps its rows.
    """

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        seen: set[fx.Node] = set()
        for node in program.calls(ops.grouped_mm):
            source = source_of(bind_args(node)["weight"])
            if source not in seen:
                seen.add(source)
                with result.attempt(node.name):
                    _pack(program, source)
        return result


class LowerExperts(Pass):
    """`specc.grouped_mm(x, w, ends)` → `specc.grouped_linear`, where w is in blocks.

    The graph's inputs become the blocks themselves.
    """

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node, weight in inputs_of_blocks(program, 3):
            for read in list(node.users):
                for product in list(read.users):
                    _lower(product, node, weight.shape[1])
                    result.rewrites += 1
                program.graph.erase_node(read)
        for node in program.calls(ops.grouped_mm):
            result.decline(node.name, "its weight is not in blocks")
        return result


def _pack(program: Program, source: fx.Node) -> None:
    """Mark one weight.

    Raises:
        NoMatch: it keeps its rows.
    """
    weight = program.weights.get(source.target)  # type: ignore[arg-type]
    if weight is None:
        raise NoMatch("its weight is computed")
    if sum(other.key == weight.key for other in program.weights.values()) > 1:
        raise NoMatch("another input reads its weight, too")
    direct = [user for user in source.users if user.target is ops.grouped_mm]
    transposed = [user for user in source.users if source_of(user) is source]
    reads = [(user, source) for user in source.users if user not in transposed]
    reads += [(user, read) for read in transposed for user in read.users]
    for user, read in reads:
        if user.target is not ops.grouped_mm:
            raise NoMatch(f"{user.name} reads its weight, too")
        bound = bind_args(user)
        if bound["weight"] is not read or bound["x"] is read:
            raise NoMatch(f"{user.name} reads its weight as another argument")
        kinds = bound["x"].meta["val"].dtype, weight.dtype
        if kinds[0] not in UNITS or kinds[0] != kinds[1]:
            raise NoMatch(f"dtypes {kinds[0]}, {kinds[1]}")
    if direct and transposed:
        raise NoMatch("products read its weight and its transpose")
    if direct:
        weight = turn_stack(program, source, direct)
    program.weights[source.target] = dataclasses.replace(weight, in_blocks=True)  # type: ignore[index]


def unpack_experts(program: Program) -> None:
    """Undo the marks of `PackExperts`; which way a weight lies stays, and cuts go by it."""
    for name, weight in program.weights.items():
        if weight.in_blocks and len(weight.shape) == 3:
            program.weights[name] = dataclasses.replace(weight, in_blocks=False)


def _lower(product: fx.Node, blocks: fx.Node, outputs: int) -> None:
    bound = bind_args(product)
    with product.graph.inserting_before(product):
        operands = bound["x"], blocks, bound["ends"], outputs
        replace(product, emit_call(product.graph, ops.grouped_linear, *operands))
