"""A step program as a picture: what each stage reads, calls and hands on.

One band a stage. Programs and operators are boxes, named buffers are pills; a dashed line leads
from a buffer that a stage writes to the stages that read it. What only views, repeats, converts or
counts (`reshape`, `getitem`, `arange`, …) is not drawn: lines go through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.draw.step_items import ROW, Item, stage_items
from specc.draw.svg import check_picture, svg_diagram
from specc.errors import EngineError

if TYPE_CHECKING:
    import networkx
    from matplotlib.axes import Axes

    Bands = list[tuple[str, networkx.DiGraph]]

# inches
_MARGIN, _TITLE, _BAND_TITLE, _LINE, _ARROW = 0.25, 0.45, 0.35, 0.07, 0.08
_COLORS = {
    "program": ("#1f6feb", "white"),
    "specc": ("#d1e7d3", "#24292f"),
    "operator": ("#eceef1", "#24292f"),
    "buffer": ("#fff6d6", "#24292f"),
    "output": ("#fde3cf", "#24292f"),
}
_INK, _PALE, _PASSES = "#57606a", "#a9b0b8", "#bc6c25"
_LEGEND = "blue: programs, green: operators of specc, grey: others; yellow: read, orange: written"
_HEAD = "-|>,head_length=2.4,head_width=1.2"


def step_svg(program: Mapping[str, Any], title: str, path: Path) -> None:
    """Draw a step program.

    Args:
        program: content of `steps/PLAN.json` in an engine.
        path: ends in .svg.
    Raises:
        EngineError: no step program.
        ConfigError: another format, or a library is missing.
        OutputError: the file cannot be written.
    """
    check_picture(path, libraries=("matplotlib", "networkx"))
    written: set[str] = set()
    bands: Bands = []
    for stage in _stages(program):
        bands.append((stage["name"], stage_items(stage, written)))
        written |= set(stage["graph"]["output"]["dict"])
    passes = _passes(bands)
    side = 2 * _MARGIN + _LINE * len(passes)
    width = max(max(_size(graph)[0] for _, graph in bands) + 2 * side, 5.0)
    y = -_TITLE
    frames = []
    for index, (_, graph) in enumerate(bands):
        # room for the lines that come in from above
        y -= _MARGIN + _LINE * sum(into == index for _, _, into in passes)
        height = _size(graph)[1] + _BAND_TITLE + ROW / 2
        for _, item in graph.nodes(data="item"):
            item.x += side
            item.y += y - _BAND_TITLE
        frames.append((y, height))
        y -= height
    with svg_diagram(path, width, _MARGIN - y) as axes:
        axes.set_xlim(0, width)
        axes.set_ylim(y - _MARGIN, 0)
        axes.text(width / 2, -0.2, title, ha="center", va="center", fontsize=11, gid="title")
        axes.text(width / 2, -0.4, _LEGEND, ha="center", va="center", fontsize=7, color=_INK)
        for (name, graph), (top, height) in zip(bands, frames, strict=True):
            _draw_frame(axes, name, side, width, top, height)
            _draw_lines(axes, graph)
            _draw_items(axes, name, graph)
        _draw_passes(axes, passes, [top for top, _ in frames], side, width)


def _stages(program: Mapping[str, Any]) -> list[dict[str, Any]]:
    do = "compile the engine again"
    try:
        stages = list(program["stages"])
        for stage in stages:
            graph = stage["graph"]
            _ = (
                [node["name"] + node["op"] for node in graph["nodes"]],
                dict(graph["output"]["dict"]),
            )
        if stages:
            return stages
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError("a file that is no step program", "stages with graphs", do) from error
    raise EngineError("a step program without stages", "one stage or more", do)


def _passes(bands: Bands) -> list[tuple[Item, Item, int]]:
    """Buffers that a stage reads and an earlier one wrote: writer, reader, the reader's band."""
    written: dict[str, Item] = {}
    passes = []
    for index, (_, graph) in enumerate(bands):
        items = [item for _, item in graph.nodes(data="item")]
        # the topmost one gets the innermost line, so that lines do not cross
        readers = sorted(items, key=lambda item: -item.y)
        passes += [
            (written[item.text], item, index)
            for item in readers
            if item.kind == "buffer" and item.text in written
        ]
        written |= {item.text: item for item in items if item.kind == "output"}
    return passes


