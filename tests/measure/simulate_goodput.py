"""Goodput against fixed plans over request rate, simulated on two latency tables.

    python tests/measure/simulate_goodput.py --part rates --json FILE --plot docs/results
    python tests/measure/simulate_goodput.py --part adversarial --json FILE
    python tests/measure/simulate_goodput.py --seed 11,12,13,14 --json FILE
    python tests/measure/simulate_goodput.py --part policies --json FILE

The real scheduler and the real policies serve simulated loads (specc/simulate/simulator.py): on
the table of a CPU, measured with the target widened to 100M parameters, and on a model of an H200
with an 8B target and a 1B draft. Then come loads that are to make the policy worse than plain
decoding; and some of those loads again, with chains alone, for goodput beside the policy adaptive.
No policy gets a profile of the acceptance: they learn that while they serve. Of several seeds, only
ratios and loads that miss a bar are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specc.cost.latency_table import LatencyTable
from specc.cost.roofline import roofline
from specc.draw.charts import draw_load
from specc.runtime.policies.named import ADAPTIVE, GOODPUT
from specc.simulate.comparison import Comparison, compare
from specc.simulate.load import Drafting, Lengths, Load, make_load
from specc.simulate.simulator import Limits
from specc.speculation.plans import OFF, SpecPlan

TABLE = Path(__file__).with_name("latency_100m.json")
# what the bars allow: mean latency over that of the best fixed choice, and over that of off
OVER_BEST, OVER_OFF = 1.02, 1.03
# what the demo pair shows: depth 1 to 4 of examples/pair/README.md, the first three choices
PAIR = Drafting({"draft_0": [[0.73, 0.1, 0.04], [0.75, 0.1, 0.04], [0.8, 0.08, 0.03]]})
USELESS = Drafting({"draft_0": [[0.03, 0.01]]})
FALLING = Drafting({"draft_0": [[0.85, 0.05]]}, {"draft_0": [[0.05, 0.02]]}, over="load")
RISING = Drafting({"draft_0": [[0.05, 0.02]]}, {"draft_0": [[0.85, 0.05]]}, over="load")
WITHIN = Drafting({"draft_0": [[0.9, 0.04]]}, {"draft_0": [[0.1, 0.05]]}, over="output")
# mean prompt and output tokens, for the pictures
LENGTHS = {"cpu_100m": ("100", "64"), "h200_8b": ("512", "160")}
GPU_RATES = (2, 8, 16, 24, 32, 40, 48, 56, 64, 80)
CPU_RATES = (0.25, 1, 2, 3, 4, 5, 6, 8)
GPU = Limits(max_num_seqs=256, max_seq_len=4096, prefill_chunk=2048)
CPU = Limits(max_num_seqs=32, max_seq_len=1024, prefill_chunk=512)


def family() -> dict[str, SpecPlan]:
    """Off, chains, and a tree."""
    chains = [SpecPlan.from_widths((1,) * length) for length in (1, 2, 4, 6)]
    plans = [OFF, *chains, SpecPlan.from_widths((3, 1, 1, 1))]
    return {plan.name: plan for plan in plans}


def gpu_load(seed: int, rate: float, *kinds: tuple[float, Drafting], **options: Any) -> Load:
    """Requests of about 512 prompt and 160 output tokens, for about 15 seconds."""
    count = min(max(round(15 * rate), 150), 800)
    prompts = options.pop("prompts", Lengths(512, 0.6, 16, 2048))
    outputs = Lengths(160, 0.6, 8, 1024)
    return make_load(rate, count, kinds or [(1, PAIR)], prompts, outputs, seed=seed, **options)


def cpu_load(seed: int, rate: float) -> Load:
    """Requests of about 100 prompt and 64 output tokens, for about 60 seconds."""
    count = min(max(round(60 * rate), 60), 400)
    prompts, outputs = Lengths(100, 0.5, 8, 400), Lengths(64, 0.5, 8, 256)
    return make_load(rate, count, [(1, PAIR)], prompts, outputs, seed=seed)


def rate_sweeps(measured: LatencyTable, seed: int) -> dict[str, list[Comparison]]:
    """Mean latency over rate on both machines."""
    return {
        "cpu_100m": compare(
            {f"{rate:g}/s": cpu_load(seed, rate) for rate in CPU_RATES},
            measured,
            family(),
            CPU,
            progress=show,
        ),
        "h200_8b": compare(
            {f"{rate:g}/s": gpu_load(seed, rate) for rate in GPU_RATES},
            roofline(),
            family(),
            GPU,
            progress=show,
        ),
    }


def adversarial(seed: int) -> dict[str, list[Comparison]]:
    """Loads and tables that mislead, on the model of the GPU."""
    half = ((1, PAIR), (1, USELESS))
    loads: dict[str, Load] = {}
    for rate in (2, 24, 56):
        loads |= {
            f"useless draft, {rate}/s": gpu_load(seed, rate, (1, USELESS)),
            f"falling over the load, {rate}/s": gpu_load(seed, rate, (1, FALLING)),
            f"rising over the load, {rate}/s": gpu_load(seed, rate, (1, RISING)),
            f"falling within each output, {rate}/s": gpu_load(seed, rate, (1, WITHIN)),
            f"bursts of 32, {rate}/s": gpu_load(seed, rate, burst=32),
            f"half of the requests useless, {rate}/s": gpu_load(seed, rate, *half),
            f"nine in ten useless, {rate}/s": gpu_load(seed, rate, (1, PAIR), (9, USELESS)),
            f"a third decodes plainly, {rate}/s": gpu_load(seed, rate, plain_share=1 / 3),
        }
    truth, plans = roofline(), family()
    fixed = ("off", "chain-2")
    found = {"loads": compare(loads, truth, plans, GPU, fixed=fixed, progress=show)}
    long = {
        f"prompts of 16k, {rate}/s": gpu_load(seed, rate, prompts=Lengths(16384, 0.2, 4096, 30000))
        for rate in (0.5, 1, 2)
    }
    wide = Limits(max_num_seqs=64, max_seq_len=32768, prefill_chunk=2048)
    found["long contexts"] = compare(long, truth, plans, wide, fixed=fixed, progress=show)
    some = {
        f"{name}, {rate}/s": gpu_load(seed, rate, (1, kind))
        for name, kind in (("good draft", PAIR), ("useless draft", USELESS))
        for rate in (2, 32, 64)
    }
    for name, wrong in {
        "believes the target twice as slow": truth.scaled(target=2),
        "believes the target twice as fast": truth.scaled(target=0.5),
        "believes drafts twice as slow": truth.scaled(drafts=2),
        "believes drafts twice as fast": truth.scaled(drafts=0.5),
        "knows no seconds": LatencyTable.neutral(["draft_0"]),
    }.items():
        found[name] = compare(some, truth, plans, GPU, table=wrong, fixed=fixed, progress=show)
    found["seconds vary by a tenth"] = compare(
        some, truth, plans, GPU, fixed=fixed, noise=0.1, progress=show
    )
    split = Limits(max_num_seqs=256, max_seq_len=4096, prefill_chunk=2048, shares_pass=False)
    found["every group has its own pass"] = compare(
        some, truth, plans, split, fixed=fixed, progress=show
    )
    return found


def beside_adaptive(measured: LatencyTable, seed: int) -> dict[str, list[Comparison]]:
    """Goodput and adaptive on the same chains, which are all that adaptive chooses among."""
    chains = {name: plan for name, plan in family().items() if not name.startswith("tree")}
    options: dict[str, Any] = {"fixed": ("off",), "policies": (GOODPUT, ADAPTIVE), "progress": show}
    cpu = {f"{rate:g}/s": cpu_load(seed, rate) for rate in CPU_RATES}
    gpu = {f"{rate}/s": gpu_load(seed, rate) for rate in (2, 8, 24, 48)}
    gpu |= {f"useless draft, {rate}/s": gpu_load(seed, rate, (1, USELESS)) for rate in (2, 24)}
    split = dataclasses.replace(GPU, shares_pass=False)
    apart = {f"{rate}/s": gpu_load(seed, rate) for rate in (2, 24)}
    return {
        "cpu_100m": compare(cpu, measured, chains, CPU, **options),
        "h200_8b": compare(gpu, roofline(), chains, GPU, **options),
        "h200_8b, passes apart": compare(apart, roofline(), chains, split, **options),
    }


def show(row: Comparison) -> None:
    data = row.to_json()
    shares = data["reports"]["goodput"]["plan_shares"]
    adaptive = ""
    if ADAPTIVE in row.reports:
        adaptive = f"  adaptive / goodput {row.latency(ADAPTIVE) / row.latency(GOODPUT):.3f}"
    print(
        f"{row.name:38} {row.latency('goodput'):8.3f} s{adaptive}"
        f"  / best {data['goodput_over_best']:.3f} ({row.best})"
        f"  / off {data['goodput_over_off']:.3f}"
        f"  worst {data['worst_over_goodput']:.2f} ({row.worst}) ",
        ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.01),
        flush=True,
    )


def summary(found: dict[str, list[Comparison]]) -> dict[str, Any]:
    """The largest ratios, and the loads that miss a bar."""
    rows = {f"{group}: {row.name}": row.to_json() for group, rows in found.items() for row in rows}
    data: dict[str, Any] = {"num_loads": len(rows)}
    for ratio, most in (("goodput_over_best", OVER_BEST), ("goodput_over_off", OVER_OFF)):
        data[f"most_{ratio}"] = max(row[ratio] for row in rows.values())
        data[f"{ratio}_above_{most}"] = {
            name: row[ratio] for name, row in rows.items() if row[ratio] > most
        }
    beside = {
        f"{group}: {row.name}": round(row.latency(ADAPTIVE) / row.latency(GOODPUT), 4)
        for group, rows_of in found.items()
        for row in rows_of
        if ADAPTIVE in row.reports
    }
    return data | ({"adaptive_over_goodput": beside} if beside else {})


def plot(rows: list[Comparison], lengths: tuple[str, str], path: Path) -> None:
    """Mean latency over requests a second, as `specc bench serve --plot` draws it."""
    cells = []
    for row in rows:
        for who in row.reports:
            mean_ms = 1000 * row.latency(who)
            spread = dict.fromkeys(("median", "min", "max"), mean_ms)
            rate = float(row.name.removesuffix("/s"))
            cells.append({"request_rate": rate, "policy": who, "mean_e2el_ms": spread})
    counts = [row.reports[row.best]["num_requests"] for row in rows]
    settings = {
        "num_requests": f"{min(counts)} to {max(counts)}",
        "prompt_tokens": lengths[0],
        "output_tokens": lengths[1],
    }
    draw_load({"cells": cells, "is_virtual": True, "settings": settings}, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument(
        "--part", choices=["rates", "adversarial", "policies"], help="only this one"
    )
    parser.add_argument("--seed", default="7", help="one, or several with commas between")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="folder for pictures of the rates of one seed")
    args = parser.parse_args()
    measured = LatencyTable.from_json(json.loads(args.table.read_text(encoding="utf-8")))
    seeds = [int(seed) for seed in args.seed.split(",")]
    data: dict[str, Any] = {
        "command": "python tests/measure/simulate_goodput.py " + " ".join(sys.argv[1:]),
        "plans": list(family()),
        "tables": {"cpu_100m": measured.to_json(), "h200_8b": roofline().to_json()},
    }
    parts: dict[str, Callable[[int], dict[str, list[Comparison]]]] = {
        "rates": lambda seed: rate_sweeps(measured, seed),
        "adversarial": adversarial,
        "policies": lambda seed: beside_adaptive(measured, seed),
    }
    for part, run in parts.items():
        if args.part not in (None, part):
            continue
        data[part] = {}
        for seed in seeds:
            found = run(seed)
            data[part][f"seed {seed}"] = own = {"summary": summary(found)}
            if len(seeds) == 1:
                own |= {name: [row.to_json() for row in group] for name, group in found.items()}
            if args.plot and part == "rates" and len(seeds) == 1:
                for name, rows in found.items():
                    plot(rows, LENGTHS[name], args.plot / f"goodput_{name}.svg")
            print(part, "seed", seed, own["summary"], flush=True)
    if args.json:
        args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
