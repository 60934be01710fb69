"""Speed of self-drafts on a target that uses its context: examples/long, whole iterations.

    python examples/measure_long_target.py --json out/long_target_speed.json

Requests read stretches of held-out files once, and then decode with plain decoding and with each
plan in turn, a few steps each, all from the same rows: what a step yields is what the target
accepts of its own drafts there, and its seconds are those of the whole iteration, the host's part
included. A ratio is that of a plan's tokens a second to those of plain decoding in the same round;
medians of rounds. Acceptance depends on the text, of which there is little here: tokens a step
differ from those of docs/guide/drafts.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure_crossing import Turns
from measure_views import stretches_of

from specc.compiler.build import build
from specc.config import CompileConfig
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, SpecPlan
from specc.speculation.self_drafts import SelfDraft
from specc.system.machine import describe_machine

# few passes over prompts: requests decode while those after them are read
CHUNK = 2048
TARGET = Path(__file__).resolve().parent / "long" / "target"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=7800)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument(
        "--selves",
        nargs="+",
        default=["window=256", "window=512", "window=1024", "blocks=256,window=256"],
        help="self-drafts, without self:",
    )
    parser.add_argument("--gammas", type=int, nargs="+", default=[3])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="of a plan in a round")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def make_engine(options: argparse.Namespace, plans: list[SpecPlan], folder: Path) -> Engine:
    config = CompileConfig(
        plans=tuple(plans),
        max_batch_size=options.batch,
        max_seq_len=min(8192, options.context + room_of(options, plans) + 8),
        dtype="float32",
        prefill_chunk=CHUNK,
        probe=False,
    )
    build(TARGET, [], folder / "engine", config)
    return Engine.load(folder / "engine")


def room_of(options: argparse.Namespace, plans: list[SpecPlan]) -> int:
    """Tokens that a request may get at most: passes over prompts, warming up, and the rounds."""
    each = 1 + sum(plan.max_depth + 1 for plan in plans)
    passes = options.batch * -(-options.context // CHUNK)
    return 2 + passes + (options.rounds + 1) * options.steps * each


def measure(engine: Engine, options: argparse.Namespace, plans: list[SpecPlan]) -> dict[str, Any]:
    """All plans by turns, from the rows where the one before has stopped."""
    policy = Turns()
    core = EngineCore(engine, policy=policy, shares_prefixes=False)
    room = engine.max_seq_len - options.context
    for seed, ids in enumerate(
        stretches_of(engine, options.context, options.context, options.batch)
    ):
        params = SamplingParams(
            max_tokens=room, ignore_eos=True, temperature=options.temperature, seed=seed
        )
        core.scheduler.add(core.requests.make(ids, params))
    begin = time.perf_counter()
    while core.scheduler.waiting or not all(r.has_output for r in core.scheduler.running):
        core.advance()
    prefill_s = time.perf_counter() - begin
    running = list(core.scheduler.running)
    assert len(running) == options.batch, "as many stretches of held-out text"
    rates: dict[str, list[tuple[float, float, float]]] = {}
    for done in range(options.rounds + 1):
        for plan in [OFF, *plans]:
            policy.plan = plan.name
            before, begin = sum(len(r.token_ids) for r in running), time.perf_counter()
            for _ in range(options.steps):
                core.advance()
            seconds = time.perf_counter() - begin
            tokens = sum(len(r.token_ids) for r in running) - before
            if done:  # the first round warms up
                each = tokens / options.steps / len(running)
                rates.setdefault(plan.name, []).append(
                    (tokens / seconds, seconds / options.steps, each)
                )
    assert len(core.scheduler.running) == options.batch, "no request has ended"
    found = []
    for plan in plans:
        pairs = list(zip(rates[plan.name], rates[OFF.name], strict=True))
        ratios = [own[0] / off[0] for own, off in pairs]
        found.append(
            {
                "plan": plan.name,
                "ratio": round(statistics.median(ratios), 3),
                "spread": [round(min(ratios), 3), round(max(ratios), 3)],
                "tokens_a_step": round(statistics.fmean(own[2] for own, _ in pairs), 3),
                "step_ms": round(1e3 * statistics.median(own[1] for own, _ in pairs), 3),
                "off_ms": round(1e3 * statistics.median(off[1] for _, off in pairs), 3),
            }
        )
        print(found[-1], flush=True)
    return {"prefill_s": round(prefill_s, 2), "plans": found}


def main() -> None:
    options = parse()
    drafts = [SelfDraft.parse(f"self:{one}") for one in options.selves]
    plans = [
        SpecPlan.from_widths((1,) * gamma, (draft.name,))
        for draft in drafts
        if draft is not None
        for gamma in options.gammas
    ]
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(options, plans, Path(folder))
        figures = measure(engine, options, plans)
    report = {
        "command": "python examples/measure_long_target.py " + " ".join(sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": describe_machine(),
        "torch_version": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": list(os.getloadavg()),
        "backend": engine.backend,
        "context": options.context,
        "batch": options.batch,
        "temperature": options.temperature,
        "rounds": options.rounds,
        "steps": options.steps,
        **figures,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
