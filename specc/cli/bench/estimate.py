"""`specc bench --synthetic … --estimate`: nodes, bytes and milliseconds of steps, without a GPU."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from specc.cli.progress import make_listener
from specc.errors import ConfigError
from specc.progress import PhaseTimer
from specc.system.extras import install_command
from specc.system.files import format_bytes

if TYPE_CHECKING:
    from specc.cli.options.bench import BenchOptions, ShapesOptions


def run_estimate(options: ShapesOptions, common: BenchOptions) -> None:
    """Count, and print or write the report.

    Raises:
        ConfigError: an option that only measurements have, or no Triton.
        SpeccError: of an option or of a shape.
    """
    common.check_outputs()
    for name, value in (("--against", common.against or None), ("--plot", common.plot)):
        if value is not None:
            raise ConfigError(
                f"{name} with --estimate", "nothing to run beside", f"leave out {name}"
            )
    if common.synthetic_acceptance is not None:
        raise ConfigError(
            f"--synthetic-acceptance {common.synthetic_acceptance} with --estimate",
            "a step alone: what it yields is not estimated",
            "leave it out",
        )
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "--estimate, and no triton",
            "triton, whose launches are counted (it needs no GPU for that)",
            install_command("cuda"),
        )
    with make_listener() as listen:
        report = estimate(options, common, PhaseTimer(listen))
    from specc.cli.bench.report import put_out

    put_out(report, common, print_estimate)


def estimate(options: ShapesOptions, common: BenchOptions, phases: PhaseTimer) -> dict[str, Any]:
    """Compile the shapes without weights, count the nodes of their steps, and make the report."""
    from specc.bench.synthetic.estimate import make_estimate
    from specc.cli.bench.synthetic import compile_for, layouts_of

    programs = compile_for(options, common, phases, "cuda")
    layout, of_draft = layouts_of(options)
    settings = {
        "synthetic": options.synthetic,
        "draft": options.draft,
        "context": options.num_context,
        "batch_size": common.batch_size,
        "quantize": layout,
        "draft_quantize": of_draft,
        "weight_fragments": options.weight_fragments,
    }
    with phases.phase("count nodes"):
        return make_estimate(programs, options.num_context, settings)


def print_estimate(report: dict[str, Any]) -> None:
    """Print the plans, then what the estimate assumes."""
    from specc.cli import render
    from specc.cli.bench.synthetic_table import layout_words
    from specc.cli.print_table import cell, print_lines, print_table

    console = render.make_console()
    settings = report["settings"]
    models = [(label, report[label]) for label in ("target", "draft") if label in report]
    lines = [
        f"{label} {model['source']}: {model['layers']} layer{'s' * (model['layers'] != 1)}"
        # of a single layer, whose pass is all that there is of it, they are not told apart
        + (f", {model['nodes_per_layer']} nodes a layer" if model["nodes_per_layer"] else "")
        for label, model in models
    ]
    lines.append(
        f"estimated for {report['device']}, nothing was measured; {settings['dtype']}, batch size"
        f" {settings['batch_size']}, context {settings['context']}"
        + "".join(f"; {words}" for words in layout_words(settings))
    )
    print_lines(console, lines)
    console.print()
    columns = (
        "nodes", "reads", "floor ms", "estimate ms", "× floor", "draft", "verify", "rest",
        "filtered", "× floor", "early starts", "× floor, least",
    )  # fmt: skip
    table = render.make_table(("step", *columns), columns)
    for name, plan in report["plans"].items():
        parts = [
            plan["models"].get("draft"),
            plan["models"]["target"],
            plan["between"],
        ]
        table.add_row(
            name,
            str(plan["nodes"]),
            format_bytes(plan["bytes"]),
            f"{plan['floor_ms']:.3f}",
            f"{plan['estimate_ms']:.3f}",
            f"{plan['ratio']:.2f}",
            *(cell(part and part["estimate_ms"], ".3f") for part in parts),
            str(plan["filtered"]["nodes"]),
            f"{plan['filtered']['ratio']:.2f}",
            str(plan["dependent"]["gaps"]),
            f"{plan['dependent']['least_ratio']:.2f}",
        )
    print_table(console, table)
    console.print()
    assumptions = [
        (item["name"], f"{item['value']:g} {item['unit']}".strip(), item["source"])
        for item in report["assumptions"]
    ]
    print_lines(console, [f"{name}: {value} ({source})" for name, value, source in assumptions])
