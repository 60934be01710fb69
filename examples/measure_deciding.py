"""Microseconds that the policy goodput takes for a decision, by requests of the batch.

    python examples/measure_deciding.py --json out/deciding.json

Requests of different lengths run chains, a tree and a self-draft by turns, as far as the policy
chooses so; acceptance is by dice, and passes take what a latency table says: no model runs. Every
decision is timed as the policy makes it, with what it has learned by then; medians. Beside it is
what an iteration of the table takes, as the policy decides the more seldom the longer it takes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from specc.cost.latency_table import LatencyTable, StepShape
from specc.runtime.backends.step_io import StepResult
from specc.runtime.policies.goodput.policy import GoodputPolicy
from specc.runtime.scheduling.batch import Batch, RunResult, StepGroup
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF, SpecPlan
from specc.system.machine import describe_machine

TABLE = Path(__file__).resolve().parent.parent / "tests" / "measure" / "latency_100m.json"
WINDOW = "self_w512_s4"
PLANS = [
    OFF,
    *(SpecPlan.from_widths((1,) * length) for length in (1, 2, 4, 8)),
    SpecPlan.from_widths((3, 1)),
    SpecPlan.from_widths((1, 1, 1), (WINDOW,)),
]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--table", type=Path, default=TABLE, help="a latency table")
    parser.add_argument("--decisions", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def make_requests(count: int, dice: random.Random) -> list[Request]:
    """Requests that decode, of 100 to 30,000 rows."""
    made = []
    for number in range(count):
        params = SamplingParams(temperature=0, max_tokens=1_000_000)
        request = Request(str(number), [0] * 8, params, max_seq_len=2_000_000, num_drafts=1)
        request.cache_len = int(100 * 300 ** dice.random())
        request.draft_lens = [request.cache_len]
        made.append(request)
    return made


def decisions(table: LatencyTable, batch: int, count: int) -> tuple[list[float], list[float]]:
    """Seconds of each decision, and those that its iteration takes by the table."""
    dice = random.Random(batch)
    plans = {plan.name: plan for plan in PLANS}
    policy = GoodputPolicy(plans, table, clock=lambda: 0.0)
    requests, rates = make_requests(batch, dice), [0.4 + 0.5 * dice.random() for _ in range(batch)]
    stats, times, steps_s = SpecStats(), [], []
    while len(times) < count:
        is_due = policy.needs_results
        policy.choose(batch, stats)
        begin = time.perf_counter()
        names = policy.choose_each(requests, stats)
        seconds = time.perf_counter() - begin
        groups, steps, shapes = [], [], []
        for name in dict.fromkeys(names):
            plan, own = plans[name], [i for i, one in enumerate(names) if one == name]
            context = sum(requests[i].cache_len for i in own)
            accepted = []
            for i in own:
                depth = 0
                while depth < plan.max_depth and dice.random() < rates[i]:
                    depth += 1
                accepted.append(depth)
                requests[i].cache_len += depth + 1
                requests[i].draft_lens = [requests[i].cache_len]
            shape = StepShape(plan, len(own), context)
            stage_s = {"draft": table.draft_s(shape), "verify": table.target_s([shape])}
            after = [requests[i].cache_len for i in own]
            groups.append(StepGroup(plan, [requests[i] for i in own]))
            steps.append(StepResult(accepted, [], after, {}, stage_s))
            shapes.append(shape)
        for group, step in zip(groups, steps, strict=True):
            policy.observe(group, step)
        policy.observe_batch(
            Batch([], groups), RunResult(steps=steps, pass_s=table.target_s(shapes))
        )
        if is_due:
            times.append(seconds)
            steps_s.append(table.iteration(shapes))
    return times, steps_s


def main() -> None:
    options = parse()
    data = json.loads(options.table.read_text(encoding="utf-8"))
    table = LatencyTable.from_json(data.get("latency", data))
    rows: list[dict[str, Any]] = []
    for batch in options.batch:
        times, steps_s = decisions(table, batch, options.decisions)
        rows.append(
            {
                "batch": batch,
                "decision_us": round(1e6 * statistics.median(times), 1),
                "spread_us": [round(1e6 * f(times), 1) for f in (min, max)],
                "iteration_us": round(1e6 * statistics.median(steps_s), 1),
            }
        )
        print(rows[-1], flush=True)
    report = {
        "command": "python examples/measure_deciding.py " + " ".join(sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": describe_machine(),
        "python": sys.version.split()[0],
        "plans": [plan.name for plan in PLANS],
        "decisions": options.decisions,
        "cells": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
