"""How a model is cut for ranks as a picture: which weight along which dimension, and the sums.

From top to bottom in the order of execution, a line for each weight. A weight is a rectangle as it
is stored, rows from top to bottom and columns from left to right, with a color for each rank; a
piece that several ranks have is divided among their colors, and what all have is grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from specc.draw.sharding_items import AttentionItem, Item, Section, SumItem, WeightItem
from specc.draw.svg import check_picture, svg_diagram
from specc.sharding.shard_plan import Interval, ShardPlan, WeightCut
from specc.sharding.words import words_of
from specc.system.files import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# inches
_WIDTH, _MARGIN, _TITLE, _SECTION, _SPACE, _FOOT = 7.6, 0.2, 0.75, 0.3, 0.12, 0.34
_NAME, _BOX, _WORDS, _BYTES = 2.55, 1.15, 3.9, 7.25
_MATRIX, _VECTOR, _SUM, _GAP = 0.4, 0.12, 0.27, 0.03
_LETTER, _MOST_LETTERS = 0.125, 46
_INK, _FAINT, _WHOLE, _LINE = "#24292f", "#57606a", "#d8dbe0", "#ffffff"
_SUM_COLOR, _FRAME = "#bc6c25", "#c9ced6"
_FEW = ("#1f6feb", "#2da44e", "#d4a72c", "#cf4a7c")
# more bands than that are too narrow to be told apart
_MOST_NAMED = 8


def sharding_svg(plan: ShardPlan, sections: Sequence[Section], title: str, path: Path) -> None:
    """Draw the cut of a model.

    Args:
        sections: of the model; see `sharding_items.sections`.
        path: ends in .svg.
    Raises:
        ConfigError: another format, or a library is missing.
        OutputError: the file cannot be written.
    """
    check_picture(path)
    lines = _totals(plan)
    height = _TITLE + _FOOT + 0.16 * len(lines)
    height += sum(_SECTION + _SPACE + sum(_height(item) for item in s.items) for s in sections)
    with svg_diagram(path, _WIDTH, height) as axes:
        axes.set_xlim(0, _WIDTH)
        axes.set_ylim(-height, 0)
        _text(axes, _WIDTH / 2, -0.2, title, "title", size=11, ha="center")
        _legend(axes, _colors(plan.num_ranks))
        y = -_TITLE
        for number, section in enumerate(sections):
            y = _draw_section(axes, section, number, y, plan.num_ranks)
        for number, line in enumerate(lines):
            _text(axes, _MARGIN, y - 0.16 * (number + 1), line, f"total-{number}", size=8)


def _height(item: Item) -> float:
    if isinstance(item, WeightItem):
        return (_MATRIX if len(item.cut.shape) > 1 else _VECTOR) + 0.1
    return _SUM + 0.08


def _draw_section(axes: Axes, section: Section, number: int, top: float, num_ranks: int) -> float:
    """A frame with a row for each item; returns where the next one begins."""
    from matplotlib.patches import FancyBboxPatch

    height = _SECTION + sum(_height(item) for item in section.items)
    axes.add_patch(
        FancyBboxPatch(
            (_MARGIN, top - height),
            _WIDTH - 2 * _MARGIN,
            height,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor="none",
            edgecolor=_FRAME,
            linewidth=0.8,
        )
    )
    _text(axes, _MARGIN + 0.1, top - 0.15, section.title, f"section-{number}", weight="bold")
    layers = f", all {section.count} layers" if section.count > 1 else ""
    words = f"bytes a rank{layers}"
    _text(axes, _BYTES, top - 0.15, words, f"unit-{number}", ha="right", size=7, color=_FAINT)
    y = top - _SECTION
    for place, item in enumerate(section.items):
        middle = y - (_height(item) - 0.08) / 2
        _draw_item(axes, item, section.count, middle, f"{number}-{place}", num_ranks)
        y -= _height(item)
    return top - height - _SPACE


def _draw_item(axes: Axes, item: Item, count: int, y: float, name: str, num_ranks: int) -> None:
    if isinstance(item, SumItem):
        words = f"all_reduce: {item.bytes_per_token} bytes a token"
        _bar(axes, y, f"Σ  {words}", f"sum-{name}", _SUM_COLOR, "white")
    elif isinstance(item, AttentionItem):
        plural = "s" * (item.num_kv_heads > 1)
        own = f"{item.num_heads} head{'s' * (item.num_heads > 1)}"
        words = f"attention: {own}, {item.num_kv_heads} KV head{plural} a rank"
        _bar(axes, y, words, f"attention-{name}", "#eceef1", _INK)
    else:
        _text(axes, _NAME, y, item.name, f"weight-{name}", ha="right", size=8)
        _draw_weight(axes, item.cut, y, name, num_ranks)
        shape = " × ".join(map(str, item.cut.shape))
        words = words_of(item.cut)
        lines = wrap(f"{shape}: {'on every rank' if words == 'all' else words}", _MOST_LETTERS)
        for number, line in enumerate(lines):
            spot = y + _LETTER * ((len(lines) - 1) / 2 - number)
            _text(axes, _WORDS, spot, line, f"words-{name}-{number}", size=7, color=_FAINT)
        size = "as above" if item.is_again else format_bytes(item.cut.local_bytes * count)
        _text(axes, _BYTES, y, size, f"bytes-{name}", ha="right", size=7, color=_FAINT)


def _draw_weight(axes: Axes, weight: WeightCut, y: float, name: str, num_ranks: int) -> None:
    """A rectangle in bands, along the dimension that is cut."""
    height = _MATRIX if len(weight.shape) > 1 else _VECTOR
    left, bottom = _NAME + 0.1, y - height / 2
    dim = next((d for d, cut in enumerate(weight.cuts) if any(i.parts > 1 for i in cut)), None)
    colors = _colors(num_ranks)
    if weight.is_first_only:
        _box(axes, left, bottom, _BOX, height, colors[0], f"cut-{name}-0")
        return
    if dim is None:
        _box(axes, left, bottom, _BOX, height, _WHOLE, f"cut-{name}-0")
        return
    # a vector has results of a product, as rows have; it lies
    is_upright = len(weight.shape) > 1 and dim < len(weight.shape) - 1
    cut = weight.cuts[dim]
    total, length = cut[-1].stop, height if is_upright else _BOX
    room, at, number = length - _GAP * (len(cut) - 1), 0.0, 0
    for interval in cut:
        size = room * (interval.stop - interval.start) / total
        for share, ranks in _bands(interval):
            own = size * share
            for place, rank in enumerate(ranks):
                color = _WHOLE if rank is None else colors[rank]
                other = (_BOX if is_upright else height) / len(ranks)
                if is_upright:
                    spot = (left + place * other, bottom + height - at - own, other, own)
                else:
                    spot = (left + at, bottom + place * other, own, other)
                _box(axes, *spot, color, f"cut-{name}-{number}")
                number += 1
            at += own
        at += _GAP


def _bands(interval: Interval) -> list[tuple[float, list[int | None]]]:
    """Share of an interval that each piece is, and the ranks that hold it; None is all of them."""
    if interval.parts == 1:
        return [(1.0, [None])]
    ranks = range(interval.copies)
    return [
        (1 / interval.parts, [part * interval.copies + copy for copy in ranks])
        for part in range(interval.parts)
    ]


def _colors(num_ranks: int) -> list[str]:
    if num_ranks <= len(_FEW):
        return list(_FEW[:num_ranks])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    shades = colormaps["turbo"]
    return [to_hex(shades(0.08 + 0.84 * rank / (num_ranks - 1))) for rank in range(num_ranks)]


def _legend(axes: Axes, colors: Sequence[str]) -> None:
    shown = list(enumerate(colors))
    if len(colors) > _MOST_NAMED:
        shown = [shown[0], shown[-1]]
    entries = [(f"rank {rank}", color) for rank, color in shown] + [("every rank", _WHOLE)]
    width = 0.75
    x = _WIDTH / 2 - width * len(entries) / 2
    for name, color in entries:
        _box(axes, x, -0.53, 0.14, 0.14, color, f"key-{name.replace(' ', '-')}")
        _text(axes, x + 0.19, -0.46, name, f"legend-{name.replace(' ', '-')}", size=8)
        x += width


def _bar(axes: Axes, y: float, words: str, name: str, color: str, ink: str) -> None:
    left = _NAME - 0.9
    _box(axes, left, y - _SUM / 2, 3.9, _SUM, color, f"bar-{name}")
    _text(axes, left + 1.95, y, words, name, ha="center", size=8, color=ink)


def _box(
    axes: Axes, x: float, y: float, width: float, height: float, color: str, name: str
) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle((x, y), width, height, facecolor=color, edgecolor=_LINE, linewidth=0.4, gid=name)
    )


def _text(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    name: str,
    *,
    size: float = 9,
    color: str = _INK,
    ha: str = "left",
    weight: str = "normal",
) -> None:
    # names of weights are no formulas
    axes.text(
        x, y, text.replace("$", r"\$"), fontsize=size, color=color, ha=ha, va="center_baseline",
        weight=weight, gid=name,
    )  # fmt: skip


def _totals(plan: ShardPlan) -> list[str]:
    share = plan.local_bytes * plan.num_ranks / plan.whole_bytes
    lines = [
        f"a rank holds {format_bytes(plan.local_bytes)} of {format_bytes(plan.whole_bytes)}"
        f" ({share:.3f} of its share); a pass sums {plan.bytes_per_token} bytes a token in"
        f" {len(plan.collectives)} collectives"
    ]
    if plan.cuts_vocabulary:
        lines.append(
            f"logits: {plan.local_vocab_size} columns a rank, gathered at rank 0 to"
            f" {plan.vocab_size}"
        )
    return lines
