"""`--stats`: what speculation did, as a table on standard error."""

from __future__ import annotations

from specc.cli import render
from specc.speculation.metrics import SpecStats


def stats_rows(stats: SpecStats) -> list[tuple[str, str]]:
    """Names and formatted values, in the order in which they are read."""
    # a request's first token comes from its prompt; plain decoding takes a pass for each other one
    plain = stats.num_output_tokens - stats.num_first_tokens
    saved = plain - stats.num_steps
    share = f" ({saved / plain:.0%})" if plain else ""
    depths = "  ".join(f"{x:.1%}" for x in stats.accepted_per_depth)
    rows = [
        ("output tokens", str(stats.num_output_tokens)),
        ("tokens/s", f"{stats.tokens_per_s:.1f}"),
        ("time to first token", f"{1000 * stats.time_to_first_token:.0f} ms"),
    ]
    if stats.num_spec_steps:
        rows += [
            (
                "mean acceptance length",
                f"{stats.mean_acceptance_length:.2f} (bonus token included)",
            ),
            ("acceptance rate", f"{stats.acceptance_rate:.1%}"),
            ("accepted per depth", depths or "none"),
        ]
    rows += [
        ("target passes", f"{stats.num_steps} for {plain} tokens, and prefill"),
        ("target passes saved", f"{saved}{share}"),
        (
            "ms per step",
            f"{stats.ms_per_step:.1f}, one graph"
            if stats.whole_s
            else f"{stats.ms_per_step:.1f} = draft {stats.draft_ms_per_step:.1f}"
            f" + verify {stats.verify_ms_per_step:.1f}"
            f" + accept and commit {stats.commit_ms_per_step:.1f}",
        ),
    ]
    return rows


def print_stats(stats: SpecStats) -> None:
    table = render.make_table(("", ""))
    table.show_header = False
    for name, value in stats_rows(stats):
        table.add_row(name, value)
    console = render.make_console(stderr=True)
    console.print()
    console.print(table)
