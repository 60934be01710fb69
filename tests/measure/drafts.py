"""Tokens a step and tokens a second of every plan of an engine, greedy and sampled by each rule.

Every round runs every case once, in an order that rotates; figures are medians, those of speed
relative to plain decoding at the same temperature in the same round. `--plan` leaves the others
out, `--policy` adds what chooses among the plans. `--tuned` is an engine that `specc tune` has
changed, and whose plans this one has: the regret of a tuned plan is how much faster than it the
fastest of the others was, round by round, with the interval that 95 % of resampled rounds give.

    python tests/measure/drafts.py ENGINE --prompts prompts.jsonl --json out.json
"""

from __future__ import annotations

import json
import random
import shlex
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from specc.artifact.manifest import PROFILE_FILE
from specc.bench.engine import EngineContender, tokenize
from specc.bench.rounds import Measurement
from specc.cli.prompts import plain_prompts
from specc.runtime.backends.program_files import read_json
from specc.runtime.engine import Engine
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF
from specc.system.machine import describe_machine

RESAMPLES = 2000


@dataclass(frozen=True)
class Case:
    """One way to generate; the rule of greedy cases is None."""

    plan: str
    temperature: float
    rule: str | None
    policy: str | None = None

    @property
    def name(self) -> str:
        return f"policy {self.policy}" if self.policy else self.plan


def cases_of(
    engine: Engine, temperatures: list[float], rules: list[str], policies: list[str]
) -> list[Case]:
    """Off and policies once a temperature, other plans by every rule that is lossless for them."""
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
        rule = "coupled" if temperature else None
        found += [Case(engine.default_plan, temperature, rule, policy) for policy in policies]
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
            engine, case.name, case.plan, batches, tokens, params=params, policy=case.policy
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
        drafting = [measured.stage_ms.get("draft", 0.0) for measured in runs[case]]
        rows.append(
            {
                "plan": case.name,
                "temperature": case.temperature,
                "rule": case.rule,
                "batch_size": batch_size,
                "tokens_per_step": last.mean_acceptance_length or 1.0,
                "accepted_per_depth": last.accepted_per_depth,
                "tokens_per_s": statistics.median(m.decode_tokens_per_s for m in runs[case]),
                # of the draft stage of a step; the least is what other jobs disturbed least
                "draft_ms": statistics.median(drafting),
                "draft_ms_least": min(drafting),
                "times_off": statistics.median(ratios),
                "times_off_spread": [min(ratios), max(ratios)],
                "times_off_rounds": ratios,
                "equals_off": last.outputs == off[-1].outputs,
            }
        )
    return rows


def regret(rows: list[dict[str, Any]], profile: dict[str, Any], batch_size: int) -> dict[str, Any]:
    """How far the tuned plan is behind the best one, greedy; below 0 where it is the best."""
    greedy = {
        row["plan"]: row["times_off_rounds"]
        for row in rows
        if row["batch_size"] == batch_size and row["temperature"] == 0
    }
    sizes = sorted(int(size) for size in profile["plans"])
    tuned = profile["plans"][str(max(size for size in sizes if size <= batch_size))]
    others = {name: rates for name, rates in greedy.items() if name != tuned}
    best = max(others, key=lambda name: statistics.median(others[name]))
    losses = [1 - own / other for own, other in zip(greedy[tuned], others[best], strict=True)]
    chooser = random.Random(0)
    medians = sorted(
        statistics.median(chooser.choices(losses, k=len(losses))) for _ in range(RESAMPLES)
    )
    tail = RESAMPLES // 40
    return {
        "batch_size": batch_size,
        "tuned": tuned,
        "best": best,
        "regret": statistics.median(losses),
        "interval": [medians[tail], medians[-1 - tail]],
    }


def main(
    engine: Path,
    prompts: Annotated[Path, typer.Option()],
    num_prompts: Annotated[int, typer.Option()] = 16,
    tokens: Annotated[int, typer.Option()] = 64,
    batch_size: Annotated[list[int], typer.Option()] = [1, 8],  # noqa: B006  typer's way
    temperature: Annotated[list[float], typer.Option()] = [0.0, 1.0],  # noqa: B006
    rule: Annotated[list[str], typer.Option()] = ["coupled", "delta", "mss", "swor"],  # noqa: B006
    plan: Annotated[list[str], typer.Option()] = [],  # noqa: B006
    policy: Annotated[list[str], typer.Option()] = [],  # noqa: B006
    tuned: Annotated[Path | None, typer.Option()] = None,
    rounds: Annotated[int, typer.Option()] = 3,
    output: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure, print a table, and write the report."""
    loaded = Engine.load(engine)
    texts = plain_prompts(prompts)[:num_prompts]
    token_ids = tokenize(loaded, texts, tokens)
    cases = cases_of(loaded, temperature, rule, policy)
    if plan:
        cases = [case for case in cases if case.policy or case.plan in (OFF.name, *plan)]
    rows: list[dict[str, Any]] = []
    for size in batch_size:
        rows += measure(loaded, token_ids, cases, size, tokens, rounds)
    for row in rows:
        name = f"{row['plan']:28} T {row['temperature']:<4} {row['rule'] or '':8}"
        figures = f"{row['tokens_per_step']:5.2f} a step {row['times_off']:5.2f} x off"
        drafting = f"draft {row['draft_ms']:6.2f} ms"
        print(
            f"batch {row['batch_size']}  {name} {figures}  {row['tokens_per_s']:8.1f} tokens/s"
            f"  {drafting}"
        )
    profile = read_json(tuned / PROFILE_FILE) if tuned else {}
    regrets = [regret(rows, profile, size) for size in batch_size] if profile else []
    for found in regrets:
        low, high = found["interval"]
        print(
            f"batch {found['batch_size']}: the tuned {found['tuned']} is {found['regret']:.1%}"
            f" behind {found['best']} (95 %: {low:.1%} to {high:.1%})"
        )
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
            "regrets": regrets,
        }
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
