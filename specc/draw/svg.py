"""Pictures as SVG: without a display, text as text, the same input as the same file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.errors import ConfigError
from specc.system.extras import install_command
from specc.system.files import output_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# text stays text, and the same picture gives the same file
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "specc", "font.family": "sans-serif"}
_DIAGRAM_POINTS, _PLOT_POINTS = 8, 10


def check_picture(
    path: Path, name: str = "a picture", libraries: tuple[str, ...] = ("matplotlib",)
) -> None:
    """Fail before the work, not after it.

    Args:
        name: what the user calls it, such as an option.
    Raises:
        ConfigError: another format than SVG, or a library is missing.
    """
    if path.suffix != ".svg":
        raise ConfigError(f"{name} {path}", "a file that ends in .svg", f"name it {path.stem}.svg")
    for library in libraries:
        try:
            __import__(library)
        except ImportError as error:
            raise ConfigError(
                f"{name} {path}, and {library} cannot be imported ({error})",
                "the packages that draw",
                install_command("plot"),
            ) from error


@contextmanager
def svg_diagram(path: Path, width: float, height: float) -> Iterator[Axes]:
    """Axes of so many inches without a frame; what was drawn on them is written in the end.

    Raises:
        OutputError: the file cannot be written.
    """
    with _svg_figure(path, width, height, _DIAGRAM_POINTS) as figure:
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        yield axes


@contextmanager
def svg_plot(path: Path, width: float, height: float, title: str) -> Iterator[Axes]:
    """Axes with labels in a picture of so many inches, which is written in the end.

    Raises:
        OutputError: the file cannot be written.
    """
    with _svg_figure(path, width, height, _PLOT_POINTS, layout="constrained") as figure:
        axes = figure.subplots()
        axes.set_title(title, fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        yield axes


@contextmanager
def _svg_figure(
    path: Path, width: float, height: float, points: int, **options: Any
) -> Iterator[Figure]:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {**_STYLE, "font.size": points}
    with rc_context(style):
        # not through pyplot, which keeps figures and chooses a backend for the process
        figure = Figure(figsize=(width, height), **options)
        FigureCanvasSVG(figure)
        yield figure
        try:
            figure.savefig(path, format="svg", metadata={"Date": None})
        except OSError as error:
            raise output_error(path, error) from error
