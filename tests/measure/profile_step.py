"""Where the time of a step goes: compiled programs, the glue between their calls, and Python.

    python tests/measure/profile_step.py out/engine-100m --threads 2 --json out/profile.json

A step of a compiled engine is one call out of Python. What is measured, step by step, on real
prompts after a warm-up: the wall time from one step to the next; the time inside the step program;
and the time inside the models' programs. The differences are dispatch and Python.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

PROMPTS = Path(__file__).resolve().parents[2] / "examples" / "pair" / "prompts.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", type=Path, help="an engine of the backend cpu")
    parser.add_argument("--plan", action="append", help="instead of all plans; repeatable")
    parser.add_argument("--prompts", type=int, default=6, help="prompts of the demo pair")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    args = parser.parse_args()

    import torch

    from specc import Engine
    from specc.system.machine import describe_machine

    engine = Engine.load(args.engine, num_threads=args.threads)
    if engine.backend != "cpu":
        print(f"{args.engine} is an engine for backend {engine.backend}; compile with cpu")
        return 2
    with open(PROMPTS, encoding="utf-8") as file:
        prompts = [json.loads(line)["prompt"] for line in file][: args.prompts]
    plans = {
        name: profile(engine, name, prompts, args.tokens) for name in args.plan or engine.steps
    }
    print_table(plans)
    if args.json:
        report = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", *sys.argv]),
            "machine": describe_machine(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "threads": torch.get_num_threads(),
            "dtype": engine.manifest.dtype if engine.manifest else None,
            "plans": plans,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def profile(engine: Any, plan: str, prompts: list[str], num_tokens: int) -> dict[str, float]:
    """Medians over the steps of all prompts, in microseconds, and their shares."""
    from specc import LLM, SamplingParams

    llm = LLM(engine, plan=plan)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    llm.generate(prompts[0], params)
    step = engine.steps[plan]
    rows: list[tuple[float, float, float, float]] = []
    last = 0.0
    advance = step.advance

    def timed(*inputs: Any) -> Any:
        nonlocal last
        begin = time.perf_counter()
        result = advance(*inputs)
        end = time.perf_counter()
        native = step.runner
        if last:
            inside = sum(native.seconds())
            rows.append((end - last, end - begin, inside, sum(native.program_seconds())))
        last = end
        return result

    step.advance = timed
    try:
        for prompt in prompts:
            last = 0.0  # the first step of a prompt follows a prefill pass
            llm.generate(prompt, params)
    finally:
        del step.advance
    whole, call, inside, programs = (
        1e6 * statistics.median(column) for column in zip(*rows, strict=True)
    )
    return {
        "steps": len(rows),
        "step_us": round(whole, 1),
        "programs_us": round(programs, 1),
        "glue_us": round(inside - programs, 1),
        "call_us": round(call - inside, 1),
        "python_us": round(whole - call, 1),
        "share_outside_programs": round((whole - programs) / whole, 4),
        "share_python_and_dispatch": round((whole - inside) / whole, 4),
    }


def print_table(plans: dict[str, dict[str, float]]) -> None:
    names = ("step_us", "programs_us", "glue_us", "call_us", "python_us")
    print(f"{'median of steps, us':<22}" + "".join(f"{n[:-3]:>10}" for n in names) + "   outside")
    for plan, row in plans.items():
        cells = "".join(f"{row[name]:>10.0f}" for name in names)
        print(f"{plan:<22}{cells}{row['share_outside_programs']:>10.1%}")


if __name__ == "__main__":
    sys.exit(main())
