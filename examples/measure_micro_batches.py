"""Measure what batches beside each other bring an engine in stages, against one at a time.

    OMP_NUM_THREADS=1 python examples/measure_micro_batches.py ENGINE --json micro_batches.json

The engine is one that is cut into stages (`specc compile -pp 2`). As many requests as it takes are
served together, greedy, of so many tokens each. The two ways take turns, plan by plan and round by
round, so that whatever else the machine does meets both; what counts is the ratio within a round.
Tokens of both are compared.

`stage_cpu_ms` is the time of rank 0's thread in a pass of its own stage, the median of passes of as
many rows as most have: other processes do not count in it. A round of all requests takes one batch
through all stages, or as many batches, each of a part of them, through one stage: `bound` is what
is to be gained where stages are alike and have a core each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.system.machine import describe_machine

PROMPTS = [
    "def read_lines(path):",
    "class Node:\n    def __init__(self",
    "import os\nimport sys\n",
    "def fibonacci(n):",
    "for name in sorted(",
    "with open(path) as file:",
    "try:\n    value = int(",
    "def main():\n    parser =",
]


class Timed:
    """A program, and the CPU time of its calls.

    Args:
        program: of a stage.
    """

    def __init__(self, program: Any) -> None:
        self._program = program
        self.ms_of_rows: dict[int, list[float]] = {}

    def __call__(self, *inputs: Any, **hidden: Any) -> Any:
        begin_s = time.thread_time()
        found = self._program(*inputs, **hidden)
        ms = 1e3 * (time.thread_time() - begin_s)
        self.ms_of_rows.setdefault(len(inputs[0]), []).append(ms)
        return found

    def usual(self) -> dict[str, float]:
        """Rows and milliseconds of the passes of as many rows as most have."""
        rows = max(self.ms_of_rows, key=lambda count: len(self.ms_of_rows[count]))
        return {"rows": rows, "ms": round(statistics.median(self.ms_of_rows[rows]), 2)}


def run(
    engine: Engine, plan: str, micro_batches: int | None, num_tokens: int
) -> tuple[float, list[Any], int]:
    """Tokens a second, the tokens, and batches that were begun beside others."""
    llm = LLM(engine, plan=plan, micro_batches=micro_batches, shares_prefixes=False)
    count = engine.cache.shape.max_num_seqs
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    begin_s = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - begin_s
    tokens = [output.outputs[0].token_ids for output in outputs]
    return sum(map(len, tokens)) / seconds, tokens, llm._in_flight.num_beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = Engine.load(args.engine, num_threads=1)
    manifest = engine.manifest
    assert manifest is not None
    assert manifest.stages, "an engine in stages"
    program = engine.target.program  # type: ignore[attr-defined]
    rows: dict[str, Any] = {}
    for plan in engine.plans:
        speeds: dict[str, list[float]] = {"one": [], "beside": []}
        timed = {way: Timed(program) for way in speeds}
        num_same = num_compared = num_beside = 0
        # the first round is not counted
        for number in range(args.rounds + 1):
            ways = {"one": 1, "beside": None}
            order = list(ways) if number % 2 else list(ways)[::-1]
            found = {}
            for way in order:
                engine.target.program = timed[way]  # type: ignore[attr-defined]
                found[way] = run(engine, plan, ways[way], args.tokens)
            num_beside += found["beside"][2]
            for mine, other in zip(found["one"][1], found["beside"][1], strict=True):
                num_same += mine == other
                num_compared += 1
            if number:
                for way, (speed, *_) in found.items():
                    speeds[way].append(speed)
        usual = {way: one.usual() for way, one in timed.items()}
        ratios = [b / a for a, b in zip(speeds["one"], speeds["beside"], strict=True)]
        rows[plan] = {
            "one_tokens_per_s": round(statistics.median(speeds["one"]), 1),
            "beside_tokens_per_s": round(statistics.median(speeds["beside"]), 1),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "stage_cpu_ms": usual,
            "bound": round(usual["one"]["ms"] / usual["beside"]["ms"], 3),
            "same_outputs": f"{num_same} of {num_compared}",
            "batches_beside": num_beside,
        }
        print(plan, json.dumps(rows[plan]), flush=True)
    report = {
        "command": f"OMP_NUM_THREADS=1 python examples/measure_micro_batches.py ENGINE"
        f" --rounds {args.rounds} --tokens {args.tokens}",
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "versions": {"torch": torch.__version__},
        "stages": len(manifest.stages),
        "target_parameters": manifest.models[0].num_parameters,
        "requests": engine.cache.shape.max_num_seqs,
        "plans": rows,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    engine.close()


if __name__ == "__main__":
    main()
