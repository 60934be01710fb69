"""What rounding costs a draft: tokens a step, and speed over off, beside the draft in floats.

One engine has the same draft three times, in its own numbers, in int8 and in int4; its plans run in
turns, as in `fitted_draft.py`.

    python tests/measure/rounded_drafts.py TARGET DRAFT --prompts FILE --json out/rounded.json
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from fitted_draft import measure

from specc.cli.prompts import plain_prompts
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.quantize_options import FLOATS
from specc.runtime.engine import Engine
from specc.speculation.plans import SpecPlan
from specc.system.machine import describe_machine

FORMATS = (FLOATS, "int8", "int4")
WIDTHS = ((1, 1, 1, 1), (3, 2, 1))


def main(
    target: str,
    draft: Path,
    prompts: Annotated[Path, typer.Option("--prompts")],
    widths: Annotated[list[str] | None, typer.Option("--tree")] = None,
    dtype: Annotated[str, typer.Option("--dtype")] = "float32",
    count: Annotated[int, typer.Option("--num-prompts")] = 12,
    tokens: Annotated[int, typer.Option("--tokens")] = 64,
    rounds: Annotated[int, typer.Option("--rounds")] = 2,
    output: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Compile, measure, print, and write the report."""
    torch.set_num_threads(1)
    shapes = [tuple(map(int, text.split(","))) for text in widths or ()] or WIDTHS
    plans = tuple(
        SpecPlan.from_widths(shape, (f"draft_{number}",))
        for shape in shapes
        for number in range(len(FORMATS))
    )
    config = CompileConfig(
        plans=plans, dtype=dtype, draft_quantize=FORMATS, max_batch_size=1, max_seq_len=512,
        backend="cpu", probe=False,
    )  # fmt: skip
    texts = plain_prompts(prompts)[:count]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "engine"
        build(target, [draft] * len(FORMATS), path, config)
        engine = Engine.load(path, num_threads=1)
        rows = [
            row
            for temperature in (0.0, 1.0)
            for row in measure(engine, texts, tokens, temperature, rounds)
        ]
    formats = {f"draft_{number}": kind for number, kind in enumerate(FORMATS)}
    of_plan = {plan.name: formats[plan.model_names[0]] for plan in plans}
    for row in rows:
        row["draft"] = of_plan.get(row["plan"])
    report = {
        "command": shlex.join(["python", "tests/measure/rounded_drafts.py", *sys.argv[1:]]),
        "machine": describe_machine(),
        "torch": torch.__version__,
        "rows": rows,
    }
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
