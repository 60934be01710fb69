"""`specc tune`: prompts in, the chosen plans and why out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from rich.table import Table

from specc.cli import render, render_plans
from specc.cli.print_table import cell, print_lines, print_table
from specc.cli.progress import make_listener
from specc.cli.prompts import plain_prompts
from specc.drafters.views import is_view
from specc.progress import PhaseTimer
from specc.speculation.plans import OFF
from specc.tune.drafters.skip_search import LEAST_SPEEDUP, SkipSearch, search_skips
from specc.tune.run import BatchTuning, Tuning, tune

if TYPE_CHECKING:
    from specc.cli.options.common import PromptFile
    from specc.runtime.engine_args import EngineArgs
    from specc.tune.options import TuneOptions


def run_tune(args: EngineArgs, file: PromptFile, options: TuneOptions, *, as_json: bool) -> None:
    """Tune, with progress on standard error, and say what was chosen and why.

    Raises:
        SpeccError: of the engine, of the prompts, of an option.
    """
    assert file.prompts is not None, "a required option"
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    texts = plain_prompts(file.prompts)[: file.num_prompts]
    if options.skip is not None:
        _run_skips(args, texts, options, as_json=as_json)
        return
    with make_listener() as listen:
        tuning = tune(args.directory, texts, options, PhaseTimer(listen), args.offload_weights)
    if as_json:
        print(json.dumps(tuning.to_json(options), indent=1))
        return
    console = render.make_console()
    print_lines(console, _acceptance_lines(tuning.acceptance))
    print_lines(console, _sharpness_lines(tuning.sharpness))
    if any(is_view(draft) for draft in tuning.acceptance):
        print_lines(console, _context_lines(tuning, options))
    if tuning.critical:
        title = "\ncontext from which on self-drafts pay, by the tables"
        console.print(render.heading(title))
        print_table(console, render_plans.critical_table(tuning.critical))
    for batch in tuning.batches:
        console.print(render.heading(f"\nbatch size {batch.batch_size}"))
        print_table(console, _table(batch))
        print_lines(console, [_reason(batch)])
    if tuning.others:
        names = ", ".join(plan.name for plan in tuning.others)
        text = "removed from" if options.prunes else "chosen for no batch size, and still in"
        do = "" if options.prunes else " (--prune removes them)"
        print_lines(console, ["", f"{text} the engine: {names}{do}"])


def _run_skips(
    args: EngineArgs, texts: list[str | list[int]], options: TuneOptions, *, as_json: bool
) -> None:
    """Search for layers to leave out, and say which draft to compile with, or that none pays."""
    with make_listener() as listen:
        search = search_skips(args.directory, texts, options, PhaseTimer(listen))
    if as_json:
        print(json.dumps(search.to_json(), indent=1))
        return
    console = render.make_console()
    columns = ("first token", "chain", "tokens a step", "pass", "predicted")
    table = render.make_table(("draft", *columns), columns)
    for choice in sorted(search.choices, key=lambda item: -item.speedup):
        table.add_row(
            choice.draft.option,
            f"{choice.acceptance:.2f}",
            str(choice.num_draft_tokens),
            f"{choice.tokens:.2f}",
            f"{choice.pass_share:.2f}",
            f"{choice.speedup:.2f} x",
        )
    title = f"layers left out of {search.num_layers}, batch size {search.batch_size}, context"
    console.print(render.heading(f"{title} {search.context}"))
    print_table(console, table)
    print_lines(console, ["", _skip_verdict(search)])


def _skip_verdict(search: SkipSearch) -> str:
    best = search.best
    promise = (
        f"{best.tokens:.2f} tokens a step of a chain of {best.num_draft_tokens}, whose passes take"
        f" {best.pass_share:.2f} of the target's: {best.speedup:.2f} times plain decoding"
    )
    if not search.pays:
        return (
            f"none pays: the best of {len(search.choices)}, {best.draft.option}, promises"
            f" {promise}; {LEAST_SPEEDUP:.2f} is the least that is worth compiling"
        )
    return (
        f"compile with --draft {best.draft.option} --num-speculative-tokens"
        f" {best.num_draft_tokens}: it promises {promise}; specc tune then measures whole steps"
    )


def _acceptance_lines(acceptance: dict[str, list[list[float]]]) -> list[str]:
    tables = {
        draft: ", ".join(" ".join(f"{value:.2f}" for value in row[:4]) for row in table[:4])
        for draft, table in acceptance.items()
    }
    return [f"acceptance of {draft} by depth and rank: {rows}" for draft, rows in tables.items()]


def _sharpness_lines(sharpness: dict[str, list[float]]) -> list[str]:
    return [
        f"logits of {draft} are multiplied by {', '.join(f'{x:.2f}' for x in factors)} by depth:"
        " more of what it draws is accepted so"
        for draft, factors in sharpness.items()
    ]


def _context_lines(tuning: Tuning, options: TuneOptions) -> list[str]:
    """At which context self-drafts were measured, and of which of them that says nothing."""
    least, most = tuning.contexts
    lengths = f"{least}" if least == most else f"{least} to {most}"
    lines = [f"self-drafts after prompts of {lengths} tokens"]
    if tuning.is_repeated:
        lines[0] += ", in which prompts are repeated: that is easier to draft than other text"
    if tuning.whole:
        names = ", ".join(view.option for view in tuning.whole)
        do = "" if options.context else "; --context N joins prompts to N tokens"
        lines.append(
            f"{names}: holds all of the shortest of them, so acceptance was not measured at long"
            f" context{do}"
        )
    return lines


def _table(batch: BatchTuning) -> Table:
    columns = ("tokens a step", "predicted", "measured", "spread")
    table = render.make_table(("plan", *columns), columns)
    table.columns[0].no_wrap = True
    ranked = sorted(batch.candidates, key=lambda item: -item.measured)
    for item in ranked:
        mark = " *" if item.plan == batch.chosen else ""
        table.add_row(
            item.plan.name + mark,
            cell(item.mean_acceptance_length),
            "" if item.predicted is None else f"{item.predicted:.2f} x",
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
