"""Goodput on batches of short and long requests, beside the best choice for each kind.

    python examples/simulate_mixed.py --json out/goodput_mixed.json

Half of the requests have 1,024 tokens of context, half 32,768, and all decode together. The real
scheduler and the real policy goodput serve them in simulated time (specc/simulate/simulator.py),
beside every pair of a plan for the short and a plan for the long ones. Seconds are those of a
table: of a CPU, measured, and of a model of an H200. What counts is the tokens a second of
iterations that read no prompt, since prompts take equally long whatever is chosen. Goodput starts
cold: it knows seconds, and learns acceptance.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specc.cost.latency_table import LatencyTable
from specc.cost.roofline import roofline
from specc.runtime.policies.base import Policy
from specc.runtime.policies.goodput.policy import GoodputPolicy
from specc.runtime.scheduling.request import Request
from specc.simulate.load import Drafting, Load, SimulatedRequest
from specc.simulate.simulator import Iteration, Limits, simulate
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF, SpecPlan

TABLE = Path(__file__).resolve().parent.parent / "tests" / "measure" / "latency_100m.json"
SHORT, LONG = 1024, 32768
VIEW = "self_w512_s4"
# of the pair's draft in docs/results/goodput.json#goodput_simulated; of a window of the demo target
DRAFTING = Drafting({"draft_0": [[0.73], [0.75], [0.8]], VIEW: [[0.9]]})


def family() -> dict[str, SpecPlan]:
    """Off, chains of a small model, and chains of a self-draft."""
    chains = [SpecPlan.from_widths((1,) * length) for length in (1, 2, 4)]
    views = [SpecPlan.from_widths((1,) * length, (VIEW,)) for length in (1, 2, 4)]
    return {plan.name: plan for plan in (OFF, *chains, *views)}


class ByLength(Policy):
    """One plan for short requests, one for long ones."""

    needs_results = False

    def __init__(self, short: str, long: str) -> None:
        self._short, self._long = short, long

    def choose(self, num_running: int, stats: SpecStats) -> str:
        # whose draft reads prompts
        return self._short if self._short.startswith("chain") else self._long

    def choose_each(self, requests: list[Request], stats: SpecStats) -> list[str]:
        return [
            self._long if request.num_prompt_tokens == LONG else self._short for request in requests
        ]


def make_load(count: int, output: int, seed: int) -> Load:
    """Requests that come together."""
    lengths = [LONG] * (count // 2) + [SHORT] * (count - count // 2)
    return Load([SimulatedRequest(0.0, n, output, DRAFTING) for n in lengths], seed)


def serve(load: Load, truth: LatencyTable, policy: Policy) -> dict[str, Any]:
    """Tokens a second of a load, and the shares of plans, while nobody reads a prompt."""
    count = len(load.requests)
    # all prompts in one pass, so that all requests decode together from then on
    limits = Limits(max_num_seqs=count, max_seq_len=LONG + 4096, prefill_chunk=count * LONG)
    found: list[Iteration] = []
    plans = family()
    report = simulate(load, truth, plans, policy, limits, trace=found.append)
    # while all of them decode
    steady = [
        one for one in found if not one.num_prefill_tokens and sum(one.plans.values()) == count
    ]
    seconds = sum(one.seconds for one in steady)
    rows: dict[str, float] = {}
    for one in steady:
        for name, number in one.plans.items():
            rows[name] = rows.get(name, 0.0) + number / (count * len(steady))
    return {
        "tokens_per_s": round(sum(one.num_tokens for one in steady) / seconds, 4),
        "num_iterations": len(steady),
        "plan_shares": {name: round(share, 4) for name, share in sorted(rows.items())},
        "mean_latency_s": report.to_json()["mean_latency_s"],
    }


def compare(truth: LatencyTable, count: int, output: int, seed: int) -> dict[str, Any]:
    """Goodput beside every pair of plans."""
    load, plans = make_load(count, output, seed), family()
    pairs = {
        f"{short} and {long}": serve(load, truth, ByLength(short, long))
        for short, long in itertools.product(plans, plans)
    }
    goodput = serve(load, truth, GoodputPolicy(plans, truth, max_num_seqs=count, clock=lambda: 0.0))
    best = max(pairs, key=lambda name: pairs[name]["tokens_per_s"])
    alike = max(plans, key=lambda name: pairs[f"{name} and {name}"]["tokens_per_s"])
    own = goodput["tokens_per_s"]
    return {
        "num_requests": count,
        "seed": seed,
        "best_for_each": best,
        "best_for_all": alike,
        "goodput_over_best_for_each": round(own / pairs[best]["tokens_per_s"], 4),
        "goodput_over_best_for_all": round(own / pairs[f"{alike} and {alike}"]["tokens_per_s"], 4),
        "goodput_over_off": round(own / pairs["off and off"]["tokens_per_s"], 4),
        "goodput": goodput,
        "pairs": {name: pair["tokens_per_s"] for name, pair in pairs.items()},
    }


def run(tables: Mapping[str, LatencyTable], options: argparse.Namespace) -> dict[str, Any]:
    """All tables, batches and seeds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, table in tables.items():
        sizes: Sequence[int] = options.requests
        found[name] = [
            compare(table, count, options.tokens, seed) for count in sizes for seed in options.seeds
        ]
        for row in found[name]:
            print(
                f"{name:10} {row['num_requests']:3} requests, seed {row['seed']}:"
                f" {row['goodput_over_best_for_each']:.4f} of {row['best_for_each']};"
                f" {row['goodput_over_best_for_all']:.4f} of {row['best_for_all']} for all;"
                f" {row['goodput_over_off']:.3f} of off; {row['goodput']['plan_shares']}",
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--requests", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 11, 12])
    parser.add_argument("--tokens", type=int, default=1024, help="output of each request")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measured = LatencyTable.from_json(json.loads(options.table.read_text(encoding="utf-8")))
    tables = {"cpu_100m": measured, "h200_8b": roofline()}
    found = run(tables, options)
    data = {
        "command": "python examples/simulate_mixed.py " + " ".join(sys.argv[1:]),
        "contexts": [SHORT, LONG],
        "plans": list(family()),
        "least_goodput_over_best_for_each": min(
            row["goodput_over_best_for_each"] for rows in found.values() for row in rows
        ),
        **found,
    }
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
