"""Let projections have the formats of a mix, before those of a layer are fused."""

from __future__ import annotations

import re

import torch

from specc.artifact.decoders.kept_integers import KeptIntegers
from specc.artifact.mixes import Mix
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.weight_layout import BLOCK
from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.program import Program, bind_args
from specc.passes.quantize.quantize_experts import source_of

aten = torch.ops.aten
# the phase
MIX = "mix"
_LAYER = re.compile(r"\.(\d+)\.")


class ApplyMix(Pass):
    """Say of each parameter of a projection, or of experts, which layout holds it.

    Weights are rounded when they are written, as without a mix. What has fewer than 32 outputs
    keeps its type.

    Args:
        mix: which weight is stored how.
    """

    def __init__(self, mix: Mix) -> None:
        self._mix = mix

    def run(self, program: Program) -> PassResult:
        result, linears = PassResult(), program.calls(aten.linear.default)
        head = linears[-1] if linears else None
        found: list[tuple[str, int, bool, bool]] = []
        for node in linears:
            weight = program.weights.get(bind_args(node)["weight"].target)
            if weight is None or weight.shape[0] < BLOCK:
                result.decline(node.name, "no parameter of 32 outputs or more")
                continue
            (name,) = weight.parameters
            found.append((name, weight.shape[-1], weight.is_turned, node is head))
        for node in program.calls(ops.grouped_mm):
            read = bind_args(node)["weight"]
            source, columns = source_of(read), read.meta["val"].shape[1]
            if source.target in program.weights:
                (name,) = program.weights[source.target].parameters
                found.append((name, int(columns), source is read, False))
        numbers = [int(place[1]) for name, *_ in found if (place := _LAYER.search(name))]
        num_layers = 1 + max(numbers, default=0)
        for name, columns, is_turned, is_head in found:
            layout = self._mix.layout(name, columns, num_layers, is_head)
            named = QuantizedLayout.named(layout)
            program.integers[name] = KeptIntegers(named, is_turned=is_turned)
            result.rewrites += 1
        return result
