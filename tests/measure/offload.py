r"""Measure an engine whose weights do not fit: bytes read, time of a step, and what trees gain.

    python tests/measure/widen_target.py --source examples/pair/target --parameters 375M --output T
    specc compile --target T --draft examples/pair/draft --tree 1,1,1,1 --tree 4,2,2,1 \
      --segments --no-probe --max-batch-size 2 --max-seq-len 512 -o engine/
    python tests/measure/offload.py engine/ --budgets 200M,350M,700M,1000M \
      --output out/offload.json

On a machine with other work, `--turns 3` measures all of it three times, one budget after the
other, and takes medians; a step is compared with the bound of its own turn. `--small-pages` adds
turns whose buffers are no huge pages, for comparison.

Each budget runs in a process of its own: `VmHWM` is its peak of resident memory, `read_bytes` of
/proc/self/io what it has read from disk. Of a step the bound is the longer of two times, both
measured here: to read the offloaded weights with nothing else to do, in turn with the plans, and
the same plan's step with all weights in memory. `--tune` also lets `specc tune` choose plans, in
memory and with the first budget, in copies of the engine.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specc.system.files import format_bytes, parse_bytes

PROMPTS = Path(__file__).resolve().parents[2] / "examples" / "pair" / "prompts.jsonl"
READ_PASSES = 4


def proc(name: str, key: str) -> int:
    """A number of /proc/self."""
    lines = Path(f"/proc/self/{name}").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


def measure(engine_dir: Path, budget: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything of one budget, in this process; `none`: all weights in memory."""
    from specc.runtime.engine import Engine

    if arguments.small_pages:
        refuse_huge_pages()
    begin = time.perf_counter()
    engine = Engine.load(
        engine_dir,
        num_threads=arguments.threads,
        offload_weights=None if budget == "none" else parse_bytes(budget),
    )
    target: Any = engine.target
    found: dict[str, Any] = {"budget": budget, "load_s": round(time.perf_counter() - begin, 2)}
    if target.offload is not None:
        plan = target.offload
        found |= {
            "budget_bytes": parse_bytes(budget),
            "kept_segments": len(plan.kept),
            "offloaded_segments": len(plan.streamed),
            "bytes_per_pass": plan.bytes_per_pass,
            "buffer_bytes": plan.buffer_bytes,
            "is_direct": target.stream is not None and target.stream.is_direct(),
        }
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[: arguments.num_prompts]
    prompts = [json.loads(line)["prompt"] for line in lines]
    names = ["off", *(name for name in engine.plans if name != "off")]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for name in names:
        run(engine, name, prompts[:1], 4)
    alone: list[float] = []
    # in turn, so that a slow minute of the machine is not one plan's
    for _ in range(arguments.rounds):
        for name in names:
            if target.offload is not None:
                alone.append(read_alone(target.stream, len(target.offload.streamed)))
            count = arguments.off_tokens if name == "off" else arguments.tokens
            runs[name].append(run(engine, name, prompts, count))
    if alone:
        found |= {"read_s": statistics.median(alone), "read_spread_s": [min(alone), max(alone)]}
    found["plans"] = {name: summary(items) for name, items in runs.items()}
    off = found["plans"]["off"]["tokens_per_s"]
    for item in found["plans"].values():
        item["speed_up"] = round(item["tokens_per_s"] / off, 3)
    found["peak_rss_bytes"] = proc("status", "VmHWM") * 1024
    return found


def refuse_huge_pages() -> None:
    """Let this process have small pages alone, whatever it asks for."""
    pr_set_thp_disable = 41
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_thp_disable, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_THP_DISABLE)")


def read_alone(stream: Any, count: int) -> float:
    """Seconds to read all pieces once, with nothing else to do."""
    if stream is None:
        return 0.0
    for piece in range(count):
        stream.acquire(piece)
        stream.release(piece)
    begin = time.perf_counter()
    for _ in range(READ_PASSES):
        for piece in range(count):
            stream.acquire(piece)
            stream.release(piece)
    return (time.perf_counter() - begin) / READ_PASSES


def run(engine: Any, plan: str, prompts: Sequence[str], count: int) -> dict[str, Any]:
    """Generate one prompt after another; what it cost, passes over prompts apart."""
    from specc.runtime.llm import LLM
    from specc.sampling.params import SamplingParams

    llm = LLM(engine, plan=plan, shares_prefixes=False)
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    before = proc("io", "read_bytes")
    for prompt in prompts:
        llm.generate([prompt], params)
    stats = llm.get_metrics()
    seconds = stats.draft_s + stats.verify_s + stats.whole_s + stats.commit_s
    return {
        "passes": stats.num_prefill_passes + stats.num_step_passes,
        "steps": stats.num_step_passes,
        "seconds": seconds,
        # the first token of a prompt is no step's
        "tokens": stats.num_output_tokens - len(prompts),
        "read_bytes": proc("io", "read_bytes") - before,
    }


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all rounds together."""
    total = {key: sum(item[key] for item in runs) for key in runs[0]}
    return {
        "step_s": total["seconds"] / total["steps"],
        "tokens_per_step": round(total["tokens"] / total["steps"], 3),
        "tokens_per_s": total["tokens"] / total["seconds"],
        "read_bytes_per_pass": round(total["read_bytes"] / total["passes"]),
        "passes": total["passes"],
    }


def compare(entry: dict[str, Any], memory: dict[str, Any]) -> None:
    """Add what each plan's step is bound by, and how near it comes."""
    for name, item in entry["plans"].items():
        compute = memory["plans"][name]["step_s"]
        item["compute_s"] = compute
        item["bound_s"] = max(compute, entry.get("read_s", 0.0))
        item["step_over_bound"] = round(item["step_s"] / item["bound_s"], 3)
        if entry.get("bytes_per_pass"):
            share = item["read_bytes_per_pass"] / entry["bytes_per_pass"]
            item["read_over_offloaded"] = round(share, 4)


