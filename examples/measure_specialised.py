"""Measure what one program for every number of tokens costs beside programs of one number each.

    python examples/measure_specialised.py examples/pair/target --json docs/results/specialised.json

Each model is compiled once as in an engine, with the number of tokens dynamic, and once for each
of `--tokens`: 1 is plain decoding, 5 the verification of a chain of 4. All of them run in one
process on the same mapped weights and the same caches. A round calls the shared program and the
specialised one in turns, the order changing from round to round; medians over the rounds count,
and the ratio is the median of the ratios within a round.

With `--work` what was compiled stays in that directory, and another run only measures.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import specc
from specc.compiler.model_entries import DEFAULT_MAX_SEQ_LEN
from specc.kernels import native
from specc.passes.frontend.model_source import ModelSource
from specc.passes.frontend.trace import trace
from specc.passes.lower.cpu.phases import CPU_PHASES, LAYOUT_PHASES
from specc.passes.lower.inductor.package import lower
from specc.passes.pipeline import PHASES, Pipeline
from specc.passes.program_json import program_to_json
from specc.runtime.backends.program_files import MappedWeights
from specc.system.machine import describe_machine

BLOCK_SIZE = 16
# passes of more tokens are prefill, of which the last row alone is read
MOST_STEP_TOKENS = 64
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
Caches = list[tuple[Tensor, Tensor]]


def lowered_program(model: Path, dtype: str) -> dict[str, Any]:
    """The graph that an engine's program is compiled from."""
    program = trace(ModelSource.load("target", model, getattr(torch, dtype)).module, "target")
    Pipeline((*PHASES, *LAYOUT_PHASES, *CPU_PHASES)).run(program)
    return program_to_json(program)


