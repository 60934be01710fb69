"""Steps of published shapes on a GPU: models are traced beside each other, and timed one by one.

    python3 -P tests/gpu/shapes.py --output FILE [CASE …]

A process for each case does what `specc bench --synthetic` does with its options. While one holds
the lock, and with it the GPU, the others trace; so many cases take little more than their time on
the device. FILE has what each has found so far, whatever becomes of it later.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
PAIR = "llama-3.1-8b/llama-3.2-1b"
CHAIN = {"num_speculative_tokens": 5}
POLL_S = 0.2
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=400.0)
    parser.add_argument("--lock", type=Path, help="the process that holds this file has the GPU")
    options = parser.parse_args()
    if unknown := {*options.cases} - {*CASES}:
        parser.error(f"unknown {', '.join(sorted(unknown))}: choose from {', '.join(CASES)}")
    with _importable() as environment:
        given = options.cases or [*CASES], options.output, options.limit_s, environment
        return run(*given, options.lock)


def run(
    names: Sequence[str],
    output: Path,
    limit_s: float,
    environment: Mapping[str, str],
    lock: Path | None = None,
) -> int:
    """Measure cases; returns 0 where all have ended well.

    Args:
        names: of `CASES`.
        output: gets a JSON object of them.
        limit_s: seconds after which what runs is ended.
        lock: see `--lock`; None is a file of their own.
    """
    end = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix="specc-shapes-") as scratch:
        folder = Path(scratch)
        running = {}
        for name in names:
            own = str(lock or folder / "lock")
            command = [sys.executable, "-P", "-m", "tests.gpu.shapes_child", name, scratch, own]
            with (folder / f"{name}.log").open("wb") as log:
                running[name] = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env=dict(environment), cwd=ROOT
                )
        while any(process.poll() is None for process in running.values()):
            _gather(folder, names, output)
            if time.monotonic() > end:
                break
            time.sleep(POLL_S)
        for process in running.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        _gather(folder, names, output)
        for name in names:
            status = running[name].returncode
            print(f"{name}: status {status}")
            if status != 0:
                print((folder / f"{name}.log").read_text(errors="replace")[-1500:])
    return int(any(process.returncode != 0 for process in running.values()))


def _gather(folder: Path, names: Sequence[str], output: Path) -> None:
    found = {}
    for name in names:
        if (file := folder / f"{name}.json").exists():
            found[name] = json.loads(file.read_text(encoding="utf-8"))
    beside = output.with_name(f"{output.name}.new")
    beside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, output)


def measure(name: str, folder: Path, lock: Path) -> None:
    """One case, into `folder`/`name`.json; the GPU is its own while it holds `lock`."""
    from specc.bench import device
    from specc.bench.synthetic import engine as engines
    from specc.cli.bench.synthetic import measure_shapes
    from specc.cli.options.bench import BenchOptions, ShapesOptions
    from specc.progress import PhaseTimer

    case = CASES[name]
    found: dict[str, Any] = {"given": case, "steps": {}, "phases": {}}
    file = folder / f"{name}.json"

    def write() -> None:
        beside = folder / f"{name}.{os.getpid()}"
        beside.write_text(json.dumps(found), encoding="utf-8")
        os.replace(beside, file)

    def listen(event: Any) -> None:
        if event.seconds is not None:
            found["phases"][event.phase] = round(event.seconds, 2)
            write()
        elif event.phase == case["stop"]:
            raise Enough

    def on_steps(plan: str, figures: dict[str, Any]) -> None:
        found["steps"][plan] = figures
        write()

    check_memory, make_engine = engines.check_memory, engines.make_engine

    def checked(programs: Any, extra: int, free: int) -> None:
        # from here on the GPU is this process's alone, and as free as it is then
        wait_s = hold(lock)
        found["waited_s"] = round(wait_s, 1)
        check_memory(programs, extra, device.open_device()[0].free_bytes())

    def made(programs: Any, weights: Any, graphs: Any, backend: str) -> Any:
        engine = make_engine(programs, weights, graphs, backend)
        if case["cuts"] is not None:
            given = case["cuts"], shapes.num_context, common.tokens
            found["cuts"] = cut_ms(engine, graphs, *given)
            write()
        return engine

    shapes = ShapesOptions(case["shapes"], **case["options"])
    common = BenchOptions(
        synthetic_acceptance=case["acceptance"],
        batch_size=case["batch"],
        tokens=case.get("tokens", 96),
        rounds=2,
    )
    with (
        contextlib.suppress(Enough),
        mock.patch.object(engines, "check_memory", checked),
        mock.patch.object(engines, "make_engine", made),
    ):
        found["report"] = measure_shapes(shapes, common, PhaseTimer(listen), on_steps)
    write()


def hold(path: Path) -> float:
    """Hold a file until this process ends; returns the seconds that it took."""
    begin = time.monotonic()
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


@contextlib.contextmanager
def _importable() -> Iterator[dict[str, str]]:
    """Variables of processes that import specc and tests."""
    import importlib.util

    path = Path(__file__).with_name("importable.py")
    spec = importlib.util.spec_from_file_location("specc_gpu_check_importable", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.importable() as site:
        yield module.environment(site) | {"OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())
