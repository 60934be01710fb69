"""A token tree as a picture: levels from top to bottom, likely nodes dark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.draw.svg import check_picture, svg_diagram
from specc.errors import ConfigError
from specc.speculation.tree import TokenTree

if TYPE_CHECKING:
    import networkx
    from matplotlib.axes import Axes

# inches; a column is as wide as what stands in it
_LOW, _LOW_OF_DOTS, _HIGH, _MARGIN, _TITLE = 0.7, 0.3, 1.5, 0.35, 0.4
_COLUMN, _DOT_COLUMN, _WIDEST_OF_DOTS = 0.5, 0.09, 24.0
_EDGE_LABEL = 0.22
_DOT_POINTS, _NODE_POINTS = 4.0, 28.0
_MAX_LABELS = 64
_INK, _PALE = "#24292f", "#8a8f98"
_Places = dict[int, tuple[float, float]]


def tree_svg(tree: TokenTree, acceptance: Sequence[float] | None, title: str, path: Path) -> None:
    """Draw a tree; nodes carry the probability of their path, edges that of acceptance.

    Where there is no room for all labels, the likeliest nodes get them, and the others are dots.

    Args:
        tree: at most 1024 nodes.
        acceptance: of each node, given that its parent is accepted; the root's is not read. None
            labels nodes by their number.
        title: before the number of nodes, the depth and the expected tokens a step.
        path: ends in .svg.
    Raises:
        ConfigError: a number of probabilities that is not that of the nodes, a probability outside
            0 … 1, another format, or a library is missing.
        OutputError: the file cannot be written.
    """
    check_picture(path, libraries=("matplotlib", "networkx"))
    import networkx

    paths = None if acceptance is None else _paths(tree, acceptance)
    labels = _labelled(tree, paths)
    places, width = _places(tree, labels)
    depth = max(-y for _, y in places.values())
    height = depth + 2 * _MARGIN + _TITLE
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(tree.num_nodes))
    graph.add_edges_from((parent, node) for node, parent in enumerate(tree.parents[1:], start=1))
    with svg_diagram(path, width, height) as axes:
        axes.set_xlim(0, width)
        axes.set_ylim(-height + _TITLE + _MARGIN, _TITLE + _MARGIN)
        _draw_edges(axes, graph, places, paths)
        _draw_nodes(axes, graph, places, paths, labels)
        if acceptance is not None:
            _label_edges(axes, tree, places, acceptance, labels)
        headline = _headline(tree, paths, title)
        _write(axes, width / 2, _TITLE + _MARGIN - 0.2, headline, 10, _INK, "title")


def _draw_edges(
    axes: Axes, graph: networkx.DiGraph, places: _Places, paths: Sequence[float] | None
) -> None:
    """One line an edge, thicker where the child is likely."""
    import networkx

    edges = list(graph.edges)
    if not edges:
        return
    widths = [0.8 if paths is None else 0.4 + 1.6 * paths[child] for _, child in edges]
    lines = networkx.draw_networkx_edges(
        graph, places, edges, ax=axes, arrows=False, width=widths, edge_color=_PALE
    )
    lines.set_gid("edges")
    lines.set_zorder(1)


def _draw_nodes(
    axes: Axes,
    graph: networkx.DiGraph,
    places: _Places,
    paths: Sequence[float] | None,
    labels: set[int],
) -> None:
    """Circles with a label, and dots without; darker where likely."""
    import networkx

    dots = [node for node in graph if node not in labels]
    for name, nodes, points in (
        ("dots", dots, _DOT_POINTS),
        ("nodes", sorted(labels), _NODE_POINTS),
    ):
        if not nodes:
            continue
        drawn = networkx.draw_networkx_nodes(
            graph,
            places,
            nodes,
            ax=axes,
            node_size=points**2,
            node_color=[0.2 if paths is None else 0.15 + 0.55 * paths[node] for node in nodes],
            cmap="Blues",
            vmin=0,
            vmax=1,
            edgecolors=_INK,
            linewidths=0.6,
        )
        drawn.set_gid(name)
        drawn.set_zorder(2)
    for node in sorted(labels):
        text = str(node) if paths is None else _percentage(paths[node])
        ink = "white" if paths is not None and paths[node] > 0.75 else _INK
        _write(axes, *places[node], text, 7, ink, f"node-{node}")


def _write(
    axes: Axes, x: float, y: float, text: str, size: float, ink: str, name: str, **style: Any
) -> None:
    axes.text(
        x, y, text, ha="center", va="center", fontsize=size, color=ink, zorder=4, gid=name, **style
    )


def _headline(tree: TokenTree, paths: Sequence[float] | None, title: str) -> str:
    size = f"{tree.num_nodes} node{'s' if tree.num_nodes != 1 else ''}, depth {tree.max_depth}"
    expected = "" if paths is None else f", {sum(paths):.2f} tokens a step expected"
    return f"{title}: {size}{expected}" if title else size + expected


def _paths(tree: TokenTree, acceptance: Sequence[float]) -> list[float]:
    """Probability of each node that it is accepted."""
    do = "pass one probability a node, the root's first"
    if len(acceptance) != tree.num_nodes:
        raise ConfigError(
            f"{len(acceptance)} probabilities for {tree.num_nodes} nodes", "as many as nodes", do
        )
    paths = [1.0]
    for node, parent in enumerate(tree.parents[1:], start=1):
        if not 0 <= acceptance[node] <= 1:
            raise ConfigError(f"probability {acceptance[node]} of node {node}", "0 … 1", do)
        paths.append(paths[parent] * acceptance[node])
    return paths


def _labelled(tree: TokenTree, paths: Sequence[float] | None) -> set[int]:
    """The likeliest nodes."""
    order = sorted(range(tree.num_nodes), key=lambda n: (-paths[n], n) if paths else (0, n))
    return set(order[:_MAX_LABELS])


def _places(tree: TokenTree, labels: set[int]) -> tuple[_Places, float]:
    """Every node above the middle of the columns of its subtree; and the width, in inches."""
    children: list[list[int]] = [[] for _ in range(tree.num_nodes)]
    for node, parent in enumerate(tree.parents[1:], start=1):
        children[parent].append(node)
    dot = min(_DOT_COLUMN, _WIDEST_OF_DOTS / tree.num_nodes)
    columns = [0.0] * tree.num_nodes
    for node in range(tree.num_nodes - 1, -1, -1):
        below = sum(columns[child] for child in children[node])
        columns[node] = max(below, _COLUMN if node in labels else dot)
    width = max(columns[0] + 2 * _MARGIN, 5.0)
    middle = [width / 2] * tree.num_nodes
    for node in range(tree.num_nodes):
        left = middle[node] - sum(columns[child] for child in children[node]) / 2
        for child in children[node]:
            middle[child] = left + columns[child] / 2
            left += columns[child]
    depths = _level_depths(tree, labels, middle)
    return {n: (middle[n], -depths[tree.depths[n]]) for n in range(tree.num_nodes)}, width


def _level_depths(tree: TokenTree, labels: set[int], middle: list[float]) -> list[float]:
    """Inches from the root's level to each: more where edges would run over other nodes."""
    depths = [0.0]
    for level in tree.levels[1:]:
        farthest = max(abs(middle[node] - middle[tree.parents[node]]) for node in level)
        low = _LOW if any(node in labels for node in level) else _LOW_OF_DOTS
        depths.append(depths[-1] + min(max(low, farthest / 2.5), _HIGH))
    return depths


def _label_edges(
    axes: Axes, tree: TokenTree, places: _Places, acceptance: Sequence[float], labels: set[int]
) -> None:
    """Acceptance on the edges to labelled nodes, where there is room."""
    taken: dict[int, list[float]] = {}
    for node in sorted(labels - {0}):
        (x, y), (above_x, above_y) = places[node], places[tree.parents[node]]
        # nearer to the child, where the edges of siblings are apart
        middle_x, middle_y = 0.64 * x + 0.36 * above_x, 0.64 * y + 0.36 * above_y
        level = taken.setdefault(tree.depths[node], [])
        if all(abs(middle_x - other) >= _EDGE_LABEL for other in level):
            level.append(middle_x)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
            text = _percentage(acceptance[node])
            _write(axes, middle_x, middle_y, text, 6, _INK, f"edge-{node}", bbox=box)


def _percentage(share: float) -> str:
    """Short enough for a circle: `.85`, `1`, `.004`, `0`."""
    if share >= 0.995:
        return "1" if share == 1 else ".99"
    text = f"{share:.2f}" if share >= 0.005 else f"{share:.1g}" if share >= 0.0005 else "0"
    return text.removeprefix("0") or "0"
