"""Compare the speed of two checkouts of specc on the demo pair, by turns in pairs of processes.

    python examples/compare_checkouts.py --before ../old/.venv/bin/specc \
        --after .venv/bin/specc --json compared.json

Each checkout compiles an engine of its own. What is compared is tokens/s of each plan: the median
over pairs of after divided by before, and an interval in which it lies with 95 % (bootstrap).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

PAIR = Path(__file__).resolve().parent / "pair"
PLANS = ("chain-4", "tree-3-2-1")
TREES = ("1,1,1,1", "3,2,1")
TOKENS, PROMPTS, ROUNDS = 96, 4, 3
_RESAMPLES = 10_000


def run_specc(program: Path, *words: object) -> None:
    """Run a command of one checkout, with one thread.

    Raises:
        subprocess.CalledProcessError: it failed; what it said is on standard error.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [program, *map(str, words)], check=True, stdout=subprocess.DEVNULL, env=environment
    )


def compile_pair(program: Path, output: Path) -> None:
    trees = [word for tree in TREES for word in ("--tree", tree)]
    models = ("--target", PAIR / "target", "--draft", PAIR / "draft")
    run_specc(program, "compile", *models, *trees, "-o", output)


def measure(program: Path, engine: Path, output: Path) -> dict[str, Any]:
    """Tokens/s of each plan, off included, and the report that says so."""
    plans = [word for plan in PLANS for word in ("--plan", plan)]
    sizes = ("--tokens", TOKENS, "--num-prompts", PROMPTS, "--rounds", ROUNDS, "--threads", 1)
    prompts = ("--prompts", PAIR / "prompts.jsonl")
    run_specc(program, "bench", engine, *plans, *sizes, *prompts, "--json", output)
    return json.loads(output.read_text(encoding="utf-8"))


def speeds(report: dict[str, Any]) -> dict[str, float]:
    return {run["plan"]: run["decode_tokens_per_s"] for run in report["runs"]}


def interval(ratios: list[float]) -> tuple[float, float]:
    """Where the median lies with 95 %, of samples drawn with replacement."""
    dice = random.Random(0)
    medians = sorted(
        statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES)
    )
    return medians[_RESAMPLES // 40], medians[-_RESAMPLES // 40]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="its .venv/bin/specc")
    parser.add_argument("--after", type=Path, required=True, help="its .venv/bin/specc")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    programs = {"before": options.before.absolute(), "after": options.after.absolute()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    with tempfile.TemporaryDirectory() as folder:
        engines = {name: Path(folder) / name for name in programs}
        for name, program in programs.items():
            print(f"compile with the code {name}", flush=True)
            compile_pair(program, engines[name])
        report: dict[str, Any] = {}
        for number in range(options.pairs):
            # whichever is first finds a machine that has rested
            for name in sorted(programs, reverse=bool(number % 2)):
                report = measure(programs[name], engines[name], Path(folder) / "report.json")
                found[name].append(speeds(report))
            print(f"pair {number + 1} of {options.pairs}", flush=True)
    plans = {}
    for plan in found["before"][0]:
        both = [(b[plan], a[plan]) for b, a in zip(found["before"], found["after"], strict=True)]
        ratios = [after / before for before, after in both]
        low, high = interval(ratios)
        plans[plan] = {
            "tokens_per_s_before_after": both,
            "ratio_median": round(statistics.median(ratios), 3),
            "ratio_95": [round(low, 3), round(high, 3)],
        }
        print(f"{plan}: {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})")
    if options.json:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        facts = {"date": now, "machine": report["machine"], "versions": report["versions"]}
        options.json.write_text(json.dumps(facts | {"plans": plans}, indent=1) + "\n")


if __name__ == "__main__":
    main()
