"""The chart in README.md: specc and other engines, by the table of docs/notebook/peers.md.

python -P -m tests.docs.peers_chart        draws docs/peers.svg anew
"""

from __future__ import annotations

import re
from pathlib import Path

from specc.draw.svg import svg_plot
from tests.docs.blocks import ROOT

PICTURE = ROOT / "docs" / "peers.svg"
PAGE = ROOT / "docs" / "notebook" / "peers.md"
TITLE = "Tokens a second, each engine at its best (100 M parameters, batch 1, two cores)"
_COLORS = ("#d9480f", "#495057", "#868e96", "#ced4da")
_HEIGHT = 0.8


def best_of_each(text: str) -> dict[str, dict[str, float]]:
    """Engine → type of weights → tokens a second, plain or with a draft; 0 where there is none.

    Args:
        text: of the page; its first table has a column for each engine, two of them specc's.
    """
    table = text[text.index("\n| | specc off") :].partition("\n\n")[0].strip().split("\n")
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    found: dict[str, dict[str, float]] = {}
    for name, *cells in (row for row in rows if " " not in row[0]):
        for head, cell in zip(heads[1:], cells, strict=True):
            engine = re.split(" off|,", head)[0]
            speeds = [float(x) for x in re.findall(r"[\d.]+", re.sub(r"\(.*?\)", "", cell))]
            best = found.setdefault(engine, {})
            best[name] = max([best.get(name, 0.0), *speeds])
    # specc first, then the fastest
    return dict(sorted(found.items(), key=lambda x: (x[0] != "specc", -sum(x[1].values()))))


def draw(engines: dict[str, dict[str, float]], path: Path) -> None:
    names = list(engines["specc"])
    height = _HEIGHT / len(engines)
    with svg_plot(path, 7.2, 3.4, TITLE) as axes:
        for place, ((engine, speeds), color) in enumerate(
            zip(engines.items(), _COLORS, strict=True)
        ):
            rows = [row + (place - 1.5) * height for row in range(len(names))]
            bars = axes.barh(rows, list(speeds.values()), height * 0.9, color=color, label=engine)
            axes.bar_label(bars, [f"{x:.0f}" if x else "–" for x in speeds.values()], padding=3)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.legend(frameon=False, loc="upper right")


if __name__ == "__main__":
    draw(best_of_each(PAGE.read_text(encoding="utf-8")), PICTURE)
