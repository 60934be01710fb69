"""`specc tune`: prompts in, the chosen plans and why out."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rich.table import Table

from specc.cli import render
from specc.cli.print_table import print_table
from specc.cli.progress import make_listener
from specc.cli.prompts import plain_prompts
from specc.errors import ConfigError
from specc.progress import Phases
from specc.speculation.plans import OFF
from specc.system.machine import check_threads
from specc.tune.run import BatchTuning, TuneOptions, tune


def run_tune(
    engine: Path,
    prompts: Path,
    options: TuneOptions,
    *,
    num_prompts: int | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Tune, with progress on standard error, and say what was chosen and why.

    Raises:
        SpeccError: of the engine, of the prompts, of an option.
    """
    check_options(options, num_prompts)
    check_threads(threads)
    if threads is not None:
        torch.set_num_threads(threads)
    texts = plain_prompts(prompts)[:num_prompts]
    with make_listener() as listen:
        tuning = tune(engine, texts, options, Phases(listen))
    if as_json:
        print(json.dumps(tuning.to_json(options), indent=1))
        return
    console = render.make_console()
    for draft, table in tuning.acceptance.items():
        rows = ", ".join(" ".join(f"{value:.2f}" for value in row[:4]) for row in table[:4])
        console.print(f"acceptance of {draft} by depth and rank: {rows}", soft_wrap=True)
    for batch in tuning.batches:
        console.print(render.heading(f"\nbatch size {batch.batch_size}"))
        print_table(console, _table(batch))
        console.print(_reason(batch), soft_wrap=True)
    if tuning.others:
        names = ", ".join(plan.name for plan in tuning.others)
        text = "removed from" if options.prunes else "chosen for no batch size, and still in"
        do = "" if options.prunes else " (--prune removes them)"
        console.print(f"\n{text} the engine: {names}{do}", soft_wrap=True)


def check_options(options: TuneOptions, num_prompts: int | None) -> None:
    """Raises ConfigError: a number below its least."""
    least = {
        "--max-nodes": (options.max_nodes, 2),
        "--max-depth": (options.max_depth, 1),
        "--tokens": (options.max_tokens, 2),
        "--rounds": (options.rounds, 1),
        "--num-prompts": (1 if num_prompts is None else num_prompts, 1),
    }
    for name, (value, low) in least.items():
        if value < low:
            raise ConfigError(f"{name} {value}", f"{low} or more", f"raise {name}")
    if options.max_nodes > 1024:
        raise ConfigError(f"--max-nodes {options.max_nodes}", "1024 or less", "lower --max-nodes")
    if not 0 <= options.temperature < float("inf"):
        raise ConfigError(f"--temperature {options.temperature}", "0 or more", "correct it")


def _table(batch: BatchTuning) -> Table:
    columns = ("tokens a step", "predicted", "measured", "spread")
    table = render.make_table(("plan", *columns), columns)
    table.columns[0].no_wrap = True
    ranked = sorted(batch.candidates, key=lambda item: -item.measured)
    for item in ranked:
        mark = " *" if item.plan == batch.chosen else ""
        predicted = "" if item.predicted is None else f"{item.predicted:.2f} x"
        length = item.mean_acceptance_length
        table.add_row(
            item.plan.name + mark,
            "" if length is None else f"{length:.2f}",
            predicted,
            f"{item.measured:.2f} x",
            f"{item.spread[0]:.2f} to {item.spread[1]:.2f}",
        )
    table.add_row(OFF.name + (" *" if batch.chosen == OFF else ""), "1.00", "", "1.00 x", "")
    return table


def _reason(batch: BatchTuning) -> str:
    best = max(batch.candidates, key=lambda item: item.measured)
    needed = f"it breaks even at {batch.break_even:.2f} tokens a step" if batch.break_even else ""
    reached = best.mean_acceptance_length
    got = "" if reached is None else f" and reaches {reached:.2f}"
    if batch.chosen == OFF:
        return f"chosen: off, plain decoding; the best plan is {best.plan.name}: {needed}{got}"
    return f"chosen: {best.plan.name}, {best.measured:.2f} times plain decoding: {needed}{got}"
