"""Leave layers of a model out: what they would add to the residual stream is not added."""

from __future__ import annotations

from collections.abc import Collection

from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.facts import attention_is_a_tree
from specc.passes.program import Program, is_update, refusal, upstream
from specc.passes.residual import LayerRegion, layer_regions


class SkipLayers(Pass):
    """The value after a layer → the value before it; weights and caches of the layer are dropped.

    Caches of the layers that are left keep the numbers of their layers, so that they are bound to
    the caches of the same layers of the whole model.

    Args:
        kept: layers that are left, by number.
    """

    requires = (attention_is_a_tree,)
    ensures = (attention_is_a_tree,)

    def __init__(self, kept: Collection[int]) -> None:
        self._kept = frozenset(kept)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        skipped = [i for i in range(len(program.layers)) if i not in self._kept]
        if not skipped:
            return result
        regions = layer_regions(program)
        # the last one first: what a layer begins with may itself be the end of one that goes
        for number in reversed(skipped):
            region = regions[number]
            region.end.replace_all_uses_with(region.start)
            result.rewrites += 1
        _erase_unread(program, [regions[number] for number in skipped])
        program.layers[:] = [layer for i, layer in enumerate(program.layers) if i in self._kept]
        return result


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
            if is_update(node) and node not in gone:
                raise refusal(node, "skipping layers", f"{node.target} updates a value in place")
            graph.erase_node(node)
    for node in list(graph.find_nodes(op="placeholder")):
        for inputs in (program.weights, program.constants, program.caches):
            if node.target in inputs and not node.users:
                del inputs[node.target]  # type: ignore[attr-defined]
                graph.erase_node(node)
                break
    assert len(program.calls(ops.tree_attention)) == len(program.caches) // 2
