"""Leave layers of a model out: what they would add to the residual stream is not added."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.facts import attention_is_a_tree
from specc.passes.program import Program, is_update, refusal, upstream
from specc.passes.residual import MIXERS, LayerRegion, layer_regions

Layer = TypeVar("Layer")


class SkipLayers(Pass):
    """The value after a layer → the value before it; weights and caches of the layer are dropped.

    Caches and states of the layers that are left keep the numbers of their layers, so that they are
    bound to those of the same layers of the whole model.

    Args:
        kept: layers that are left, by number. Where some keep states, all that add to the residual
            stream are counted (`layer_regions`); else each has one attention.
    """

    requires = (attention_is_a_tree,)
    ensures = (attention_is_a_tree,)

    def __init__(self, kept: Collection[int]) -> None:
        self._kept = frozenset(kept)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        if not program.state_layers and self._kept >= set(range(len(program.layers))):
            return result
        regions = layer_regions(program)
        skipped = [i for i in range(len(regions)) if i not in self._kept]
        # the last one first: what a layer begins with may itself be the end of one that goes
        for number in reversed(skipped):
            region = regions[number]
            region.end.replace_all_uses_with(region.start)
            result.rewrites += 1
        _erase_unread(program, [regions[number] for number in skipped])
        program.layers[:] = _left(program.layers, program.caches)
        program.state_layers[:] = _left(program.state_layers, program.states)
        return result


def _left(layers: Sequence[Layer], inputs: Mapping[str, tuple[int, str]]) -> list[Layer]:
    """Those that inputs are left of, which have the numbers of these."""
    numbers = {number for number, _ in inputs.values()}
    return [layer for number, layer in enumerate(layers) if number in numbers]


def _erase_unread(program: Program, regions: list[LayerRegion]) -> None:
    """Erase what no output follows from: calls, also those that write to caches, and inputs.

    Raises:
        UnsupportedGraphError: something else would be gone that changes its argument in place.
    """
    graph = program.graph
    (output,) = graph.find_nodes(op="output")
    read = upstream(output)
    gone = {region.attention for region in regions}
    assert gone.isdisjoint(read), "a skipped layer is still read"
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node not in read:
            if is_update(node) and node.target not in MIXERS:
                raise refusal(node, "skipping layers", f"{node.target} updates a value in place")
            graph.erase_node(node)
    for node in list(graph.find_nodes(op="placeholder")):
        for inputs in (program.weights, program.constants, program.caches, program.states):
            if node.target in inputs and not node.users:
                del inputs[node.target]  # type: ignore[attr-defined]
                graph.erase_node(node)
                break
    assert len(program.calls(ops.tree_attention)) == len(program.caches) // 2
