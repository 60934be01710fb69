"""Steps of published shapes: models are traced beside each other, and timed one by one.

A process for each case does what `specc bench --synthetic` does with its options. While one holds
the lock, and with it the GPU, the others trace; so many cases take little more than their time on
the device.
"""

from __future__ import annotations

import contextlib
import fcntl
import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.gpu.results import Device, Results

# the process that holds it has the GPU
LOCK = Path(__file__).resolve().parents[2] / "build/gpu-check/gpu.lock"
PAIR = "llama-3.1-8b/llama-3.2-1b"
CHAIN = {"num_speculative_tokens": 5}
# live nodes of each request that are timed where a case cuts
SHARES = (1.0, 0.75, 0.5, 0.25)

INT4 = {"quantize": "int4", "quantize_group": 128}
# probabilities of the siblings of a tree
SIBLINGS = "0.8,.1,.05"


def _case(
    shapes: str,
    options: Mapping[str, Any],
    acceptance: str | None = "0.8",
    *,
    batch: int = 1,
    stop: str | None = "rounds",
    cuts: str | None = None,
) -> dict[str, Any]:
    """A case.

    Args:
        shapes: what --synthetic says.
        options: others of `ShapesOptions`.
        acceptance: probabilities of the dice.
        batch: sequences.
        stop: phase at which enough is known; None is the end.
        cuts: plan whose steps are also timed with a part of each tree.
    """
    given = {"shapes": shapes, "options": dict(options), "acceptance": acceptance}
    return given | {"batch": batch, "stop": stop, "cuts": cuts}


CASES = {
    "8b-1b": _case(PAIR, CHAIN, stop=None),
    "8b-1b int4": _case(PAIR, CHAIN | INT4),
    "8b-1b int4 draft": _case(PAIR, CHAIN | {"draft_quantize": "int4", "quantize_group": 128}),
    "8b-1b int4 fragments": _case(PAIR, CHAIN | INT4 | {"weight_fragments": True}),
    "8b-1b int8 fragments": _case(PAIR, CHAIN | {"quantize": "int8", "weight_fragments": True}),
    "8b-1b fp8 fragments": _case(PAIR, CHAIN | {"quantize": "fp8", "weight_fragments": True}),
    "8b-1b int8": _case(PAIR, CHAIN | {"quantize": "int8"}),
    "8b-1b fp8": _case(PAIR, CHAIN | {"quantize": "fp8"}),
    "8b-1b batch 16": _case(PAIR, CHAIN, batch=16, cuts="chain-5"),
    "8b-1b batch 16 int4": _case(PAIR, CHAIN | INT4, batch=16),
    "8b eagle3": _case(
        "llama-3.1-8b", {"draft": "eagle3", "trees": ("1,1,1,1,1", "3,2,1,1")}, SIBLINGS
    ),
    "8b eagle3 batch 16": _case(
        "llama-3.1-8b", CHAIN | {"draft": "eagle3"}, batch=16, stop="parts of off"
    ),
    "qwen3-8b dflash": _case(
        "qwen3-8b", {"draft": "dflash", "trees": ("1,1,1,1,1,1,1", "3,2,1,1,1")}, SIBLINGS
    ),
    "8b medusa": _case("llama-3.1-8b", {"draft": "medusa", "trees": ("1,1,1", "3,2,1")}, SIBLINGS),
    "qwen3-8b dspark": _case("qwen3-8b", CHAIN | {"draft": "dspark"}, stop="parts of off"),
    "30b-a3b mixture": _case("qwen3-30b-a3b/qwen3-0.6b", CHAIN),
    "16b latent attention": _case("deepseek-v2-lite", {}, None),
    "27b hybrid": _case("qwen3.5-27b/qwen3-0.6b-248k", CHAIN, stop=None),
    "27b hybrid tree": _case("qwen3.5-27b/qwen3-0.6b-248k", {"trees": ("2,2,1",)}, "0.7,.2"),
    "9b hybrid batch 8": _case("qwen3.5-9b/qwen3-0.6b-248k", CHAIN, batch=8),
}


class Enough(Exception):
    """What was wanted is known."""


def measure(results: Results, device: Device, name: str) -> None:
    """One case; the GPU is this process's alone from when its engine is made.

    Leaves figures of each plan's steps, those of cut trees, and the report of a case that goes to
    its end.
    """
    device.prepare()
    from specc.bench import device as bench_device
    from specc.bench.synthetic import engine as engines
    from specc.cli.bench.synthetic import measure_shapes
    from specc.cli.options.bench import BenchOptions, ShapesOptions
    from specc.progress import PhaseTimer

    case, phases = CASES[name], {}
    results.note(given=case)

    def listen(event: Any) -> None:
        if event.seconds is not None:
            phases[event.phase] = round(event.seconds, 2)
            results.note(phases=phases)
        elif event.phase == case["stop"]:
            raise Enough

    def on_steps(plan: str, figures: dict[str, Any]) -> None:
        results.end(plan, "passed", figures)
        results.begin("next")

    check_memory, make_engine = engines.check_memory, engines.make_engine

    def checked(programs: Any, extra: int, free: int) -> None:
        # from here on the GPU is this process's alone, and as free as it is then
        results.note(waited_s=round(hold(LOCK), 1))
        check_memory(programs, extra, bench_device.open_device()[0].free_bytes())

    def made(programs: Any, weights: Any, graphs: Any, backend: str) -> Any:
        engine = make_engine(programs, weights, graphs, backend)
        if case["cuts"] is not None:
            given = case["cuts"], options.num_context, common.tokens
            results.check("cuts", partial(cut_ms, engine, graphs, *given))
        return engine

    options = ShapesOptions(case["shapes"], **case["options"])
    common = BenchOptions(
        synthetic_acceptance=case["acceptance"],
        batch_size=case["batch"],
        tokens=case.get("tokens", 96),
        rounds=2,
    )
    results.begin("first")
    with (
        contextlib.suppress(Enough),
        mock.patch.object(engines, "check_memory", checked),
        mock.patch.object(engines, "make_engine", made),
    ):
        report = measure_shapes(options, common, PhaseTimer(listen), on_steps)
        results.end("report", "passed", report)


def hold(path: Path) -> float:
    """Hold a file until this process ends; returns the seconds that it took."""
    begin = time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    # kept open
    globals()["_held"] = file
    return time.monotonic() - begin


def cut_ms(engine: Any, graphs: Any, plan: str, context: int, tokens: int) -> dict[str, float]:
    """Milliseconds of a step that verifies a share of each tree, by live nodes of a request."""
    import torch

    from specc.bench.steps import StepBench
    from specc.runtime.backends.captured.step_scores import StepExtras

    bench = StepBench(engine, graphs, context, tokens)
    step, batch = engine.steps[plan], engine.cache.shape.max_num_seqs
    count = max(1, tokens // (step.plan.max_depth + 1))
    times = {}
    for live in sorted({max(1, round(share * step.plan.num_nodes)) for share in SHARES}):
        extra = {"live": torch.full((batch,), live, dtype=torch.int32)}
        inputs = bench._inputs._replace(extra=extra)
        extras = StepExtras(num_rows=step.pass_rows(batch, batch * live))

        def queue(inputs: Any = inputs, extras: Any = extras) -> None:
            pending = step.submit(inputs, extras=extras)
            for _ in range(count - 1):
                following = step.submit_next(batch, extras=extras)
                pending.result()
                pending = following
            pending.result()

        queue()
        replays = graphs.record(queue)
        times[str(live)] = statistics.median(graphs.clock.ms(*replay) for replay in replays)
    return times
