"""`specc fit-draft`: texts in, a draft and what it is worth out."""

from __future__ import annotations

import json

from specc.cli import render
from specc.cli.print_table import print_lines, print_table
from specc.cli.progress import make_listener
from specc.fit.options import FitOptions
from specc.fit.run import Fit, fit_draft
from specc.progress import PhaseTimer


def run_fit(target: str, options: FitOptions, *, as_json: bool) -> None:
    """Fit, with progress on standard error, and say what came out.

    Raises:
        SpeccError: found / needed / do.
    """
    with make_listener() as listen:
        fit = fit_draft(target, options, PhaseTimer(listen))
    if as_json:
        print(json.dumps(fit.to_json(), indent=1))
        return
    _print(fit, options.num_speculative_tokens)


def _print(fit: Fit, depth: int) -> None:
    console = render.make_console()
    counts = ", ".join(f"{count:,} {kind}" for kind, count in fit.tokens.items())
    lines = [*fit.warnings, f"learned from {counts} tokens, in {fit.result.steps:,} steps"]
    if fit.result.loss is not None:
        lines.append(
            "loss of the first and the last steps: {:.3f}, {:.3f}".format(*fit.result.loss)
        )
    print_lines(console, lines)
    columns = ("prompts", "tokens a step", *(f"depth {d + 1}" for d in range(depth)))
    table = render.make_table(("greedy chains along", *columns), columns)
    for name, followed in fit.followed.items():
        shares = [f"{share:.2f}" for share in followed.accepted_at_depth]
        table.add_row(name, str(followed.num_texts), f"{followed.acceptance_length:.2f}", *shares)
    print_table(console, table)
    print_lines(console, ["", f"{fit.parameters:,} parameters in {fit.directory}", fit.compile])
