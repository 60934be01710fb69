"""Let outputs of a product that are read together lie together in its weight."""

from __future__ import annotations

import dataclasses

from torch import fx

from specc.artifact.fragments import HALF
from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.program import Program
from specc.passes.rewrite.fuse_add_norm import distance_after, in_shape


class PairFragments(Pass):
    """Blocks of a weight in fragments get a gate's outputs and what they multiply, or both halves
    of heads that are rotated (`specc.artifact.fragments`).

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
            order = layout.paired(apart[0])  # type: ignore[arg-type]
            moved = dataclasses.replace(weight, quantized=order)
            program.weights[blocks.target] = moved  # type: ignore[union-attr]
            for reader in readers:
                reader.args = (*reader.args[:4], *order.facts)
                result.rewrites += 1
        return result


def _distance(node: fx.Node) -> int | None:
    return distance_after(in_shape(node)) if node.target is ops.linear_q else None
