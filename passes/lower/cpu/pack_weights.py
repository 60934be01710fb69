"""Choose the weights that a CPU engine stores in blocks, as `specc.linear` reads them."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from specc.passes.base import Pass, PassResult
from specc.passes.program import Program, bind_args
from specc.passes.rewrite.flat_rows import why_not

aten = torch.ops.aten


class PackWeights(Pass):
    """Weights of `aten.linear` → the same graph, the weights marked `in_blocks`.

    A weight that an embedding reads too (a tied output projection) is stored once, in blocks; one
    with other users keeps its rows, and so does what its projections read.
    """

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        by_key: dict[str, list[fx.Node]] = {}
        for node in program.graph.find_nodes(op="placeholder"):
            if node.target in program.weights:
                by_key.setdefault(program.weights[node.target].key, []).append(node)
        for nodes in by_key.values():
            users = [user for node in nodes for user in node.users]
            if not any(_is_weight(user, nodes) for user in users):
                continue
            reasons = [reason for user in users if (reason := why_not(user, nodes))]
            if reasons:
                result.decline(nodes[0].name, reasons[0])
                continue
            for node in nodes:
                weight = program.weights[node.target]
                program.weights[node.target] = dataclasses.replace(weight, in_blocks=True)
            result.rewrites += 1
        return result


def _is_weight(user: fx.Node, nodes: list[fx.Node]) -> bool:
    return user.target is aten.linear.default and bind_args(user)["weight"] in nodes
