"""Adaptive verification on batches whose requests have good and bad drafts, in simulated time.

    python tests/measure/simulate_adaptive.py --json out/adaptive_verification.json

Some requests of a batch accept most of what is drafted for them, others little; all decode
together. The real scheduler and the real policy goodput serve them in simulated time
(specc/simulate/simulator.py), with and without adaptive verification, beside every plan for all
requests, and beside every pair of plans for the good and the bad ones, which is told apart for it.
What counts is the tokens a second of iterations that read no prompt. Goodput starts cold: it knows
seconds, and learns acceptance. Engines have one chain, or several to choose from. With --captured
every plan has a pass of its own, whose rows are those of a graph, as on backend cuda.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specc.cost.latency_table import LatencyTable
from specc.cost.roofline import roofline
from specc.runtime.policies.base import FixedPolicy, Policy
from specc.runtime.policies.goodput.policy import GoodputPolicy
from specc.runtime.scheduling.request import Request
from specc.simulate.load import Drafting, Load, SimulatedRequest
from specc.simulate.simulator import Iteration, Limits, simulate
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF, SpecPlan

TABLE = Path(__file__).with_name("latency_100m.json")
PROMPT = 256
# name → acceptance by depth of the first half of the requests, and of the second
LOADS: Mapping[str, tuple[list[list[float]], list[list[float]]]] = {
    "0.9 and 0.3": ([[0.9]], [[0.3]]),
    "0.85 and 0.6": ([[0.85]], [[0.6]]),
    "0.95 and 0.05": ([[0.95]], [[0.05]]),
    # the demo pair's, and half of it
    "pair and half": ([[0.73], [0.75], [0.8]], [[0.37], [0.38], [0.4]]),
    "all alike": ([[0.73], [0.75], [0.8]], [[0.73], [0.75], [0.8]]),
}
FAMILIES: Mapping[str, tuple[int, ...]] = {
    "chain-6": (6,), "chains": (1, 2, 4, 6),
}  # fmt: skip


def family(lengths: tuple[int, ...]) -> dict[str, SpecPlan]:
    """Off, and chains of a small model."""
    chains = [SpecPlan.from_widths((1,) * length) for length in lengths]
    return {plan.name: plan for plan in (OFF, *chains)}


class ByKind(Policy):
    """One plan for the first half of the requests, one for the others."""

    needs_results = False

    def __init__(self, count: int, first: str, second: str) -> None:
        self._count, self._plans = count, (first, second)

    def choose(self, num_running: int, stats: SpecStats) -> str:
        # whose drafts read prompts
        return next(name for name in self._plans if name != OFF.name)

    def choose_each(self, requests: list[Request], stats: SpecStats) -> list[str]:
        return [self._plans[int(request.index >= self._count // 2)] for request in requests]


def make_load(name: str, count: int, output: int, seed: int) -> Load:
    """Requests that come together."""
    kinds = [Drafting({"draft_0": rows}) for rows in LOADS[name]]
    made = [
        SimulatedRequest(0.0, PROMPT, output, kinds[int(i >= count // 2)]) for i in range(count)
    ]
    return Load(made, seed)


def serve(
    load: Load,
    truth: LatencyTable,
    plans: Mapping[str, SpecPlan],
    policy: Policy,
    shares_pass: bool,
) -> dict[str, Any]:
    """Tokens a second of a load while all of it decodes, and what was verified for them."""
    count = len(load.requests)
    # all prompts in one pass, so that all requests decode together from then on
    limits = Limits(max_num_seqs=count, prefill_chunk=count * PROMPT, shares_pass=shares_pass)
    found: list[Iteration] = []
    report = simulate(load, truth, plans, policy, limits, trace=found.append)
    steady = [
        one for one in found if not one.num_prefill_tokens and sum(one.plans.values()) == count
    ]
    seconds = sum(one.seconds for one in steady)
    stats = report.stats
    return {
        "tokens_per_s": round(sum(one.num_tokens for one in steady) / seconds, 4),
        "nodes_per_request": round(1 + stats.num_draft_tokens / stats.num_steps, 3),
        "mean_latency_s": report.to_json()["mean_latency_s"],
        "plan_shares": report.to_json()["plan_shares"],
    }


def compare(
    truth: LatencyTable, lengths: tuple[int, ...], load: Load, shares_pass: bool = True
) -> dict[str, Any]:
    """Goodput with and without adaptive verification, beside plans and pairs of them."""
    plans, count = family(lengths), len(load.requests)
    uniform = {name: serve(load, truth, plans, FixedPolicy(name), shares_pass) for name in plans}
    pairs = {
        f"{first} and {second}": serve(
            load, truth, plans, ByKind(count, first, second), shares_pass
        )
        for first, second in itertools.permutations(plans, 2)
    }
    own = {
        name: serve(
            load,
            truth,
            plans,
            GoodputPolicy(
                plans,
                truth,
                max_num_seqs=count,
                clock=lambda: 0.0,
                shares_pass=shares_pass,
                adapts_verification=name == "adaptive",
            ),
            shares_pass,
        )
        for name in ("goodput", "adaptive")
    }
    best = max(uniform, key=lambda name: uniform[name]["tokens_per_s"])
    best_pair = max(pairs, key=lambda name: pairs[name]["tokens_per_s"])
    adaptive = own["adaptive"]["tokens_per_s"]
    return {
        "best_for_all": best,
        "best_for_each": best_pair,
        "over_best_for_all": round(adaptive / uniform[best]["tokens_per_s"], 4),
        "over_best_for_each": round(adaptive / pairs[best_pair]["tokens_per_s"], 4),
        "over_goodput": round(adaptive / own["goodput"]["tokens_per_s"], 4),
        **own,
        "plans": {name: one["tokens_per_s"] for name, one in uniform.items()},
        "pairs": {name: one["tokens_per_s"] for name, one in pairs.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--requests", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--seeds", type=int, nargs="+", default=[7])
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--tokens", type=int, default=512, help="output of each request")
    parser.add_argument(
        "--captured", action="store_true", help="steps as graphs of a GPU; its table alone"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measured = LatencyTable.from_json(json.loads(options.table.read_text(encoding="utf-8")))
    machines = {"cpu_100m": measured, "h200_8b": roofline()}
    if options.captured:
        del machines["cpu_100m"]
    rows = []
    for (machine, truth), (engine, lengths), name, count, seed in itertools.product(
        machines.items(),
        FAMILIES.items(),
        options.loads,
        options.requests,
        options.seeds,
    ):
        load = make_load(name, count, options.tokens, seed)
        row = compare(truth, lengths, load, not options.captured)
        where = {"table": machine, "engine": engine, "load": name, "requests": count, "seed": seed}
        rows.append(where | row)
        print(
            f"{machine:8} {engine:7} {name:14} {count:3}:"
            f" {row['over_best_for_all']:.3f} of {row['best_for_all']},"
            f" {row['over_best_for_each']:.3f} of {row['best_for_each']},"
            f" {row['over_goodput']:.3f} of goodput;"
            f" {row['adaptive']['nodes_per_request']:.2f} nodes",
            flush=True,
        )
    data = {
        "command": "python tests/measure/simulate_adaptive.py " + " ".join(sys.argv[1:]),
        "least": {
            key: min(row[key] for row in rows)
            for key in ("over_best_for_all", "over_best_for_each", "over_goodput")
        },
        "mean": {
            key: round(math.exp(sum(math.log(row[key]) for row in rows) / len(rows)), 4)
            for key in ("over_best_for_all", "over_best_for_each", "over_goodput")
        },
        "rows": rows,
    }
    print(data["least"], data["mean"])
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
