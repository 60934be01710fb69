"""A fitted draft beside plain decoding and the suffix automaton, greedy and sampled.

Engines of one target with its own numbers, and in 4 bits; a prompt at a time. Plans run in turns,
round after round; what is compared is the processor's time for whole requests, prompts included, on
one thread, which other jobs disturb less than they do a clock. Tokens a step are counts.

    specc fit-draft TARGET --kind eagle3 --texts docs/ -o head/
    python tests/measure/fitted_draft.py TARGET head/ --json out/fitted.json
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from specc.artifact.manifest import MANIFEST_FILE
from specc.cli.prompts import plain_prompts
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, DynamicTree, SpecPlan
from specc.system.machine import describe_machine

PLANS = (
    SpecPlan.from_widths((1,) * 2),
    SpecPlan.from_widths((1,) * 4),
    SpecPlan.from_dynamic(DynamicTree(12, 3, 4)),
    SpecPlan.from_widths((1,) * 6, ("suffix",)),
)
TEMPERATURE = 0.7


def load(target: str, draft: Path, root: Path, quantize: str | None) -> Engine:
    """An engine, compiled where there is none yet."""
    if not (root / MANIFEST_FILE).exists():
        group = 32 if quantize else None
        config = CompileConfig(
            plans=PLANS, dtype="float32", quantize=quantize, quantize_group=group, max_batch_size=1,
            max_seq_len=512, backend="cpu", probe=False,
        )  # fmt: skip
        build(target, draft, root, config)
    return Engine.load(root, num_threads=1)


def measure(
    engine: Engine, prompts: list[Any], tokens: int, temperature: float, rounds: int
) -> list[dict[str, Any]]:
    """A row for each plan of an engine, off first."""
    names = (OFF.name, *(name for name in engine.plans if name != OFF.name))
    params = [
        SamplingParams(temperature=temperature, max_tokens=tokens, seed=n, ignore_eos=True)
        for n in range(len(prompts))
    ]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    outputs: dict[str, list[Any]] = {}
    lengths: dict[str, float] = {}
    for number in range(rounds + 1):
        for name in names:
            # a history of its own: later rounds would find the outputs of earlier ones
            llm = LLM(engine, plan=name)
            begin = time.process_time()
            found = [llm.generate([p], own)[0] for p, own in zip(prompts, params, strict=True)]
            if number:
                seconds[name].append(time.process_time() - begin)
            outputs[name] = [list(one.outputs[0].token_ids) for one in found]
            lengths[name] = llm.get_metrics().mean_acceptance_length or 1.0
    rows = []
    for name in names:
        ratios = [a / b for a, b in zip(seconds[OFF.name], seconds[name], strict=True)]
        rows.append(
            {
                "temperature": temperature,
                "plan": name,
                "tokens_per_step": round(lengths[name], 3),
                "times_off": round(statistics.median(ratios), 3),
                "spread": [round(min(ratios), 3), round(max(ratios), 3)],
                "equals_off": outputs[name] == outputs[OFF.name],
            }
        )
        print(rows[-1], flush=True)
    grams = [tuple(row[i : i + 4]) for row in outputs[OFF.name] for i in range(len(row) - 3)]
    rows[0]["distinct_4_grams"] = round(len(set(grams)) / max(1, len(grams)), 3)
    return rows


def main(
    target: str,
    draft: Path,
    prompts: Annotated[Path | None, typer.Option("--prompts")] = None,
    count: Annotated[int, typer.Option("--num-prompts")] = 12,
    tokens: Annotated[int, typer.Option("--tokens")] = 64,
    rounds: Annotated[int, typer.Option("--rounds")] = 2,
    folder: Annotated[Path | None, typer.Option("--engines", help="where they are kept")] = None,
    output: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Compile, measure, print, and write the report."""
    torch.set_num_threads(1)
    texts, rows = plain_prompts(prompts or draft / "held_out.jsonl")[:count], {}
    with tempfile.TemporaryDirectory() as scratch:
        root = folder or Path(scratch)
        for name, quantize in (("float32", None), ("int4", "int4")):
            engine = load(target, draft, root / name, quantize)
            rows[name] = [
                row
                for temperature in (0.0, TEMPERATURE)
                for row in measure(engine, texts, tokens, temperature, rounds)
            ]
    report = {
        "command": shlex.join(["python", "tests/measure/fitted_draft.py", *sys.argv[1:]]),
        "machine": describe_machine(),
        "torch": torch.__version__,
        "rows": rows,
    }
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
