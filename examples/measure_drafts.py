"""Tokens a step and tokens a second of every plan of an engine, greedy and sampled by each rule.

Every round runs every case once, in an order that rotates; figures are medians, those of speed
relative to plain decoding at the same temperature in the same round.

    python examples/measure_drafts.py ENGINE --prompts prompts.jsonl --json out.json
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from specc.bench import Measurement
from specc.bench_engine import EngineContender, tokenize
from specc.cli_run import read_prompt_lines
from specc.machine import describe_machine
from specc.plans import OFF
from specc.runtime.engine import Engine
from specc.sampling_params import SamplingParams


@dataclass(frozen=True)
class Case:
    """One way to generate; the rule of greedy cases is None."""

    plan: str
    temperature: float
    rule: str | None


def cases_of(engine: Engine, temperatures: list[float], rules: list[str]) -> list[Case]:
    """Off once a temperature, other plans with every rule that is lossless for them."""
    found = []
    for temperature in temperatures:
        found.append(Case(OFF.name, temperature, None))
        for name, plan in engine.plans.items():
            if not plan.speculates:
                continue
            if temperature == 0:
                found.append(Case(name, 0.0, None))
                continue
            known = {rule.name.lower() for rule in plan.rules}
            found += [Case(name, temperature, rule) for rule in rules if rule in known]
    return found


def measure(
    engine: Engine,
    prompts: list[list[int]],
    cases: list[Case],
    batch_size: int,
    tokens: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """Run all cases, interleaved; a first round is not counted."""
    batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    contenders = {}
    for case in cases:
        params = [
            SamplingParams(
                max_tokens=tokens,
                ignore_eos=True,
                temperature=case.temperature,
                rule=case.rule,
                seed=seed,
            )
            for seed in range(batch_size)
        ]
        contenders[case] = EngineContender(
            engine, case.plan, case.plan, batches, tokens, params=params
        )
    runs: dict[Case, list[Measurement]] = {case: [] for case in cases}
    for number in range(rounds + 1):
        turn = number % len(cases)
        for case in [*cases[turn:], *cases[:turn]]:
            measured = contenders[case].run()
            if number:
                runs[case].append(measured)
        print(f"batch {batch_size}: round {number} of {rounds}", file=sys.stderr)
    rows = []
    for case in cases:
        off = runs[Case(OFF.name, case.temperature, None)]
        ratios = [
            own.decode_tokens_per_s / plain.decode_tokens_per_s
            for own, plain in zip(runs[case], off, strict=True)
        ]
        last = runs[case][-1]
        rows.append(
            {
                "plan": case.plan,
                "temperature": case.temperature,
                "rule": case.rule,
                "batch_size": batch_size,
                "tokens_per_step": last.mean_acceptance_length or 1.0,
                "accepted_per_depth": last.accepted_per_depth,
                "tokens_per_s": statistics.median(m.decode_tokens_per_s for m in runs[case]),
                "times_off": statistics.median(ratios),
                "times_off_spread": [min(ratios), max(ratios)],
                "equals_off": last.outputs == off[-1].outputs,
            }
        )
    return rows


def main(
    engine: Path,
    prompts: Annotated[Path, typer.Option()],
    num_prompts: Annotated[int, typer.Option()] = 16,
    tokens: Annotated[int, typer.Option()] = 64,
    batch_size: Annotated[list[int], typer.Option()] = [1, 8],  # noqa: B006  typer's way
    temperature: Annotated[list[float], typer.Option()] = [0.0, 1.0],  # noqa: B006
    rule: Annotated[list[str], typer.Option()] = ["coupled", "delta", "mss", "swor"],  # noqa: B006
    rounds: Annotated[int, typer.Option()] = 3,
    output: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure, print a table, and write the report."""
    loaded = Engine.load(engine)
    texts = list(read_prompt_lines(prompts))[:num_prompts]
    token_ids = tokenize(loaded, texts, tokens)
    cases = cases_of(loaded, temperature, rule)
    rows: list[dict[str, Any]] = []
    for size in batch_size:
        rows += measure(loaded, token_ids, cases, size, tokens, rounds)
    for row in rows:
        name = f"{row['plan']:28} T {row['temperature']:<4} {row['rule'] or '':8}"
        figures = f"{row['tokens_per_step']:5.2f} a step {row['times_off']:5.2f} x off"
        print(f"batch {row['batch_size']}  {name} {figures}  {row['tokens_per_s']:8.1f} tokens/s")
    if output is not None:
        report = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": describe_machine(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "num_prompts": len(token_ids),
            "tokens": tokens,
            "rounds": rounds,
            "rows": rows,
        }
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
