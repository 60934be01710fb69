"""The report of a load as text: one run as `vllm bench serve` prints it, several as a table."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console

from specc.cli import render
from specc.cli.print_table import cell, print_lines, print_table
from specc.load.figures import PERCENTILES, TIMES
from specc.load.report import name_of

_LABEL, _VALUE = 40, 10
_COUNTS = (
    ("Successful requests", "completed", "d"),
    ("Failed requests", "failed", "d"),
    ("Benchmark duration (s)", "duration_s", ".2f"),
    ("Total input tokens", "total_input_tokens", "d"),
    ("Total generated tokens", "total_output_tokens", "d"),
    ("Request throughput (req/s)", "request_throughput", ".2f"),
    ("Request goodput (req/s)", "request_goodput", ".2f"),
    ("Output token throughput (tok/s)", "output_throughput", ".2f"),
    ("Total token throughput (tok/s)", "total_token_throughput", ".2f"),
)
_SPECULATION = (
    ("Acceptance rate (%)", "rate", ".2f"),
    ("Acceptance length", "length", ".2f"),
    ("Drafts", "num_drafts", "d"),
    ("Draft tokens", "draft_tokens", "d"),
    ("Accepted tokens", "accepted_tokens", "d"),
)


def print_load_report(report: dict[str, Any]) -> None:
    """Print the settings, the figures, and what to be careful about."""
    console = render.make_console()
    print_lines(console, _setting_lines(report))
    cells = report["cells"]
    if len(cells) == 1 and len(cells[0]["rounds"]) == 1:
        print_lines(console, block_of(cells[0]["rounds"][0]))
    else:
        console.print()
        _print_table(console, cells)
    print_lines(console, [*_comparison_lines(cells), *report["notes"]])


def block_of(figures: dict[str, Any]) -> list[str]:
    """One run, a figure a line; what nobody measured is left out."""
    lines = [_title(" Serving Benchmark Result ", "=")]
    lines += [
        _line(label, figures[key], form) for label, key, form in _COUNTS if _has(figures, key)
    ]
    for name, title in TIMES.items():
        if not _has(figures, f"mean_{name}_ms"):
            continue
        lines.append(_title(title, "-"))
        for kind in ("mean", "median", *(f"p{percent}" for percent in PERCENTILES)):
            label = f"{kind.capitalize()} {name.upper()} (ms)"
            lines.append(_line(label, figures[f"{kind}_{name}_ms"], ".2f"))
    if figures["spec_decode_num_drafts"]:
        lines.append(_title("Speculative Decoding", "-"))
        for label, key, form in _SPECULATION:
            # the length and the rate are acceptance's, the counts are not
            name = f"acceptance_{key}" if key in ("rate", "length") else key
            lines.append(_line(label, figures[f"spec_decode_{name}"], form))
        lines.append("Per-position acceptance (%):")
        rates = figures["spec_decode_per_position_acceptance_rates"]
        for position, rate in enumerate(rates):
            lines.append(_line(f"  Position {position}", 100 * rate, ".2f"))
    return [*lines, "=" * (_LABEL + _VALUE)]


def _setting_lines(report: dict[str, Any]) -> list[str]:
    settings, machine = report["settings"], report["machine"]
    where = f"{machine['cpu']}, {machine['usable_cores']} cores"
    if report["load_average"]["before"]:
        where += f", load average {report['load_average']['before'][0]:.1f} before"
    if report["is_virtual"]:
        where = "simulated seconds"
    prompts = settings["prompts"] or "built-in"
    lengths = f" cut to {settings['prompt_tokens']} tokens" if settings["prompt_tokens"] else ""
    return [
        f"{report['subject']}: {where}",
        f"{settings['num_requests']} requests, burstiness {settings['burstiness']:g},"
        f" prompts {prompts}{lengths}, {settings['output_tokens']} output tokens,"
        f" {settings['rounds']} interleaved {'round' if settings['rounds'] == 1 else 'rounds'}",
    ]


def _print_table(console: Console, cells: list[dict[str, Any]]) -> None:
    """A row for every rate and policy: medians of the rounds."""
    has_goodput = any(_has(figures, "num_good") for one in cells for figures in one["rounds"])
    has_rounds = any(len(one["rounds"]) > 1 for one in cells)
    columns = ["latency ms", "× off", "TTFT", "p99", "TPOT", "p99", "tok/s", "length"]
    columns[1:1] = ["least – most"] if has_rounds else []
    columns += ["good req/s"] if has_goodput else []
    table = render.make_table(("req/s", "policy", *columns), ("req/s", *columns))
    table.columns[1].no_wrap = True
    last = object()
    for one in cells:
        rate = one["request_rate"]
        shown = "" if rate == last else "inf" if rate is None else f"{rate:g}"
        last = rate
        spread, over = one["mean_e2el_ms"], one["latency_over_off"]
        row = [cell(spread and spread["median"], ".0f")]
        if has_rounds:
            row.append(f"{spread['min']:.0f} – {spread['max']:.0f}" if spread else "")
        row.append(cell(over and over["median"]))
        for key in ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms"):
            row.append(cell(median_of(one, key), ".1f"))
        row.append(cell(median_of(one, "output_throughput"), ".1f"))
        row.append(cell(median_of(one, "spec_decode_acceptance_length")))
        if has_goodput:
            row.append(cell(median_of(one, "request_goodput")))
        table.add_row(shown, one["policy"], *row)
    print_table(console, table, num_keys=2)
    console.print()


def _comparison_lines(cells: list[dict[str, Any]]) -> list[str]:
    """Simulated mean latencies beside measured ones."""
    lines = []
    for one in cells:
        simulated = one.get("simulated")
        if not simulated or not simulated["over_measured"]:
            continue
        ratio = simulated["over_measured"]
        lines.append(
            f"{name_of(one)}: simulated mean latency {simulated['mean_e2el_ms']['median']:.0f} ms,"
            f" {ratio['median'] - 1:+.1%} of the measured one"
            f" ({ratio['min'] - 1:+.1%} … {ratio['max'] - 1:+.1%})"
        )
    return lines


def median_of(measured: dict[str, Any], key: str) -> float | None:
    """Of the rounds of a cell of the report that have this figure."""
    values = [figures[key] for figures in measured["rounds"] if _has(figures, key)]
    return statistics.median(values) if values else None


def _has(figures: dict[str, Any], key: str) -> bool:
    return figures[key] is not None


def _title(text: str, fill: str) -> str:
    return text.center(_LABEL + _VALUE, fill)


def _line(label: str, value: float, form: str) -> str:
    return f"{label + ':':<{_LABEL}}{value:<{_VALUE}{form}}".rstrip()
