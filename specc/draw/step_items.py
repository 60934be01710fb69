"""What a picture of a step program shows of a stage, and where: boxes, pills, and the ways between.

Layers from left to right in the order of the data, each item as late as its readers allow. A value
that is read several layers later runs along a row of its own, by a `via` in each layer between, so
that no line crosses a box.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import networkx

# operators that only view, repeat, convert or count
_FOLDED = {
    "reshape", "slice", "unsqueeze", "expand", "repeat", "_to_copy", "clamp", "select",
    "full_like", "arange", "sym_size", "permute", "view", "clone", "contiguous",
}  # fmt: skip
# inches
_CHARACTER, _PADDING, _GAP = 0.056, 0.1, 0.36
ROW, _VIA_ROW = 0.3, 0.1


@dataclass
class Item:
    """One box, pill or via.

    Args:
        kind: `program`, `specc`, `operator`, `buffer` (read), `output` or `via`.
        layer: from left to right.
        x: of its middle, inches.
        y: of its middle, inches, falling from the top.
        column: width of its layer; a via runs through all of it.
    """

    kind: str
    text: str
    layer: int = 0
    x: float = 0.0
    y: float = 0.0
    column: float = 0.0

    @property
    def width(self) -> float:
        return self.column if self.kind == "via" else _CHARACTER * len(self.text) + _PADDING

    @property
    def height(self) -> float:
        return _VIA_ROW if self.kind == "via" else ROW


def stage_items(stage: Mapping[str, Any], passed: Set[str]) -> networkx.DiGraph:
    """Items of a stage and which feeds which; the item of a node is its attribute `item`.

    Nodes are named as in the program, outputs end in `=`, vias are pairs.

    Args:
        passed: buffers that earlier stages have written; they stand on the very left.
    """
    graph = _read(stage)
    _set_layers(graph, passed)
    _add_vias(graph)
    _set_places(graph)
    return graph


def _read(stage: Mapping[str, Any]) -> networkx.DiGraph:
    import networkx

    graph = networkx.DiGraph()
    # node → drawn nodes that its value comes from
    sources: dict[str, list[str]] = {}
    for node in stage["graph"]["nodes"]:
        name = node["name"]
        above = _unique(
            source
            for used in _names([node.get("args"), node.get("kwargs")])
            for source in sources.get(used, ())
        )
        item = _item_of(node)
        if item is None:
            sources[name] = above
            continue
        graph.add_node(name, item=item)
        graph.add_edges_from((source, name) for source in above)
        sources[name] = [name]
    for output, value in stage["graph"]["output"]["dict"].items():
        graph.add_node(f"{output}=", item=Item("output", output))
        for source in _unique(s for used in _names(value) for s in sources.get(used, ())):
            graph.add_edge(source, f"{output}=")
    kinds = dict(graph.nodes(data="item"))
    graph.remove_nodes_from(
        [n for n in graph if kinds[n].kind == "buffer" and not graph.out_degree(n)]
    )
    return graph


def _item_of(node: Mapping[str, Any]) -> Item | None:
    """How a node is drawn; None is not at all."""
    if node["op"] == "placeholder":
        return Item("buffer", node["name"])
    if node["op"] == "call_module":
        return Item("program", node["target"])
    namespace, _, rest = node["target"].partition(".")
    operator = rest.partition(".")[0]
    if namespace == "specc":
        return Item("specc", operator)
    if namespace != "aten" or operator in _FOLDED:
        return None
    return Item("operator", operator)


def _names(value: Any) -> Iterator[str]:
    """Nodes that an encoded argument names."""
    if isinstance(value, dict):
        if set(value) == {"node"}:
            yield value["node"]
        else:
            yield from _names(list(value.values()))
    elif isinstance(value, list):
        for part in value:
            yield from _names(part)


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _set_layers(graph: networkx.DiGraph, passed: Set[str]) -> None:
    import networkx

    behind: dict[str, int] = {}
    for node in reversed(list(networkx.topological_sort(graph))):
        behind[node] = max((behind[n] + 1 for n in graph.successors(node)), default=0)
    deepest = max(behind.values(), default=0)
    for node, item in graph.nodes(data="item"):
        item.layer = deepest - behind[node]
        if item.kind == "buffer" and item.text in passed:
            item.layer = 0


def _add_vias(graph: networkx.DiGraph) -> None:
    """One row for each value that is read further on, whichever reads it."""
    items = dict(graph.nodes(data="item"))
    for source in list(items):
        last: Any = source
        readers = sorted(graph.successors(source), key=lambda n: items[n].layer)
        for reader in readers:
            for layer in range(graph.nodes[last]["item"].layer + 1, items[reader].layer):
                via = (source, layer)
                graph.add_node(via, item=Item("via", "", layer))
                graph.add_edge(last, via)
                last = via
            if last != source:
                graph.remove_edge(source, reader)
                graph.add_edge(last, reader)


def _set_places(graph: networkx.DiGraph) -> None:
    """Rows near to the neighbors in the layers beside, by a few sweeps; then columns."""
    items = dict(graph.nodes(data="item"))
    layers: list[list[Any]] = [[] for _ in range(1 + max(i.layer for i in items.values()))]
    for node, item in items.items():
        layers[item.layer].append(node)
    tallest = max(sum(items[node].height for node in layer) for layer in layers)
    for layer in layers:
        _stack(layer, items, tallest)
    for sweep in range(8):
        beside = graph.predecessors if sweep % 2 else graph.successors
        for layer in layers if sweep % 2 else layers[::-1]:
            places = {n: _mean([items[o].y for o in beside(n)], items[n].y) for n in layer}
            layer.sort(key=places.__getitem__, reverse=True)
            _stack(layer, items, tallest)
    left = 0.0
    for layer in layers:
        widest = max(items[node].width for node in layer)
        for node in layer:
            items[node].x = left + widest / 2
            items[node].column = widest
        left += widest + _GAP


def _stack(layer: list[Any], items: dict[Any, Item], tallest: float) -> None:
    y = -(tallest - sum(items[node].height for node in layer)) / 2
    for node in layer:
        items[node].y = y - items[node].height / 2
        y -= items[node].height


def _mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default