def compile_model(model: Path, directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Make the weights, the lowered graph and a package for each number of tokens; their costs."""
    # the weights as an engine holds them; its programs are compiled again below, one by one
    specc.compile(
        model, None, directory / "engine", dtype=arguments.dtype, backend="cpu", probe=False
    )
    program = directory / "program.json"
    program.write_text(json.dumps(lowered_program(model, arguments.dtype)), encoding="utf-8")
    costs = {}
    for name in ("shared", *map(str, arguments.tokens)):
        package = directory / f"{name}.pt2"
        start = children_cpu_seconds()
        # a process of its own, as in a compilation, and none of its cached programs
        subprocess.run(
            [sys.executable, __file__, "--lower", str(program), str(package), name], check=True
        )
        # unlike wall time, this hardly depends on what else the machine does
        cpu_s = round(children_cpu_seconds() - start, 1)
        costs[name] = {"compile_cpu_s": cpu_s, "package_bytes": package.stat().st_size}
        print(f"{model.name}, {name} tokens: {costs[name]}", flush=True)
    return costs


def children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def make_caches(program: dict[str, Any], num_blocks: int) -> Caches:
    layers: dict[int, dict[str, Tensor]] = {}
    for entry in program["inputs"]:
        if entry["kind"] == "cache":
            shape = (num_blocks, BLOCK_SIZE, *entry["shape"])
            values = torch.randn(shape).to(getattr(torch, entry["dtype"]))
            layers.setdefault(entry["layer"], {})[entry["part"]] = values
    return [(layers[i]["k"], layers[i]["v"]) for i in sorted(layers)]


def make_inputs(num_tokens: int, context: int, num_blocks: int, vocab: int) -> list[Tensor | None]:
    """One sequence: a chain of nodes after `context` rows, or, where they are many, prefill."""
    rows = torch.arange(context, context + num_tokens)
    is_step = num_tokens <= MOST_STEP_TOKENS
    chain = [[(1 << (node + 1)) - 1] for node in range(num_tokens)]
    return [
        torch.randint(0, vocab, (num_tokens,)),
        rows,
        torch.tensor([0, num_tokens], dtype=torch.int32),
        rows.to(torch.int32),
        torch.tensor([context], dtype=torch.int32),
        torch.tensor(chain, dtype=torch.int64) if is_step and num_tokens > 1 else None,
        torch.arange(num_blocks, dtype=torch.int32)[None],
        torch.arange(num_tokens) if is_step else torch.tensor([num_tokens - 1]),
    ]


def compare(
    shared: Callable[[], Tensor], specialised: Callable[[], Tensor], seconds: float
) -> dict[str, Any]:
    """Medians over rounds of both, in microseconds a call."""
    runs = {"shared": shared, "specialised": specialised}
    start = time.thread_time()
    for run in (*runs.values(), *runs.values()):
        run()
    # a turn is long beside the clock and short beside what else the machine does
    calls = max(1, round(0.02 / ((time.thread_time() - start) / 4)))
    walls: dict[str, list[float]] = {name: [] for name in runs}
    cpus: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs.items())
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(walls["shared"]) < 10:
        for name, run in order:
            run()  # what ran before has left its own code and data in the caches
            begin, cpu = time.perf_counter(), time.thread_time()
            for _ in range(calls):
                run()
            cpus[name].append((time.thread_time() - cpu) / calls)
            walls[name].append((time.perf_counter() - begin) / calls)
        order.reverse()
    return {
        "rounds": len(walls["shared"]),
        "calls_in_a_turn": calls,
        "wall": summary(walls),
        # of the calling thread, which with one thread does all the work: other jobs that take
        # the core away do not count
        "cpu": summary(cpus),
    }


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(times["shared"], times["specialised"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "shared_us": round(1e6 * statistics.median(times["shared"]), 1),
        "specialised_us": round(1e6 * statistics.median(times["specialised"]), 1),
        "shared_over_specialised": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
    }


def measure(model: Path, directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    from specc.runtime.backends.cpu.program import (
        CpuProgram,  # needs the native library
    )

    file = directory / "costs.json"
    if not file.is_file():
        file.write_text(json.dumps(compile_model(model, directory, arguments)), encoding="utf-8")
    costs = json.loads(file.read_text(encoding="utf-8"))
    program = json.loads((directory / "program.json").read_text(encoding="utf-8"))
    weights = MappedWeights(directory / "engine" / "target" / "weights.safetensors")
    num_blocks = -(-(arguments.context + max(arguments.tokens)) // BLOCK_SIZE)
    caches = make_caches(program, num_blocks)
    programs = {}
    for name in costs:
        start = time.perf_counter()
        programs[name] = CpuProgram(program, directory / f"{name}.pt2", weights, caches)
        costs[name]["load_s"] = round(time.perf_counter() - start, 3)
    vocab = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    rows = []
    for num_tokens in arguments.tokens:
        inputs = make_inputs(num_tokens, arguments.context, num_blocks, vocab)
        shared, specialised = (
            functools.partial(programs[name], *inputs) for name in ("shared", str(num_tokens))
        )
        # a claim of speed needs equal numbers; a call writes what the next one reads, so that
        # both start from the same rows
        expected, found = shared().float(), specialised().float()
        error = ((found - expected).abs().max() / expected.abs().max()).item()
        assert error < TOLERANCE[arguments.dtype], f"{num_tokens} tokens differ by {error}"
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            row = {"tokens": num_tokens, "threads": threads, "relative_difference": error}
            row |= compare(shared, specialised, arguments.seconds)
            rows.append(row)
            print(f"{model.name}: {row}", flush=True)
    return {"model": model.name, "dtype": arguments.dtype, "programs": costs, "passes": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="*", help="Hugging Face directories")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 5], help="of a pass")
    parser.add_argument("--context", type=int, default=256, help="committed rows")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32")
    parser.add_argument("--seconds", type=float, default=10.0, help="of one comparison")
    parser.add_argument("--work", type=Path, help="keep what was compiled here")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--lower", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.lower:
        source, package, num_tokens = arguments.lower
        program = json.loads(Path(source).read_text(encoding="utf-8"))
        lower(program, Path(package), None if num_tokens == "shared" else int(num_tokens))
        return
    if arguments.context + max(arguments.tokens) > DEFAULT_MAX_SEQ_LEN:
        parser.error(f"--context and --tokens: {DEFAULT_MAX_SEQ_LEN} rows at most")
    native.load()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in arguments.models:
            directory = (arguments.work or Path(scratch)) / f"{model.name}-{arguments.dtype}"
            directory.mkdir(parents=True, exist_ok=True)
            results.append(measure(model, directory, arguments))
    if arguments.json:
        report = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", *sys.argv]),
            "machine": describe_machine(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "context": arguments.context,
            "results": results,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
