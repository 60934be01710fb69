"""Measurements as pictures: runs of a benchmark as bars, a rate sweep as a line for each policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specc.bench.rounds import run_name
from specc.draw.svg import svg_plot

_COLORS = {"off": "#8a8f98", "goodput": "#1f6feb"}
# the longest latency over the shortest, from which on the axis is logarithmic
_WIDE = 30
_OTHERS = ("#c9a227", "#b5651d", "#4c9f70", "#8e5ea2", "#c44e52", "#64b5cd")
_RUN_COLORS = {"off": "#8a8f98", "speculative": "#1f6feb"}
_OTHER_RUN = "#c9a227"


def draw_load(report: dict[str, Any], path: Path) -> None:
    """Draw medians of the rounds, and between which values they lie.

    Raises:
        OutputError: the file cannot be written.
    """
    from matplotlib.ticker import LogLocator

    lines = lines_of(report["cells"])
    others = [name for name in lines if name not in _COLORS]
    with svg_plot(path, 7, 4.2, _title(report)) as axes:
        for name, points in lines.items():
            color = _COLORS.get(name)
            if color is None:
                color = _OTHERS[others.index(name) % len(_OTHERS)]
            rates = [rate for rate, _ in points]
            seconds = [spread["median"] / 1000 for _, spread in points]
            width = 2.4 if name == "goodput" else 1.4
            # on top, and wide: where it follows another line, that one would hide it
            axes.plot(
                rates, seconds, marker="o", markersize=3.5, color=color, linewidth=width,
                label=name, gid=f"line-{name}", zorder=3 if name == "goodput" else 2,
            )  # fmt: skip
            axes.fill_between(
                rates,
                [spread["min"] / 1000 for _, spread in points],
                [spread["max"] / 1000 for _, spread in points],
                color=color,
                alpha=0.15,
                linewidth=0,
            )
        axes.set_xlabel("requests a second")
        axes.set_xlim(left=0)
        label = "mean latency, s: median, least and greatest round"
        if is_wide(lines):
            axes.set_yscale("log", subs=[])
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            label += "\n(logarithmic)"
        else:
            # from zero: else a small difference looks like a large one
            axes.set_ylim(bottom=0)
        axes.set_ylabel(label)
        axes.legend(frameon=False)


def lines_of(cells: list[dict[str, Any]]) -> dict[str, list[tuple[float, dict[str, float]]]]:
    """Policy → its points by rate; cells without a rate or an ended request have none."""
    lines: dict[str, list[tuple[float, dict[str, float]]]] = {}
    for cell in cells:
        rate, spread = cell["request_rate"], cell["mean_e2el_ms"]
        if rate is not None and spread is not None:
            lines.setdefault(cell["policy"], []).append((rate, spread))
    return {name: sorted(points, key=lambda point: point[0]) for name, points in lines.items()}


def is_wide(lines: Mapping[str, Sequence[tuple[float, dict[str, float]]]]) -> bool:
    """Whether latencies differ so much that a linear axis would show the longest ones alone."""
    medians = [spread["median"] for points in lines.values() for _, spread in points]
    return bool(medians) and max(medians) > _WIDE * min(medians)


def _title(report: dict[str, Any]) -> str:
    settings = report["settings"]
    where = "simulated" if report["is_virtual"] else report["machine"]["cpu"]
    prompts = settings["prompt_tokens"] or "given"
    return (
        f"{where}, {settings['num_requests']} requests a rate\n"
        f"prompt tokens {prompts}, output tokens {settings['output_tokens']}"
    )


def draw_bench(report: dict[str, Any], path: Path) -> None:
    """Draw one bar a run.

    Raises:
        OutputError: the file cannot be written.
    """
    runs = report["runs"]
    absent = [item["name"] for item in report.get("not_available", [])]
    medians = [run["tokens_per_s"] for run in runs]
    below = [run["tokens_per_s"] - run["tokens_per_s_min"] for run in runs]
    above = [run["tokens_per_s_max"] - run["tokens_per_s"] for run in runs]
    with svg_plot(path, 7, 1.3 + 0.5 * (len(runs) + len(absent)), _bench_title(report)) as axes:
        places = range(len(runs))
        colors = [_RUN_COLORS.get(run["name"], _OTHER_RUN) for run in runs]
        axes.barh(places, medians, xerr=(below, above), color=colors, capsize=3, height=0.6)
        names = [run_name(run["name"], run["plan"]) for run in runs]
        axes.set_yticks(range(len(runs) + len(absent)), names + absent)
        axes.set_ylim(len(runs) + len(absent) - 0.4, -0.6)
        right = max(run["tokens_per_s_max"] for run in runs)
        for place, run in zip(places, runs, strict=True):
            text = f"{run['tokens_per_s']:.4g}"
            axes.text(run["tokens_per_s_max"] + 0.02 * right, place, text, va="center")
        for place in range(len(runs), len(runs) + len(absent)):
            axes.text(0.02 * right, place, "not available", va="center", color="#8a8f98")
        axes.set_xlim(0, 1.15 * right or 1)
        axes.set_xlabel("output tokens/s, prefill included: median, least and greatest round")


def _bench_title(report: dict[str, Any]) -> str:
    settings, machine = report["settings"], report["machine"]
    threads = f"{settings['threads']} thread{'s' if settings['threads'] != 1 else ''}"
    device = report.get("device", {}).get("name")
    where = device or f"{machine['cpu']}, {threads}"
    prompts = f"{settings['num_prompts']} prompts ×"
    if settings.get("dataset") is not None:
        prompts = f"{settings['num_prompts']} questions, turns of at most"
    return (
        f"{where}, {report['engine']['dtype']}, batch {settings['batch_size']},"
        f" {prompts} {settings['tokens']} tokens"
    )