def median_of(turns: Sequence[Any]) -> Any:
    """Turns of one budget as one: medians of numbers, within plans, too."""
    first = turns[0]
    if isinstance(first, dict):
        return {key: median_of([turn[key] for turn in turns]) for key in first}
    if isinstance(first, list):
        return [median_of(values) for values in zip(*turns, strict=True)]
    is_number = isinstance(first, (int, float)) and not isinstance(first, bool)
    return statistics.median(turns) if is_number else first


def tuned(engine: Path, budget: str, threads: int) -> dict[str, Any]:
    """The plan that `specc tune` chooses for one sequence; `none`: in memory."""
    with tempfile.TemporaryDirectory(dir=engine.resolve().parent) as directory:
        copy = Path(directory) / "engine"
        shutil.copytree(engine, copy, copy_function=os.link)
        command = [sys.executable, "-P", "-m", "specc", "tune", str(copy), "--prompts"]
        command += [str(PROMPTS), "--num-prompts", "2", "--batch-size", "1", "--tokens", "16"]
        command += ["--rounds", "1", "--threads", str(threads), "--json"]
        command += [] if budget == "none" else ["--offload-weights", budget]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return {"budget": budget, "batches": json.loads(done.stdout)["batches"]}


def plot(entries: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the speed-up of each plan over the budget."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    offloaded = [entry for entry in entries if "budget_bytes" in entry]
    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    for name in offloaded[0]["plans"]:
        values = [entry["plans"][name]["speed_up"] for entry in offloaded]
        budgets = [entry["budget_bytes"] / (1 << 20) for entry in offloaded]
        axes.plot(budgets, values, "o-", label=name)
    axes.set(xlabel="memory for weights (MiB)", ylabel="speed over off", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def measure_apart(budget: str, small_pages: bool) -> dict[str, Any]:
    """`measure` in a process of its own."""
    given = [item for item in sys.argv if item != "--small-pages"]
    command = [sys.executable, "-P", *given, "--one", budget]
    command += ["--small-pages"] * small_pages
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run all budgets and write JSON and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--budgets", default="200M,350M,700M,1000M", help="comma-separated")
    parser.add_argument("--num-prompts", type=int, default=3)
    parser.add_argument("--off-tokens", type=int, default=10, help="of each prompt, plan off")
    parser.add_argument("--tokens", type=int, default=32, help="of each prompt, other plans")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--turns", type=int, default=1, help="of all budgets, one after the other")
    parser.add_argument("--small-pages", action="store_true", help="measure them, too")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("offload.json"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.engine, arguments.one, arguments)))
        return
    budgets = ("none", *arguments.budgets.split(","))
    kinds = ("huge", "small") if arguments.small_pages else ("huge",)
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(arguments.turns):
        for budget in budgets:
            for pages in kinds if budget != "none" else kinds[:1]:
                entry = measure_apart(budget, pages == "small")
                found.setdefault((budget, pages), []).append(entry)
                # the one of this turn, which comes first
                compare(entry, found["none", "huge"][-1])
                tell(entry, pages)
    merged = {key: median_of(turns) for key, turns in found.items()}
    entries = [merged[budget, "huge"] for budget in budgets]
    for budget, pages in merged:
        of_turns = found[budget, pages]
        merged[budget, pages]["read_s_of_turns"] = [turn.get("read_s", 0.0) for turn in of_turns]
        for name, item in merged[budget, pages]["plans"].items():
            ratios = [turn["plans"][name]["step_over_bound"] for turn in of_turns]
            item["step_over_bound_of_turns"] = ratios
        if pages == "small":
            merged[budget, "huge"]["small_pages"] = merged[budget, pages]
    from specc.system.machine import describe_machine
    from specc.version import __version__

    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *map(_named, sys.argv)]),
        "machine": describe_machine(),
        "versions": {"specc": __version__, "python": sys.version.split()[0]},
        "threads": arguments.threads,
        "turns": arguments.turns,
        "load_average": os.getloadavg(),
        "budgets": entries,
    }
    if arguments.tune:
        first = arguments.budgets.split(",")[0]
        report["tune"] = [
            tuned(arguments.engine, budget, arguments.threads) for budget in ("none", first)
        ]
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    plot(entries, arguments.output.with_suffix(".svg"))


def _named(argument: str) -> str:
    """An argument as a report may hold it: paths of the machine by their names alone."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def tell(entry: dict[str, Any], pages: str) -> None:
    """Print what one budget gave."""
    print(
        f"{entry['budget']}, {pages} pages: peak {format_bytes(entry['peak_rss_bytes'])}, offloaded"
        f" {format_bytes(entry.get('bytes_per_pass', 0))}, read {entry.get('read_s', 0):.3f} s",
        flush=True,
    )
    for name, item in entry["plans"].items():
        print(
            f"  {name}: step {item['step_s']:.3f} s, {item['step_over_bound']:.2f} of the bound,"
            f" reads {item.get('read_over_offloaded', 0):.3f} of what is offloaded,"
            f" {item['tokens_per_step']:.2f} tokens a step, {item['speed_up']:.2f} times off",
            flush=True,
        )


if __name__ == "__main__":
    main()
