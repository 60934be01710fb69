"""The context from which on a self-draft pays, measured, beside MagicDec's formula.

    python examples/measure_crossing.py --json out/crossing.json

A target with random weights, whose cache outweighs them at long context, decodes plainly and with
chains of a self-draft at six contexts. Acceptance is assumed: a step counts for the tokens that
chains of this acceptance yield on average, while what it costs is measured, iterations as a whole.
Every request takes both plans in turn, and the contexts take turns, too; medians count. Where the
lines between the measured contexts cross is set beside the critical length that follows from a
latency table, which is measured first, as `specc tune` does it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specc.compiler.build import build
from specc.config import CompileConfig
from specc.cost.critical_length import critical_length
from specc.cost.latency_table import LatencyTable
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.policies.base import Policy
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF, SpecPlan
from specc.speculation.views import View
from specc.system.machine import describe_machine
from specc.tune.latency import measure_latency

PAIR = Path(__file__).resolve().parent / "pair"
# steps of a visit to a context; those before a plan's first one that counts
_STEPS, _WARMUP = 4, 1


class Turns(Policy):
    """Runs the plan that it was told last."""

    def __init__(self) -> None:
        self.plan = OFF.name

    def choose(self, num_running: int, stats: SpecStats) -> str:
        return self.plan


class Context:
    """Requests of one length, read already, that decode as long as they are asked to."""

    def __init__(self, engine: Engine, length: int, batch: int, room: int) -> None:
        self.length = length
        self.policy = Turns()
        self.core = EngineCore(engine, policy=self.policy, shares_prefixes=False)
        self.seconds: dict[str, list[float]] = {}
        generator = torch.Generator().manual_seed(length)
        for _ in range(batch):
            ids = torch.randint(3, engine.vocab_size, (length,), generator=generator).tolist()
            params = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True)
            self.core.scheduler.add(self.core.requests.make(ids, params))
        while self.core.scheduler.waiting or not all(
            request.has_output for request in self.core.scheduler.running
        ):
            self.core.advance()

    def visit(self, plan: str, counts: bool) -> None:
        """Some steps of a plan."""
        self.policy.plan = plan
        for step in range(_WARMUP + _STEPS):
            begin = time.perf_counter()
            self.core.advance()
            if counts and step >= _WARMUP:
                self.seconds.setdefault(plan, []).append(time.perf_counter() - begin)


def crossing(lengths: list[int], margins: list[float]) -> float | None:
    """Where a margin passes 0 for the last time on its way up, on straight lines.

    Args:
        lengths: contexts, rising.
        margins: seconds that plain decoding takes longer for the tokens of a step.
    """
    found = None
    for i in range(len(lengths) - 1):
        low, high = margins[i], margins[i + 1]
        if low < 0 <= high:
            found = lengths[i] - low * (lengths[i + 1] - lengths[i]) / (high - low)
    return found


def by_lines(lengths: list[int], margins: list[float]) -> float | None:
    """Where the straight line through all margins passes 0; None where it does not rise.

    Beyond the budget of a draft both plans are straight lines, so that all contexts tell where they
    cross; between two neighbours, the noise of these two alone decides.
    """
    slope, begin = statistics.linear_regression(lengths, margins)
    return -begin / slope if slope > 0 else None


def resampled(
    contexts: list[Context], plan: SpecPlan, tokens: float, of: Callable[..., float | None]
) -> list[int] | None:
    """95 % interval of a crossing, where steps are drawn again 1000 times; None: some have none."""
    dice, found = random.Random(0), []
    lengths = [context.length for context in contexts]
    for _ in range(1000):
        margins = []
        for context in contexts:
            off, own = (
                statistics.median(dice.choices(values, k=len(values)))
                for values in (context.seconds[OFF.name], context.seconds[plan.name])
            )
            margins.append(tokens * off - own)
        found.append(of(lengths, margins))
    if None in found:
        return None
    quantiles = statistics.quantiles([one for one in found if one is not None], n=40)
    return [round(quantiles[0]), round(quantiles[-1])]


def measure(
    engine: Engine, table: LatencyTable, plan: SpecPlan, options: argparse.Namespace, batch: int
) -> dict[str, Any]:
    """Both lines of one batch size, and the two crossings."""
    tokens = sum(options.acceptance**depth for depth in range(plan.max_depth + 1))
    room = 2 + (options.rounds + 1) * (_WARMUP + _STEPS) * (1 + plan.num_nodes)
    contexts = [Context(engine, length, batch, room) for length in options.contexts]
    for done in range(options.rounds + 1):
        for context in contexts:
            for name in (OFF.name, plan.name):
                context.visit(name, counts=done > 0)
    rows, margins = [], []
    for context in contexts:
        off, own = (statistics.median(context.seconds[name]) for name in (OFF.name, plan.name))
        margins.append(tokens * off - own)
        rows.append(
            {
                "context": context.length,
                "off_ms": round(1e3 * off, 4),
                "step_ms": round(1e3 * own, 4),
                "speedup": round(tokens * off / own, 3),
            }
        )
        for request in list(context.core.scheduler.running):
            context.core.scheduler.abort(request)
    (view,) = plan.views
    predicted = critical_length(table, view, plan.tree, tokens, batch)
    measured = crossing(options.contexts, margins)
    ratio = predicted / measured if predicted and measured else None
    print(f"batch {batch}, {plan.name}: measured {measured}, predicted {predicted}, {ratio}")
    line = by_lines(options.contexts, margins)
    intervals = [resampled(contexts, plan, tokens, of) for of in (crossing, by_lines)]
    print(f"    by lines through all contexts: {line}; intervals {intervals}")
    for row in rows:
        print("   ", row, flush=True)
    return {
        "batch_size": batch,
        "plan": plan.name,
        "tokens_a_step": round(tokens, 4),
        "measured": None if measured is None else round(measured),
        "predicted": None if predicted is None else round(predicted),
        "predicted_over_measured": ratio and round(ratio, 3),
        "measured_interval": intervals[0],
        "by_lines": line and round(line),
        "by_lines_interval": intervals[1],
        "predicted_over_lines": predicted and line and round(predicted / line, 3),
        "contexts": rows,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192]
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--acceptance", type=float, default=0.9, help="of every token of a chain")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--latency-s", type=float, default=40.0)
    parser.add_argument("--backend", default=None)
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def make_engine(options: argparse.Namespace, plan: SpecPlan, folder: Path) -> Engine:
    """A random target with room for all contexts at once."""
    torch.manual_seed(0)
    longest = max(options.contexts) + 512
    shape = LlamaConfig(
        vocab_size=json.loads((PAIR / "target" / "config.json").read_text())["vocab_size"],
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=longest,
    )
    # all contexts are there at once, each with a request for each place of a batch
    sequences = max(options.batch) * -(-sum(options.contexts) // longest) + 1
    config = CompileConfig(
        plans=(plan,),
        max_batch_size=sequences,
        max_seq_len=longest,
        backend=options.backend,
        probe=False,
    )
    LlamaForCausalLM(shape).save_pretrained(folder / "target")
    # its vocabulary is the demo pair's, and nothing else of it
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PAIR / "target" / name, folder / "target" / name)
    build(folder / "target", [], folder / "engine", config)
    return Engine.load(folder / "engine")


def main() -> None:
    options = parse()
    view = View(options.window)
    plan = SpecPlan.from_widths((1,) * options.num_speculative_tokens, (view.name,))
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(options, plan, Path(folder))
        table = measure_latency(engine, budget_s=options.latency_s)
        found = [measure(engine, table, plan, options, batch) for batch in options.batch]
    slab = 2 * options.layers * options.kv_heads * (options.hidden // options.heads) * 4
    report = {
        "command": "python examples/measure_crossing.py " + " ".join(sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": describe_machine(),
        "torch_version": torch.__version__,
        "num_threads": torch.get_num_threads(),
        "backend": engine.backend,
        "weight_bytes": engine.manifest.memory_plan["target"].weights,  # type: ignore[union-attr]
        "bytes_a_row": slab,
        "acceptance": options.acceptance,
        "rounds": options.rounds,
        "batches": found,
        "latency": table.to_json(),
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
