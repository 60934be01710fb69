"""Speed of self-drafts where the cache outweighs the weights: batch by context, beside plan off.

    python tests/measure/long_context.py --json out/long_context.json

A random target of 8 layers, two KV heads of 64 (8 KB of cache a token in float32) and 26 MB of
weights is compiled for the CPU. Rows of the cache are random numbers, one set of them for all
sequences and each with a copy of its own, since what attention costs does not depend on them; no
prompt is read. Dice accept draft tokens, and their own time does not count; `ratio` is that of the
expected tokens of a step, whatever the dice of a few steps gave. Steps go through the compiled
engine, without the scheduler; plans take turns within each round.

With `--latency-s` the engine's latency table is measured first, and `predicted` is what follows
from it. `--plot` draws both over the context, a panel for each batch; with `--from` it draws what
was measured before:

    python tests/measure/long_context.py --from out/long_context.json --plot plot.svg
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specc.artifact.kv_rows import AUTO, KV_CACHE_DTYPES
from specc.bench.dice import SyntheticAcceptance
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.cost.dice import StepEnds
from specc.cost.latency_table import LatencyTable, StepShape
from specc.drafters.views import View
from specc.draw.svg import check_picture, svg_plot
from specc.kernels.reference.kv_rows import store_rows
from specc.runtime.backends.step_io import StepInputs
from specc.runtime.engine import Engine
from specc.runtime.execution.batch_rows import last_tokens_of, sampling_rows
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, SpecPlan
from specc.system.machine import describe_machine
from specc.tune.latency import measure_latency

# rows that steps of a measurement may add to a sequence
_ROOM = 512
_LAYERS, _KV_HEADS, _DIM = 8, 2, 64


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16384, 32768])
    parser.add_argument("--windows", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--gammas", type=int, nargs="+", default=[4], help="lengths of chains")
    parser.add_argument("--acceptance", type=float, default=0.9)
    parser.add_argument("--heads", type=int, default=8, help="query heads, of 2 KV heads")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-cache-dtype", default=AUTO, choices=KV_CACHE_DTYPES)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a plan in a round")
    parser.add_argument(
        "--latency-s", type=float, default=0.0, help="seconds for a latency table; 0 is none"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="draw them here, as SVG")
    parser.add_argument("--from", type=Path, dest="known", help="figures that are drawn, no more")
    return parser.parse_args()


def make_engine(options: argparse.Namespace, plans: Sequence[SpecPlan], directory: Path) -> Engine:
    """A random target with room for the largest batch of the longest contexts."""
    longest = max(options.contexts) + _ROOM
    config = LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=_LAYERS,
        num_attention_heads=options.heads, num_key_value_heads=_KV_HEADS, head_dim=_DIM,
        max_position_embeddings=longest, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(getattr(torch, options.dtype)).eval()
    build(
        model,
        None,
        directory / "engine",
        CompileConfig(
            plans=tuple(plans),
            dtype=options.dtype,
            max_batch_size=max(options.batches),
            max_seq_len=longest,
            backend=options.backend,
            kv_cache_dtype=options.kv_cache_dtype,
            probe=False,
        ),
    )
    engine = Engine.load(directory / "engine")
    shape = engine.cache.shape
    slabs = [slab.unflatten(2, (shape.max_num_seqs, -1)) for slab in engine.cache.slabs["target"]]
    for slab in slabs:
        for layer in slab:
            wide = torch.randn(*layer[:, 0].shape[:-1], _DIM)
            layer[:, 0] = store_rows(wide, layer.dtype)
            layer[:, 1:] = layer[:, :1]
    return engine


class Runs:
    """Steps of all plans from the same place.

    Args:
        engine: with filled caches.
        batch: sequences of a step.
        context: committed rows of each before the first step.
    """

    def __init__(self, engine: Engine, batch: int, context: int) -> None:
        self._engine, self._batch, self._context = engine, batch, context
        self._num_last = last_tokens_of(engine.plans.values())
        shape = engine.cache.shape
        # a sequence has the blocks of its copy, in another order than they lie
        width = shape.blocks_per_sequence
        order = torch.randperm(width, generator=torch.Generator().manual_seed(1))
        first = torch.arange(batch)[:, None] * width
        self._table = (first + order).int()
        request = Request("0", [0], SamplingParams(temperature=0), max_seq_len=2)
        self._sampling = sampling_rows([request] * batch)

    def steps(self, plan: str, count: int, acceptance: float, seed: int) -> tuple[float, int]:
        """Seconds of `count` steps, and tokens that they emit."""
        step = self._engine.steps[plan]
        dice = SyntheticAcceptance([acceptance], step.plan, seed) if step.plan.speculates else None
        step.before_accept = dice
        lens, emitted = [self._context] * self._batch, 0
        begin = time.perf_counter()
        for _ in range(count):
            rows = [(*[7] * self._num_last, length) for length in lens]
            inputs = StepInputs(rows, self._table, *self._sampling)
            result = step.advance(inputs, self._engine.cache.environment)
            lens = result.next_cache_len
            emitted += sum(result.num_accepted) + self._batch
        seconds = time.perf_counter() - begin
        step.before_accept = None
        return seconds - (dice.seconds if dice else 0.0), emitted


def measure(engine: Engine, options: argparse.Namespace, batch: int, context: int) -> list[dict]:
    """Medians of all plans at one batch and context, interleaved."""
    runs = Runs(engine, batch, context)
    plans = [OFF.name, *(name for name in engine.steps if name != OFF.name)]
    times: dict[str, list[float]] = {plan: [] for plan in plans}
    tokens: dict[str, int] = dict.fromkeys(plans, 0)
    for number in range(options.rounds + 1):
        for plan in plans:
            seconds, emitted = runs.steps(plan, options.steps, options.acceptance, number)
            if number:  # the first round warms up
                times[plan].append(seconds / options.steps)
                tokens[plan] += emitted
    count = options.rounds * options.steps * batch
    found = []
    for plan in plans[1:]:
        (view,) = engine.plans[plan].views
        # few steps draw uneven lengths, and what a step costs does not depend on what it accepts
        length = StepEnds(engine.plans[plan].tree, [(options.acceptance,)]).mean_length
        step_ms = 1000 * statistics.median(times[plan])
        off_ms = 1000 * statistics.median(times[OFF.name])
        fastest_ms = 1000 * min(times[plan])
        found.append(
            {
                "batch": batch,
                "context": context,
                "window": view.window,
                "gamma": engine.plans[plan].max_depth,
                "ratio": round(length * off_ms / step_ms, 3),
                # where other jobs take the cores, the fastest of each
                "ratio_fastest": round(length * 1000 * min(times[OFF.name]) / fastest_ms, 3),
                "tokens_per_step": round(length, 3),
                "drawn_tokens_per_step": round(tokens[plan] / count, 3),
                "step_ms": round(step_ms, 3),
                "off_ms": round(off_ms, 3),
                "spread_ms": [round(1000 * f(times[plan]), 3) for f in (min, max)],
                "spread_off_ms": [round(1000 * f(times[OFF.name]), 3) for f in (min, max)],
            }
        )
    return found


def predicted(engine: Engine, budget_s: float, report: dict[str, Any]) -> LatencyTable:
    """A latency table of these steps, which no scheduler runs; the report gets the measured one."""
    table = measure_latency(engine, budget_s=budget_s)
    report["latency"] = table.to_json()
    return dataclasses.replace(table, iteration_s=0.0, step_s=0.0)


def add_prediction(cell: dict[str, Any], table: LatencyTable, plan: SpecPlan) -> None:
    """Times faster than plain decoding, by the table, with the tokens of the cell."""
    rows = [cell["context"]] * cell["batch"]
    off_s, own_s = (table.iteration([StepShape.of(one, rows)]) for one in (OFF, plan))
    cell["predicted"] = round(cell["tokens_per_step"] * off_s / own_s, 3)


def draw(report: dict[str, Any], path: Path) -> None:
    """Times faster than off over the context: a line for each chain and batch.

    Points and full lines are measured, dashed ones predicted by the latency table.
    """
    cells = report["cells"]
    window, batches = cells[0]["window"], sorted({cell["batch"] for cell in cells})
    cells = [cell for cell in cells if cell["window"] == window]
    gamma = max(cell["gamma"] for cell in cells)
    title = (
        f"{report['machine']['cpu']}, {report['threads']} threads, {report['dtype']},"
        f" acceptance {report['acceptance']}\nself:window={window}, chain of {gamma}"
    )
    colors = ("#8a8f98", "#c9a227", "#4c9f70", "#1f6feb", "#8e5ea2", "#c44e52")
    with svg_plot(path, 7, 4.2, title) as axes:
        for batch, color in zip(batches, colors, strict=False):
            own = [cell for cell in cells if (cell["batch"], cell["gamma"]) == (batch, gamma)]
            own.sort(key=lambda cell: cell["context"])
            contexts = [cell["context"] for cell in own]
            ratios = [cell["ratio"] for cell in own]
            axes.plot(
                contexts, ratios, color=color, marker="o", markersize=3.5,
                label=f"batch {batch}", gid=f"measured-{batch}",
            )  # fmt: skip
            if all("predicted" in cell for cell in own):
                curve = [cell["predicted"] for cell in own]
                axes.plot(contexts, curve, color=color, linestyle="--", gid=f"predicted-{batch}")
        axes.axhline(1.0, color="#8a8f98", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({cell["context"] for cell in cells}))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("committed rows of each sequence")
        dashed = ", dashed: predicted" if all("predicted" in cell for cell in cells) else ""
        axes.set_ylabel(f"times faster than plain decoding\n(points: measured{dashed})")
        axes.legend(frameon=False)


def main() -> None:
    options = parse()
    if options.known:
        draw(json.loads(options.known.read_text(encoding="utf-8")), options.plot)
        return
    if options.plot:
        check_picture(options.plot, "--plot")
    plans = [
        SpecPlan.from_widths((1,) * gamma, (View(window, 4).name,))
        for window in options.windows
        for gamma in options.gammas
    ]
    report: dict[str, Any] = {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "threads": torch.get_num_threads(),
        "acceptance": options.acceptance,
        "shape": {"layers": _LAYERS, "heads": options.heads, "kv_heads": _KV_HEADS, "dim": _DIM},
        "dtype": options.dtype,
        "kv_cache_dtype": options.kv_cache_dtype,
        "backend": options.backend,
        "rounds": options.rounds,
        "steps": options.steps,
        "load": list(os.getloadavg()),
        "cells": [],
    }
    with tempfile.TemporaryDirectory() as directory:
        engine = make_engine(options, plans, Path(directory))
        report["weight_bytes"] = engine.manifest.memory_plan["target"].weights  # type: ignore
        table = predicted(engine, options.latency_s, report) if options.latency_s else None
        for context in options.contexts:
            for batch in options.batches:
                cells = measure(engine, options, batch, context)
                for cell, plan in zip(cells, plans, strict=True):
                    if table is not None:
                        add_prediction(cell, table, plan)
                report["cells"] += cells
                for cell in cells:
                    print(
                        f"batch {batch}, context {context}, window {cell['window']}, chain of"
                        f" {cell['gamma']}: {cell['ratio']:.2f} times off, {cell['step_ms']:.1f} ms"
                        f" a step of {cell['tokens_per_step']:.2f} tokens, off"
                        f" {cell['off_ms']:.1f} ms"
                        + (f", predicted {cell['predicted']:.2f}" if table else ""),
                        flush=True,
                    )
                if options.json:  # what is cut off has what it measured
                    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        draw(report, options.plot)


if __name__ == "__main__":
    main()
