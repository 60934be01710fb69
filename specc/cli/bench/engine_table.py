"""The report of a benchmark as tables."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from specc.bench.rounds import run_name
from specc.cli import render
from specc.cli.print_table import cell, print_lines, print_table


def print_report(report: dict[str, Any]) -> None:
    """Print what a reader compares first, then what explains it, then what to be careful about."""
    console = render.make_console()
    print_lines(console, _setting_lines(report))
    console.print()
    print_table(console, speed_table(report))
    console.print()
    if any(run["categories"] for run in report["runs"]):
        print_table(console, category_table(report), num_keys=2)
        console.print()
    print_table(console, _step_table(report))
    console.print()
    print_lines(console, closing_lines(report))


def _setting_lines(report: dict[str, Any]) -> list[str]:
    settings, machine, bandwidth = report["settings"], report["machine"], report["read_bandwidth"]
    engine = report["engine"]
    num_prompts = f"{settings['num_prompts']} prompts"
    outputs = f"{settings['tokens']} output tokens each"
    if settings["dataset"] is not None:
        num_prompts = f"{settings['num_prompts']} questions with prompts"
        outputs = f"at most {settings['tokens']} output tokens a turn"
    return [
        f"{machine['cpu']}, {settings['threads']} of {machine['usable_cores']} threads,"
        f" read bandwidth {bandwidth['gb_s']:.1f} GB/s ({bandwidth['method']})",
        f"{num_prompts} of {settings['num_prompt_tokens']} tokens in all,"
        f" {outputs}, batch size {settings['batch_size']},"
        f" {engine['dtype']}, backend {engine['backend']}",
        f"medians of {settings['rounds']} interleaved rounds after {settings['warmup']} of warm-up;"
        " prefill is included in tokens/s",
    ]


def speed_table(report: dict[str, Any]) -> Table:
    """Tokens a second of every run, and what they are compared with."""
    columns = ("tokens/s", "least – most", "× off", "first token", "length", "even at")
    table = render.make_table(("run", *columns, "identical"), ("run", *columns))
    table.columns[0].justify = "left"
    for run in report["runs"]:
        speed_up = run["speedup_over_off"]
        table.add_row(
            run_name(run["name"], run["plan"]),
            f"{run['tokens_per_s']:.1f}",
            f"{run['tokens_per_s_min']:.1f} – {run['tokens_per_s_max']:.1f}",
            cell(speed_up and speed_up["median"]),
            f"{run['time_to_first_token_ms']:.0f} ms",
            cell(run["mean_acceptance_length"]),
            cell(run["break_even_acceptance_length"]),
            _identical(run),
        )
    for item in _not_available(report):
        table.add_row(item["name"], "not available", *[""] * len(columns))
    return table


def category_table(report: dict[str, Any]) -> Table:
    """Of every category what each plan gains, and of all of them together."""
    columns = ("category", "run", "turns", "tokens/s", "least – most", "× off", "length")
    table = render.make_table(columns, columns)
    table.columns[0].justify = table.columns[1].justify = "left"
    runs = report["runs"]
    for category in runs[0]["categories"]:
        for run in runs:
            figures = run["categories"][category]
            left_out = figures["num_left_out"]
            turns = f"{figures['num_turns']}"
            if left_out:
                turns += f" of {figures['num_turns'] + left_out}"
            _add_category(table, category, run, figures, turns)
    for run in runs:
        _add_category(table, "all", run, run, "")
    return table


def _add_category(
    table: Table, category: str, run: dict[str, Any], figures: dict[str, Any], turns: str
) -> None:
    speed_up = figures["speedup_over_off"]
    row = [category, run_name(run["name"], run["plan"]), turns]
    if figures["num_output_tokens"]:
        row += [
            f"{figures['tokens_per_s']:.1f}",
            f"{figures['tokens_per_s_min']:.1f} – {figures['tokens_per_s_max']:.1f}",
            cell(speed_up and speed_up["median"]),
            cell(figures["mean_acceptance_length"]),
        ]
    table.add_row(*row)


def _step_table(report: dict[str, Any]) -> Table:
    """Where the time of a decode step goes, and what it reads."""
    columns = ("all", "draft", "verify", "commit", "host", "reads", "GB/s", "of bandwidth")
    table = render.make_table(("ms a step", *columns), ("ms a step", *columns))
    table.columns[0].justify = "left"
    for run in report["runs"]:
        row = [f"{run['ms_per_step']:.2f}"]
        stages = run["stage_ms_per_step"]
        if stages:
            names = ("draft", "verify", "accept_commit", "host")
            row += [f"{stages[name]:.2f}" for name in names]
        if run["bytes_per_step"] is not None:
            gb_s = run["bytes_per_step"] / 1e6 / run["ms_per_step"]
            row += [f"{run['bytes_per_step'] / 1e6:.1f} MB", f"{gb_s:.2f}"]
            row.append(f"{run['read_bandwidth_share']:.0%}")
        table.add_row(run_name(run["name"], run["plan"]), *row)
    return table


def closing_lines(report: dict[str, Any]) -> list[str]:
    """What stands below the tables: depths, differences, and what to be careful about."""
    absent = [
        f"{item['name']} is not available: {item['reason']}" for item in _not_available(report)
    ]
    return [*_depth_lines(report), *_difference_lines(report), *absent, *report["notes"]]


def _not_available(report: dict[str, Any]) -> list[dict[str, str]]:
    """What peers cannot do; reports of shapes have no peers in processes of their own."""
    found: list[dict[str, str]] = report.get("not_available", [])
    return found


def _depth_lines(report: dict[str, Any]) -> list[str]:
    """What was accepted, depth by depth, and where dice decided it."""
    lines = []
    for run in report["runs"]:
        if run["accepted_per_depth"]:
            depths = "  ".join(f"{share:.1%}" for share in run["accepted_per_depth"])
            lines.append(f"accepted per depth, {run['plan']}: {depths}")
        if (synthetic := run["synthetic_acceptance"]) is not None:
            chances = ", ".join(f"{p:g}" for p in synthetic["probabilities"])
            lines.append(
                f"synthetic acceptance {chances}, {run['plan']}: the dice lead to a length of"
                f" {synthetic['expected_acceptance_length']:.2f}; the output is not the target's"
            )
    return lines


def _difference_lines(report: dict[str, Any]) -> list[str]:
    """Where outputs leave those of plain decoding."""
    lines = []
    for run in report["runs"]:
        name = run_name(run["name"], run["plan"])
        for item in run["differences"][:5]:
            margin = item["margin"]
            reason = "unknown" if margin is None else f"{margin:.1e}"
            tie = ", a near tie" if item["is_near_tie"] else ""
            what = f"prompt {item['prompt']}"
            if "question_id" in item:
                what = f"question {item['question_id']}, turn {item['turn'] + 1},"
            lines.append(
                f"{name}: {what} differs from token"
                f" {item['position']} on;"
                f" gap of the target's two best logits there: {reason}{tie}"
            )
        if (more := len(run["differences"]) - 5) > 0:
            lines.append(f"{name}: {more} more prompts differ")
    return lines


def _identical(run: dict[str, Any]) -> str:
    if run["identical"] is None:
        return "synthetic"
    if run["identical"]:
        return "yes"
    total = run["identical_prompts"] + len(run["differences"])
    ties = all(item["is_near_tie"] for item in run["differences"])
    return f"{run['identical_prompts']} of {total}{', near ties' if ties else ''}"
