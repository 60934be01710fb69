"""Compare the speed of two checkouts of specc, by turns in pairs of processes.

    python tests/measure/compare_checkouts.py --before ../old/.venv/bin/specc \
        --after .venv/bin/specc --json compared.json
    python tests/measure/compare_checkouts.py … --target T --compile="--quantize int8" --threads 2

Each checkout compiles an engine of its own. What is compared is tokens/s of each plan, and the time
to the first token of a long prompt: the median over pairs of after divided by before (of times,
before divided by after: above 1 is faster), and an interval in which it lies with 95 % (bootstrap).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import shlex
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

PAIR = Path(__file__).resolve().parents[2] / "examples" / "pair"
PLANS = ("chain-4", "tree-3-2-1")
TREES = ("1,1,1,1", "3,2,1")
TOKENS, PROMPTS, ROUNDS = 96, 4, 3
_RESAMPLES = 10_000


def run_specc(program: Path, threads: int, *words: object) -> None:
    """Run a command of one checkout.

    Raises:
        subprocess.CalledProcessError: it failed; what it said is on standard error.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run(
        [program, *map(str, words)], check=True, stdout=subprocess.DEVNULL, env=environment
    )


def compile_pair(program: Path, options: argparse.Namespace, output: Path) -> None:
    trees = [word for tree in TREES for word in ("--tree", tree)]
    models = ("--target", options.target, "--draft", options.draft)
    more = shlex.split(options.compile)
    run_specc(program, os.cpu_count() or 1, "compile", *models, *trees, *more, "-o", output)


def measure(
    program: Path, engine: Path, options: argparse.Namespace, prompt: Path
) -> tuple[dict[str, float], dict[str, Any]]:
    """Tokens/s of each plan, off included, and 1 / s to the first token of a prompt; the report."""
    output = prompt.parent / "report.json"
    threads = ("--threads", options.threads)
    plans = [word for plan in PLANS for word in ("--plan", plan)]
    sizes = ("--tokens", TOKENS, "--num-prompts", PROMPTS, "--rounds", ROUNDS)
    prompts = ("--prompts", PAIR / "prompts.jsonl", "--json", output)
    run_specc(program, options.threads, "bench", engine, *plans, *sizes, *prompts, *threads)
    report = json.loads(output.read_text(encoding="utf-8"))
    speeds = {run["plan"]: run["decode_tokens_per_s"] for run in report["runs"]}
    if options.prefill:
        sizes = ("--tokens", 2, "--rounds", ROUNDS)
        prompts = ("--prompts", prompt, "--json", output)
        run_specc(program, options.threads, "bench", engine, *sizes, *prompts, *threads)
        long = json.loads(output.read_text(encoding="utf-8"))
        (off,) = (run for run in long["runs"] if run["plan"] == "off")
        speeds["prefill"] = 1000 / off["time_to_first_token_ms"]
    return speeds, report


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
    parser.add_argument("--target", type=Path, default=PAIR / "target")
    parser.add_argument("--draft", type=Path, default=PAIR / "draft")
    parser.add_argument("--compile", default="", help="further options of specc compile")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prefill", type=int, default=1000, help="tokens of the long prompt, or 0")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--engines", type=Path, help="directory that keeps the engines")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    programs = {"before": options.before.absolute(), "after": options.after.absolute()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    with tempfile.TemporaryDirectory() as folder:
        place = options.engines or Path(folder)
        engines = {name: place / name for name in programs}
        for name, program in programs.items():
            if not engines[name].exists():
                print(f"compile with the code {name}", flush=True)
                compile_pair(program, options, engines[name])
        prompt = Path(folder) / "prompt.jsonl"
        ids = [100 + i * 7919 % 300 for i in range(options.prefill)]
        prompt.write_text(json.dumps({"prompt_token_ids": ids}) + "\n", encoding="utf-8")
        report: dict[str, Any] = {}
        for number in range(options.pairs):
            # whichever is first finds a machine that has rested
            for name in sorted(programs, reverse=bool(number % 2)):
                speeds, report = measure(programs[name], engines[name], options, prompt)
                found[name].append(speeds)
            print(f"pair {number + 1} of {options.pairs}", flush=True)
    plans = {}
    for plan in found["before"][0]:
        both = [(b[plan], a[plan]) for b, a in zip(found["before"], found["after"], strict=True)]
        ratios = [after / before for before, after in both]
        low, high = interval(ratios)
        plans[plan] = {
            "before_after": both,
            "ratio_median": round(statistics.median(ratios), 3),
            "ratio_95": [round(low, 3), round(high, 3)],
        }
        print(f"{plan}: {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})")
    if options.json:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        facts = {"date": now, "machine": report["machine"], "versions": report["versions"]}
        facts |= {"compile": options.compile, "threads": options.threads}
        options.json.write_text(json.dumps(facts | {"plans": plans}, indent=1) + "\n")


if __name__ == "__main__":
    main()
