"""Drafting and verifying at once, on two cores: what it takes, beside what it could take at best.

    python examples/measure_overlap.py --json out/overlap.json

Two processes, pinned to a core each: one passes the target over a batch, the other one the draft.
They wait for each other after every round, as two stages of a pipeline do (Minions,
arXiv:2402.15678, overlaps them for two halves of a batch). Beside them, one process does one after
the other, each with one core or with both, whichever is faster: small passes gain nothing from a
second one. Two schemes are compared with that, a step of it being V + D:

- alternating halves: while one half of the batch is verified, the other half is drafted for; a
  round of both halves takes 2 max(V₁, D₁) at best, both of half a batch.
- optimistic: the draft goes on as if all γ tokens were accepted and the next one guessed, which
  happens with probability p = α^(γ+1); else it drafts again. A step takes max(V₁, D₁) + (1 - p) D₁
  at best.

A subscript of 1 is one core. Bounds are made of passes that a process times alone; what is measured
are rounds of both processes at work, which share the memory's bandwidth.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

# idle OpenMP workers must not take the other process's core
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from specc.compiler.build import build
from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.speculation.plans import SpecPlan
from specc.system.machine import describe_machine
from specc.tune.latency import timed_inputs

PAIR = Path(__file__).resolve().parent / "pair"
VERIFY, DRAFT = "verify", "draft"
_LIMIT_S = 120


def block_table(engine: Engine, batch: int) -> torch.Tensor:
    """Of sequences of full length, [batch, blocks]."""
    cache = engine.cache
    blocks = [cache.allocator.allocate(cache.shape.blocks_per_sequence) for _ in range(batch)]
    return cache.block_table(blocks)


def passes(
    engine: Engine, table: torch.Tensor, context: int, gamma: int
) -> dict[str, Callable[[], Any]]:
    """Verification of a chain, and the levels in which the draft proposes it."""
    verified = timed_inputs(table, context, gamma + 1)
    # the first level reads what a step left unread, besides the root
    levels = [
        timed_inputs(table, context + level, 2 if level == 0 else 1) for level in range(gamma)
    ]

    def verify() -> None:
        engine.target(*verified)

    def draft() -> None:
        for level in levels:
            engine.drafts[0](*level)

    return {VERIFY: verify, DRAFT: draft}


@torch.inference_mode()
def timed(calls: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Median seconds of each, taking turns; the first round is not counted."""
    found: list[list[float]] = [[] for _ in calls]
    for done in range(rounds + 1):
        for call, seconds in zip(calls, found, strict=True):
            begin = time.perf_counter()
            call()
            if done:
                seconds.append(time.perf_counter() - begin)
    return [statistics.median(seconds) for seconds in found]


@torch.inference_mode()
def stage(
    engine: Path, kind: str, core: int, sizes: list[int], options: argparse.Namespace,
    barrier: Barrier, results: Any,
) -> None:  # fmt: skip
    """A process with one core: its passes alone, then in rounds with the other process's."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    loaded = Engine.load(engine, verify=False)
    table = block_table(loaded, max(sizes))
    calls = {
        size: passes(loaded, table[:size], options.context, options.gamma)[kind] for size in sizes
    }
    alone: dict[int, float] = {}
    for turn in (VERIFY, DRAFT):
        barrier.wait(_LIMIT_S)
        if turn == kind:
            alone = dict(zip(sizes, timed(list(calls.values()), options.rounds), strict=True))
    together: dict[int, list[float]] = {size: [] for size in sizes}
    for done in range(options.rounds + 1):
        for size in sizes:
            barrier.wait(_LIMIT_S)
            begin = time.perf_counter()
            calls[size]()
            barrier.wait(_LIMIT_S)
            if done:
                together[size].append(time.perf_counter() - begin)
    rounds = {size: statistics.median(seconds) for size, seconds in together.items()}
    results.put((kind, alone, rounds))


def one_after_the_other(
    engine: Path, sizes: list[int], options: argparse.Namespace
) -> dict[int, Any]:
    """Seconds of the same passes in one process, with one core or with both."""
    loaded = Engine.load(engine, verify=False)
    found, table = {}, block_table(loaded, max(sizes))
    for size in sizes:
        calls = passes(loaded, table[:size], options.context, options.gamma)
        times = []
        for count in (1, len(options.cores)):
            torch.set_num_threads(count)
            times.append(timed([calls[VERIFY], calls[DRAFT]], options.rounds))
        verify_s, draft_s = (min(pair) for pair in zip(*times, strict=True))
        found[size] = {VERIFY: verify_s, DRAFT: draft_s}
    return found


def compare(
    serial: dict[int, Any], alone: Any, both: Any, options: argparse.Namespace
) -> list[Any]:
    """Both schemes for every batch size."""
    rows = []
    for size in options.batch:
        # programs keep the threads that they were loaded with: what one core does alone counts, too
        verify_s, draft_s = (min(serial[size][kind], alone[kind][size]) for kind in (VERIFY, DRAFT))
        step_s = verify_s + draft_s
        row: dict[str, Any] = {
            "batch_size": size,
            "verify_ms": round(1e3 * verify_s, 4),
            "draft_ms": round(1e3 * draft_s, 4),
            "verify_1_ms": round(1e3 * alone[VERIFY][size], 4),
            "draft_1_ms": round(1e3 * alone[DRAFT][size], 4),
        }
        if size % 2 == 0:
            half = size // 2
            bound = 2 * max(alone[VERIFY][half], alone[DRAFT][half])
            row["halves"] = {
                "bound_speedup": round(step_s / bound, 3),
                "measured_speedup": round(step_s / (2 * both[half]), 3),
            }
        for alpha in options.acceptance:
            again_s = (1 - alpha ** (options.gamma + 1)) * alone[DRAFT][size]
            bound = max(alone[VERIFY][size], alone[DRAFT][size]) + again_s
            row[f"optimistic, acceptance {alpha:g}"] = {
                "bound_speedup": round(step_s / bound, 3),
                "measured_speedup": round(step_s / (both[size] + again_s), 3),
            }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=PAIR / "target")
    parser.add_argument("--draft", type=Path, default=PAIR / "draft")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.75, 0.9, 1.0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--cores", type=int, nargs=2, default=sorted(os.sched_getaffinity(0))[:2])
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def main() -> None:
    options = parse()
    sizes = sorted({*options.batch, *(size // 2 for size in options.batch if size % 2 == 0)})
    config = CompileConfig(
        plans=(SpecPlan.from_widths((1,) * options.gamma),),
        max_batch_size=max(sizes),
        max_seq_len=2 * options.context,
        probe=False,
    )
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder) / "engine"
        build(options.target, [options.draft], engine, config)
        serial = one_after_the_other(engine, sizes, options)
        barrier, results = context.Barrier(2), context.Queue()
        stages = [
            context.Process(
                target=stage, args=(engine, kind, core, sizes, options, barrier, results)
            )
            for kind, core in zip((VERIFY, DRAFT), options.cores, strict=True)
        ]
        for process in stages:
            process.start()
        found = [results.get(timeout=4 * _LIMIT_S) for _ in stages]
        for process in stages:
            process.join()
    alone = {kind: times for kind, times, _ in found}
    # a round ends when both have
    both = {size: max(rounds[size] for _, _, rounds in found) for size in sizes}
    report = {
        "command": "python examples/measure_overlap.py " + " ".join(sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": describe_machine(),
        "torch_version": torch.__version__,
        "target": options.target.name,
        "context": options.context,
        "gamma": options.gamma,
        "rounds": options.rounds,
        "batches": compare(serial, alone, both, options),
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
