"""Matrices of experts that a model has as [inputs, outputs]: the engine's file has the others."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from specc.artifact.weight_layout import turned
from specc.passes.program import Program, Weight, emit_call

aten = torch.ops.aten


def turn_stack(program: Program, source: fx.Node, products: list[fx.Node]) -> Weight:
    """Make an input [E, K, N], and a rank's part of it, one [E, N, K], whose transpose is read."""
    weight, value = program.weights[source.target], source.meta["val"]  # type: ignore[index]
    source.meta["val"] = value.new_empty(turned(tuple(value.shape)))
    with program.graph.inserting_before(min(products)):
        read = emit_call(program.graph, aten.transpose.int, source, 1, 2)
    for product in products:
        product.replace_input_with(source, read)
    if program.shard is not None:
        cuts = (
            dataclasses.replace(cut, shape=turned(cut.shape), cuts=turned(cut.cuts))
            if cut.key == weight.key
            else cut
            for cut in program.shard.weights
        )
        program.shard = dataclasses.replace(program.shard, weights=tuple(cuts))
    return dataclasses.replace(weight, shape=turned(weight.shape), is_turned=not weight.is_turned)
