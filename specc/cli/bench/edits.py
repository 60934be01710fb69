"""`specc bench --edits`: what predictions save where a file is edited."""

from __future__ import annotations

import inspect
import statistics
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.bench.peers.names import TRANSFORMERS
from specc.cli import render
from specc.cli.bench.report import command_line, put_out
from specc.cli.print_table import cell, print_lines, print_table
from specc.cli.progress import make_listener
from specc.cli.prompts import decode, not_empty, read_bytes
from specc.errors import ConfigError, RequestError
from specc.progress import PhaseTimer

if TYPE_CHECKING:
    from specc.bench.edits import Edit
    from specc.bench.rounds import Measurement, Rounds
    from specc.cli.options.bench import BenchOptions
    from specc.runtime.engine import Engine


def run_edits_bench(directory: Path, file: Path, options: BenchOptions) -> None:
    """Measure, and print or write the report.

    Raises:
        SpeccError: of an option, of the file, of the engine or of a checkpoint.
    """
    options.check_outputs()
    text = not_empty(decode(read_bytes(file), str(file)), str(file))
    if set(options.against) - {TRANSFORMERS}:
        raise ConfigError(
            f"--edits and --against {' --against '.join(options.against)}",
            f"--against {TRANSFORMERS}: others write what they like",
            "leave the others out",
        )
    with make_listener() as listen:
        report = measure_edits(directory, text, options, PhaseTimer(listen))
    put_out(report, options, print_edits)


def measure_edits(
    directory: Path, text: str, options: BenchOptions, phases: PhaseTimer
) -> dict[str, Any]:
    """Load the engine, run the rounds of each edit, and make the report."""
    import torch

    from specc.bench import edits as made
    from specc.bench.report import report_head
    from specc.bench.rounds import run_rounds

    with phases.phase("load engine"):
        engine = replace(options.args, engine=directory, max_num_seqs=1).load()
    # another text, which every machine has
    other = inspect.getsource(textwrap)
    edits = made.make_edits(engine, text, other, made.SHARES)
    model = _load_model(engine, options) if options.against else None
    cases: list[dict[str, Any]] = []
    with phases.phase("rounds") as advance:
        for edit in edits:
            contenders: list[Any] = list(made.engine_contenders(engine, edit))
            if model is not None:
                depth = engine.plans[contenders[-1].plan].max_depth
                contenders += made.transformers_contenders(model, edit, depth)
            rounds = run_rounds(contenders, options.rounds, options.warmup, advance)
            cases.append(_case(edit, rounds))
    return report_head(command_line(), options.against) | {
        "engine": str(directory),
        "file": str(options.edits),
        "threads": torch.get_num_threads(),
        "rounds": options.rounds,
        "warmup": options.warmup,
        "edits": cases,
    }


def print_edits(report: dict[str, Any]) -> None:
    """A row for each edit and run."""
    columns = ("edit", "run", "tokens", "tokens/s", "tokens a step", "× off", "× without it")
    table = render.make_table(columns, columns)
    table.columns[0].justify = table.columns[1].justify = "left"
    for edit in report["edits"]:
        for run in edit["runs"]:
            table.add_row(
                edit["name"],
                run["name"],
                str(edit["num_output_tokens"]),
                f"{run['tokens_per_s']:.1f}",
                cell(run["tokens_per_step"]),
                cell(run["speedup_over_off"]),
                cell(run["speedup_over_none"], ".3f"),
            )
    console = render.make_console()
    first = report["edits"][0]
    print_lines(
        console,
        [
            f"{report['machine']['cpu']}, {report['threads']} threads, batch size 1; prompts of"
            f" {first['num_prompt_tokens']} tokens, of which the file has"
            f" {first['num_predicted_tokens']}",
            f"medians of {report['rounds']} interleaved rounds after {report['warmup']} of warm-up;"
            " prefill is included in tokens/s",
        ],
    )
    print_table(console, table, num_keys=2)


def _case(edit: Edit, rounds: Rounds) -> dict[str, Any]:
    """Figures of an edit.

    Raises:
        RequestError: an output is not the edited file.
    """
    from specc.bench.rounds import OFF

    medians = {c.name: statistics.median(m.tokens_per_s for m in own) for c, own in rounds}
    runs = []
    for contender, measured in rounds:
        name, without = contender.name, getattr(contender, "without", None)
        first = measured[0]
        if any(m.outputs != [edit.output] for m in measured):
            raise RequestError(
                f"run {name} of the edit {edit.name}, whose output is not the edited file",
                "a target that writes what it is told",
                "measure with another backend",
            )
        runs.append(
            {
                "name": name,
                "plan": contender.plan,
                "tokens_per_s": medians[name],
                "tokens_per_s_rounds": [m.tokens_per_s for m in measured],
                "tokens_per_step": first.num_decode_tokens / first.num_steps,
                "speedup_over_off": _ratio(rounds.of(OFF), measured) if name != OFF else None,
                "speedup_over_none": _ratio(rounds.of(without), measured) if without else None,
                "ms_per_step": statistics.median(m.ms_per_step for m in measured),
                "excluded_s": statistics.median(m.excluded_s for m in measured),
            }
        )
    return {
        "name": edit.name,
        "num_prompt_tokens": len(edit.prompt),
        "num_output_tokens": len(edit.output),
        "num_predicted_tokens": len(edit.predicted),
        "runs": runs,
    }


def _ratio(other: list[Measurement], measured: list[Measurement]) -> float:
    """How many times as many tokens a second, round by round."""
    pairs = zip(measured, other, strict=True)
    return statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs)


def _load_model(engine: Engine, options: BenchOptions) -> Any:
    """The checkpoint in transformers, in the engine's type."""
    import torch

    from specc.bench.edits import load_checkpoint

    manifest = engine.manifest
    assert manifest is not None, "an engine that was loaded has a manifest"
    source = options.target_checkpoint or manifest.models[0].source
    try:
        return load_checkpoint(source, getattr(torch, manifest.dtype))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--against {TRANSFORMERS}, which cannot load {source}",
            "the checkpoint that was compiled",
            "pass --target-checkpoint",
        ) from error
