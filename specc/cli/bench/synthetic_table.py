"""The report of a benchmark with random weights as tables."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from specc.cli import render
from specc.cli.bench.engine_table import depth_lines, difference_lines, run_name, speed_table
from specc.cli.print_table import print_table
from specc.system.files import format_bytes

STAGES = {"draft": "draft", "verify": "verify", "draw": "draw", "accept_commit": "commit"}


def print_shapes_report(report: dict[str, Any]) -> None:
    """Print what a reader compares first, then steps beside their floor, then their parts."""
    console = render.make_console()
    for line in _setting_lines(report):
        console.print(line, soft_wrap=True)
    for table in (speed_table(report), _step_table(report), _part_table(report)):
        console.print()
        print_table(console, table)
    console.print()
    for line in [*depth_lines(report), *difference_lines(report), *report["notes"]]:
        console.print(line, soft_wrap=True)


def _setting_lines(report: dict[str, Any]) -> list[str]:
    settings, bandwidth, engine = report["settings"], report["copy_bandwidth"], report["engine"]
    device = (
        report["device"]["name"] or f"{report['machine']['cpu']}, {settings['threads']} threads"
    )
    models = ", ".join(
        f"{m['source']} ({render.format_count(m['num_parameters'])} parameters)"
        for m in engine["models"]
    )
    return [
        f"{device}, copy bandwidth {bandwidth['gb_s']:.1f} GB/s"
        f" ({format_bytes(bandwidth['buffer_bytes'])} read and written)",
        f"{models}: random weights, {engine['dtype']}, backend {engine['backend']}",
        f"batch size {settings['batch_size']}, context {settings['context']},"
        f" {settings['tokens']} output tokens; medians of {settings['rounds']} interleaved rounds"
        f" after {settings['warmup']} of warm-up; prefill is included in tokens/s",
    ]


def _step_table(report: dict[str, Any]) -> Table:
    """A step by the device's clock, steps queued back to back."""
    columns = ("all", "least – most", "floor", "× floor", "gap", "host", "kernels", "moves")
    table = render.make_table(("ms a step", *columns), columns)
    for run in _own_runs(report):
        step = run["step"]
        table.add_row(
            run_name(run),
            f"{step['ms']:.3f}",
            f"{step['ms_min']:.3f} – {step['ms_max']:.3f}",
            f"{step['floor_ms']:.3f}",
            f"{step['floor_ratio']:.2f}",
            _share(step["gap_share"]),
            _share(step["host_share"]),
            "" if step["kernels"] is None else f"{step['kernels']:.0f}",
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
            run_name(run),
            *(f"{parts[name]:.3f}" if name in parts else "" for name in STAGES),
            f"{step['acceptance_length']:.2f}",
            _ratio(step["speedup_over_off"]),
            _ratio(step["break_even_acceptance_length"]),
        )
    return table


def _own_runs(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for run in report["runs"] if run["step"] is not None]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