def _size(graph: networkx.DiGraph) -> tuple[float, float]:
    items = [item for _, item in graph.nodes(data="item")]
    width = max(item.x + item.width / 2 for item in items)
    return width, max(item.height / 2 - item.y for item in items)


def _draw_frame(
    axes: Axes, name: str, side: float, width: float, top: float, height: float
) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle(
            (_MARGIN / 2, top - height),
            width - _MARGIN,
            height,
            facecolor="#fafbfc",
            edgecolor=_PALE,
            linewidth=0.8,
            zorder=0,
        )
    )
    axes.text(
        side,
        top - 0.17,
        name,
        ha="left",
        va="center",
        fontsize=9,
        fontweight="bold",
        color=_INK,
        gid=f"stage-{name}",
    )


def _draw_lines(axes: Axes, graph: networkx.DiGraph) -> None:
    """From the right of one item to the left of the next; pale where many read the same."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    items = dict(graph.nodes(data="item"))
    for source, reader in graph.edges:
        start, end = items[source], items[reader]
        origin = source[0] if start.kind == "via" else source
        is_common = _num_readers(graph, origin) > 3
        style: dict[str, Any] = {
            "color": _PALE if is_common else _INK,
            "linewidth": 0.5 if is_common else 0.8,
            "zorder": 2,
        }
        x0, x1 = start.x + start.width / 2, end.x - end.width / 2
        # the curve bends in the gap between the columns, the rest is straight
        left, right = start.x + start.column / 2, end.x - end.column / 2
        middle = (left + right) / 2
        points = [(x0, start.y), (left, start.y), (middle, start.y), (middle, end.y)]
        points.append((right, end.y))
        codes = [Curve.MOVETO, Curve.LINETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4]
        if x1 > right:  # else the arrow would have no direction
            points.append((x1, end.y))
            codes.append(Curve.LINETO)
        axes.add_patch(
            FancyArrowPatch(
                path=Curve(points, codes),
                arrowstyle="-" if end.kind == "via" else _HEAD,
                shrinkA=0,
                shrinkB=0,
                **style,
            )
        )
        if end.kind == "via":
            axes.plot([x1, end.x + end.width / 2], [end.y, end.y], **style)


def _num_readers(graph: networkx.DiGraph, source: Any) -> int:
    count = 0
    for reader in graph.successors(source):
        is_via = graph.nodes[reader]["item"].kind == "via"
        count += _num_readers(graph, reader) if is_via else 1
    return count


def _draw_items(axes: Axes, stage: str, graph: networkx.DiGraph) -> None:
    for node, item in graph.nodes(data="item"):
        if item.kind == "via":
            continue
        face, ink = _COLORS[item.kind]
        is_pill = item.kind in ("buffer", "output")
        axes.text(
            item.x,
            item.y,
            item.text,
            ha="center",
            va="center",
            fontsize=7,
            color=ink,
            zorder=4,
            fontweight="bold" if item.kind == "program" else "normal",
            gid=f"{stage}/{node}",
            bbox={
                "boxstyle": f"{'round,rounding_size=0.6' if is_pill else 'square'},pad=0.35",
                "facecolor": face,
                "edgecolor": _INK,
                "linewidth": 0.5,
            },
        )


def _draw_passes(
    axes: Axes, passes: list[tuple[Item, Item, int]], tops: list[float], side: float, width: float
) -> None:
    """Out to the right, down, back above the reader's band, and into the reader from the left."""
    from matplotlib.patches import FancyArrowPatch

    for number, (source, reader, into) in enumerate(passes):
        inset = _MARGIN + _LINE * (number + 1)
        lane = sum(other == into for _, _, other in passes[:number]) + 1
        above = tops[into] + _LINE * lane
        right, left = width - inset, side - _LINE * (lane + 1)
        end = reader.x - reader.width / 2
        x = [source.x + source.width / 2, right, right, left, left, end - _ARROW]
        y = [source.y, source.y, above, above, reader.y, reader.y]
        style: dict[str, Any] = {"color": _PASSES, "linewidth": 0.7, "zorder": 1}
        axes.plot(x, y, linestyle="--", gid=f"pass-{reader.text}-{into}", **style)
        axes.add_patch(
            FancyArrowPatch(
                (end - _ARROW, reader.y),
                (end, reader.y),
                arrowstyle=_HEAD,
                shrinkA=0,
                shrinkB=0,
                **style,
            )
        )
