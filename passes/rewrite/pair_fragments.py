"""Let outputs of a product that are read together lie together in its weight."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from specc.artifact.fragments import HALF
from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.program import Program, bind_args
from specc.passes.rewrite.columns import only_user
from specc.passes.rewrite.fuse_add_norm import rope_after

aten = torch.ops.aten
_RESHAPES = (aten.reshape.default, aten.view.default)


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
            apart = [distance_of(reader) for reader in readers]
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


def distance_of(node: fx.Node) -> int | None:
    """Between two outputs of a product that what follows it reads together; None where it does not.

    Args:
        node: of `specc.linear_q`.
    """
    if node.target is not ops.linear_q:
        return None
    last = in_shape(node)
    user = only_user(last)
    if user is not None and user.target is ops.act_and_mul:
        return int(last.meta["val"].shape[-1]) // 2
    rope = rope_after(last)
    if rope is None:
        return None
    return int(bind_args(rope)["q"].meta["val"].shape[-1]) // 2


def in_shape(node: fx.Node) -> fx.Node:
    """The result of a product of flattened rows in the shape in which it is read."""
    user = only_user(node)
    if user is None or user.target not in _RESHAPES:
        return node
    return user if user.meta["val"].shape[-1] == node.meta["val"].shape[-1] else node
