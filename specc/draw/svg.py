"""Pictures as SVG: without a display, text as text, the same input as the same file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.errors import ConfigError
from specc.system.files import output_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def check_picture(path: Path) -> None:
    """Fail before the work, not after it.

    Raises:
        ConfigError: another format than SVG, or a library is missing.
    """
    if path.suffix != ".svg":
        raise ConfigError(
            f"a picture {path}", "a file that ends in .svg", f"name it {path.stem}.svg"
        )
    for name in ("matplotlib", "networkx"):
        try:
            __import__(name)
        except ImportError as error:
            raise ConfigError(
                f"{name} cannot be imported ({error})", "matplotlib and networkx", f"install {name}"
            ) from error


@contextmanager
def svg_axes(path: Path, width: float, height: float) -> Iterator[Axes]:
    """Axes of so many inches without a frame; what was drawn on them is written in the end.

    Raises:
        OutputError: the file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "specc",
        "font.family": "sans-serif",
        "font.size": 8,
    }
    with rc_context(style):
        # not through pyplot, which keeps figures and chooses a backend for the process
        figure = Figure(figsize=(width, height))
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        yield axes
        try:
            figure.savefig(path, format="svg", metadata={"Date": None})
        except OSError as error:
            raise output_error(path, error) from error
