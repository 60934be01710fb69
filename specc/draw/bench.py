"""A benchmark as a picture: tokens a second of each run, with the spread of its rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specc.errors import ConfigError
from specc.system.files import output_error

_COLORS = {"off": "#8a8f98", "speculative": "#1f6feb"}
_OTHER = "#c9a227"


def check_plot(path: Path) -> None:
    """Fail before the benchmark, not after it.

    Raises:
        ConfigError: another format than SVG, or no matplotlib.
    """
    if path.suffix != ".svg":
        raise ConfigError(f"--plot {path}", "a file that ends in .svg", f"--plot {path.stem}.svg")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--plot, and matplotlib cannot be imported ({error})",
            "matplotlib",
            "pip install matplotlib",
        ) from error


def write_plot(report: dict[str, Any], path: Path) -> None:
    """Draw one bar a run.

    Raises:
        OutputError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = report["runs"]
    medians = [run["tokens_per_s"] for run in runs]
    below = [run["tokens_per_s"] - run["tokens_per_s_min"] for run in runs]
    above = [run["tokens_per_s_max"] - run["tokens_per_s"] for run in runs]
    # text stays text, and the same report gives the same file
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "specc", "font.size": 10}
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(7, 1.3 + 0.5 * len(runs)), layout="constrained")
        places = range(len(runs))
        colors = [_COLORS.get(run["name"], _OTHER) for run in runs]
        axes.barh(places, medians, xerr=(below, above), color=colors, capsize=3, height=0.6)
        axes.set_yticks(places, [_label(run) for run in runs])
        axes.invert_yaxis()
        right = max(run["tokens_per_s_max"] for run in runs)
        for place, run in zip(places, runs, strict=True):
            text = f"{run['tokens_per_s']:.4g}"
            axes.text(run["tokens_per_s_max"] + 0.02 * right, place, text, va="center")
        axes.set_xlim(0, 1.15 * right or 1)
        axes.set_xlabel("output tokens/s, prefill included: median, least and greatest round")
        axes.set_title(_title(report), fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        try:
            figure.savefig(path, format="svg", metadata={"Date": None})
        except OSError as error:
            raise output_error(path, error) from error
        finally:
            pyplot.close(figure)


def _label(run: dict[str, Any]) -> str:
    return f"{run['name']} ({run['plan']})" if run["name"] == "speculative" else run["name"]


def _title(report: dict[str, Any]) -> str:
    settings, machine = report["settings"], report["machine"]
    threads = f"{settings['threads']} thread{'s' if settings['threads'] != 1 else ''}"
    device = report.get("device", {}).get("name")
    where = device or f"{machine['cpu']}, {threads}"
    return (
        f"{where}, {report['engine']['dtype']}, batch {settings['batch_size']},"
        f" {settings['num_prompts']} prompts × {settings['tokens']} tokens"
    )
