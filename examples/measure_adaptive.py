"""Adaptive verification on a real engine: tokens a second of a mixed load beside every plan.

    python examples/measure_adaptive.py ENGINE --prompts examples/pair/prompts.jsonl --json FILE

Half of a batch is greedy code, of which a draft gets most right; the other half is sampled at a
temperature at which it gets little right. A batch that is served alone ends with few requests,
those that drafts do not help; with --queue others take the place of those that end. Every round
serves the same batches with every plan, with the policy goodput, and with goodput and adaptive
verification, in an order that rotates; figures are medians, ratios are of the same round. Beside
other jobs, seconds of the processor say more than those of the clock, where one thread does the
work; both are given. Policies go on with what they have learned. All outputs are compared with
those of plan off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from specc.bench.engine import tokenize
from specc.cli.prompts import plain_prompts
from specc.cost.latency_table import LatencyTable
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.policies.base import Policy
from specc.runtime.policies.goodput.policy import GoodputPolicy
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF
from specc.system.machine import describe_machine
from specc.tune.latency import measure_latency

GOODPUT, ADAPTIVE = "goodput", "goodput, adaptive verification"


class Run(NamedTuple):
    """What one round of a choice was."""

    seconds: float
    processor_s: float
    num_tokens: int
    nodes: float
    outputs: list[list[int]]


def serve(llm: LLM, batches: list[list[list[int]]], params: list[SamplingParams]) -> Run:
    """All batches, one after another."""
    before = llm.get_metrics()
    begin, processor = time.perf_counter(), time.process_time()
    outputs = [output for batch in batches for output in llm.generate(batch, params[: len(batch)])]
    seconds, processor_s = time.perf_counter() - begin, time.process_time() - processor
    after = llm.get_metrics()
    steps = after.num_steps - before.num_steps
    nodes = 1 + (after.num_draft_tokens - before.num_draft_tokens) / max(1, steps)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return Run(seconds, processor_s, sum(map(len, tokens)), nodes, tokens)


def make_choices(engine: Engine, table: LatencyTable, batch_size: int) -> dict[str, LLM]:
    """Every plan, and the policy with and without the option."""

    def goodput(adapts: bool) -> Policy:
        return GoodputPolicy(
            engine.plans, table, max_num_seqs=batch_size, adapts_verification=adapts
        )

    given: dict[str, dict[str, Any]] = {name: {"plan": name} for name in engine.plans}
    given |= {GOODPUT: {"policy": goodput(False)}, ADAPTIVE: {"policy": goodput(True)}}
    return {name: LLM(engine, shares_prefixes=False, **own) for name, own in given.items()}


def median_ratio(own: list[float], others: list[float]) -> float:
    """Of the same rounds."""
    return round(statistics.median(a / b for a, b in zip(own, others, strict=True)), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument(
        "--queue",
        action="store_true",
        help="hand over all batches at once: requests that end make room",
    )
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=1.5, help="of the second half")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engine = Engine.load(options.engine, num_threads=options.threads, max_num_seqs=options.batch)
    table = measure_latency(engine, budget_s=8.0)
    count = options.batch * options.batches
    given = plain_prompts(options.prompts)
    if len(given) < count:
        parser.error(f"{options.prompts} has {len(given)} prompts, {count} are needed")
    prompts = tokenize(engine, given[:count], options.tokens)
    batches = [prompts[i : i + options.batch] for i in range(0, count, options.batch)]
    params = [
        SamplingParams(
            max_tokens=options.tokens,
            ignore_eos=True,
            seed=i,
            temperature=0.0 if i % options.batch < options.batch // 2 else options.temperature,
        )
        for i in range(count)
    ]
    if options.queue:
        batches = [prompts]
    choices = make_choices(engine, table, options.batch)
    runs: dict[str, list[Run]] = {name: [] for name in choices}
    names = list(choices)
    for number in range(options.rounds + 1):
        turn = number % len(names)
        for name in [*names[turn:], *names[:turn]]:
            found = serve(choices[name], batches, params)
            # the first one teaches
            if number:
                runs[name].append(found)
        print(f"round {number} of {options.rounds}", file=sys.stderr, flush=True)
    rates = {name: [run.num_tokens / run.seconds for run in own] for name, own in runs.items()}
    busy = {name: [run.num_tokens / run.processor_s for run in own] for name, own in runs.items()}
    rows = {
        name: {
            "tokens_per_s": round(statistics.median(rates[name]), 2),
            "tokens_per_processor_s": round(statistics.median(busy[name]), 2),
            "adaptive_over_it": median_ratio(rates[ADAPTIVE], rates[name]),
            "adaptive_over_it_by_processor": median_ratio(busy[ADAPTIVE], busy[name]),
            "nodes_per_request": round(statistics.median(run.nodes for run in own), 3),
            "equals_off": all(run.outputs == runs[OFF.name][0].outputs for run in own),
        }
        for name, own in runs.items()
    }
    for name, row in rows.items():
        print(f"{name:32} {row}")
    data = {
        "command": "python examples/measure_adaptive.py " + " ".join(sys.argv[1:]),
        "machine": describe_machine(),
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
