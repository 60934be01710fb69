"""Let outputs of a product that are read together lie together in its weight."""

from __future__ import annotations

import dataclasses

from torch import fx

from specc.artifact.fragments import HALF
from specc.artifact.quantized_layout import QuantizedLayout
from specc.kernels import ops
from specc.kernels.reference.products import gate_distance
from specc.passes.base import Pass, PassResult
from specc.passes.program import Program, bind_args
from specc.passes.rewrite.fuse_add_norm import distance_after, in_shape


class PairFragments(Pass):
    """Blocks of a weight in fragments get a gate's outputs and what they multiply, experts' too, or
    both halves of heads that are rotated (`specc.artifact.fragments`).

    What follows the product decides, not what is fused with it: programs that share a weight have
    the same behind it.
    """

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(ops.linear_q):
            blocks, outputs = node.args[1], node.args[3]
            weight = program.weights[blocks.target]  # type: ignore[union-attr]
            layout, readers = weight.quantized, list(blocks.users)  # type: ignore[union-attr]
            assert layout is not None
            if not layout.is_fragments or layout.distance != HALF:
                continue
            apart = [_distance(reader) for reader in readers]
            if None in apart:
                continue
            if len(set(apart)) > 1 or apart[0] % HALF or outputs % (2 * apart[0]):  # type: ignore[operator]
                result.decline(node.name, f"no blocks of {outputs} outputs {apart} apart")
                continue
            order = _pair(program, blocks, apart[0])  # type: ignore[arg-type]
            for reader in readers:
                reader.args = (*reader.args[:4], *order.facts)
                result.rewrites += 1
        for node in program.calls(ops.experts):
            bound = bind_args(node)
            if _is_unpaired(bound["gate_up_layout"]):
                distance = gate_distance(bound["activation"], bound["size"])
                order = _pair(program, bound["gate_up"], distance)
                place = list(bound).index("gate_up_layout")
                node.args = (*node.args[:place], order.name, *node.args[place + 1 :])
                result.rewrites += 1
        return result


def _pair(program: Program, blocks: fx.Node, distance: int) -> QuantizedLayout:
    """The layout that a weight has from now on."""
    weight = program.weights[blocks.target]  # type: ignore[index]
    order: QuantizedLayout = weight.quantized.paired(distance)  # type: ignore[union-attr]
    program.weights[blocks.target] = dataclasses.replace(weight, quantized=order)  # type: ignore[index]
    return order


def _is_unpaired(name: str) -> bool:
    if not name:
        return False
    layout = QuantizedLayout.named(name)
    return layout.is_fragments and layout.distance == HALF


def _distance(node: fx.Node) -> int | None:
    return distance_after(in_shape(node)) if node.target is ops.linear_q else None
