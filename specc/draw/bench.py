"""A benchmark as a picture: tokens a second of each run, with the spread of its rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specc.bench.rounds import run_name
from specc.draw.svg import svg_plot

_COLORS = {"off": "#8a8f98", "speculative": "#1f6feb"}
_OTHER = "#c9a227"


def draw_bench(report: dict[str, Any], path: Path) -> None:
    """Draw one bar a run.

    Raises:
        OutputError: the file cannot be written.
    """
    runs = report["runs"]
    medians = [run["tokens_per_s"] for run in runs]
    below = [run["tokens_per_s"] - run["tokens_per_s_min"] for run in runs]
    above = [run["tokens_per_s_max"] - run["tokens_per_s"] for run in runs]
    with svg_plot(path, 7, 1.3 + 0.5 * len(runs), _title(report)) as axes:
        places = range(len(runs))
        colors = [_COLORS.get(run["name"], _OTHER) for run in runs]
        axes.barh(places, medians, xerr=(below, above), color=colors, capsize=3, height=0.6)
        axes.set_yticks(places, [run_name(run["name"], run["plan"]) for run in runs])
        axes.invert_yaxis()
        right = max(run["tokens_per_s_max"] for run in runs)
        for place, run in zip(places, runs, strict=True):
            text = f"{run['tokens_per_s']:.4g}"
            axes.text(run["tokens_per_s_max"] + 0.02 * right, place, text, va="center")
        axes.set_xlim(0, 1.15 * right or 1)
        axes.set_xlabel("output tokens/s, prefill included: median, least and greatest round")


def _title(report: dict[str, Any]) -> str:
    settings, machine = report["settings"], report["machine"]
    threads = f"{settings['threads']} thread{'s' if settings['threads'] != 1 else ''}"
    device = report.get("device", {}).get("name")
    where = device or f"{machine['cpu']}, {threads}"
    return (
        f"{where}, {report['engine']['dtype']}, batch {settings['batch_size']},"
        f" {settings['num_prompts']} prompts × {settings['tokens']} tokens"
    )
