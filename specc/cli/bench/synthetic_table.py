"""The report of a benchmark with random weights as tables."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from specc.bench.rounds import run_name
from specc.cli import render
from specc.cli.bench.engine_table import closing_lines, speed_table
from specc.cli.print_table import cell, print_lines, print_table
from specc.quantize_options import FLOATS
from specc.system.files import format_bytes

STAGES = {"draft": "draft", "verify": "verify", "draw": "draw", "accept_commit": "commit"}


def print_shapes_report(report: dict[str, Any]) -> None:
    """Print what a reader compares first, then steps beside their floor, then their parts."""
    console = render.make_console()
    print_lines(console, _setting_lines(report))
    for table in (speed_table(report), _step_table(report), _part_table(report)):
        console.print()
        print_table(console, table)
    console.print()
    print_lines(console, closing_lines(report))


def _setting_lines(report: dict[str, Any]) -> list[str]:
    settings, bandwidth, engine = report["settings"], report["copy_bandwidth"], report["engine"]
    device = (
        report["device"]["name"] or f"{report['machine']['cpu']}, {settings['threads']} threads"
    )
    models = ", ".join(
        f"{m['source']} ({render.format_count(m['num_parameters'])} parameters)"
        for m in engine["models"]
    )
    layout = "".join(f", {words}" for words in layout_words(settings))
    return [
        f"{device}, copy bandwidth {bandwidth['gb_s']:.1f} GB/s"
        f" ({format_bytes(bandwidth['buffer_bytes'])} read and written)",
        f"{models}: random weights, {engine['dtype']}{layout}, backend {engine['backend']}",
        f"batch size {settings['batch_size']}, context {settings['context']},"
        f" {settings['tokens']} output tokens; medians of {settings['rounds']} interleaved rounds"
        f" after {settings['warmup']} of warm-up; prefill is included in tokens/s",
    ]


def layout_words(settings: dict[str, Any]) -> list[str]:
    """Which weights are quantized, and how; of settings that say how."""
    from specc.bench.synthetic.drafters import HEADS

    of_draft = settings["draft_quantize"]
    are_alike = of_draft is None and settings["draft"] not in HEADS
    whose = "projections" if are_alike else "projections of the target"
    kinds = {whose: settings["quantize"], "projections of the draft": of_draft}
    words = [f"{name} in {kind}" for name, kind in kinds.items() if kind not in (None, FLOATS)]
    return [*words, "weights in fragments"] if settings["weight_fragments"] else words


def _step_table(report: dict[str, Any]) -> Table:
    """A step by the device's clock, steps queued back to back."""
    columns = ("all", "least – most", "floor", "× floor", "gap", "host", "kernels", "moves")
    table = render.make_table(("ms a step", *columns), columns)
    for run in _own_runs(report):
        step = run["step"]
        table.add_row(
            run_name(run["name"], run["plan"]),
            f"{step['ms']:.3f}",
            f"{step['ms_min']:.3f} – {step['ms_max']:.3f}",
            f"{step['floor_ms']:.3f}",
            f"{step['floor_ratio']:.2f}",
            cell(step["gap_share"], ".1%"),
            cell(step["host_share"], ".1%"),
            cell(step["kernels"], ".0f"),
            format_bytes(step["bytes"]),
        )
    return table


def _part_table(report: dict[str, Any]) -> Table:
    """Stages as graphs of their own, in other runs than those above; what a step yields."""
    columns = (*STAGES.values(), "length", "× off", "even at")
    title = "stages, one graph each"
    table = render.make_table((title, *columns), columns)
    for run in _own_runs(report):
        step = run["step"]
        parts = step["stage_ms"]
        table.add_row(
            run_name(run["name"], run["plan"]),
            *(cell(parts.get(name), ".3f") for name in STAGES),
            f"{step['acceptance_length']:.2f}",
            cell(step["speedup_over_off"]),
            cell(step["break_even_acceptance_length"]),
        )
    return table


def _own_runs(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for run in report["runs"] if run["step"] is not None]
