"""Measure what compiling costs: time over layers, and peak memory on weights larger than that.

    python tests/measure/compile.py --output out/compile_scale.json
    python tests/measure/compile.py --part cpu --output compile_cpu.json
    python tests/measure/compile.py --part ranks --output out/compile_ranks.json
    python tests/measure/compile.py --part reshard --output out/reshard.json

Each measurement runs in a process of its own, so that peaks do not mix. `passes`: the traced
models have the shapes of Llama 3 70B and no weights; the model that is compiled for the backend
eager has random weights of 3 GB. `cpu`: the same weights for the backend cpu, and models of many
narrow layers, since graphs grow with layers and not with weights; no cache is warm. `ranks`: the
70B shape cut for 8 ranks, and the weights of 3 GB written as files of 4. `reshard`: of these files
those of 2 ranks, and the whole ones. `quantize`: the weights of 3 GB in int4, and the memory
of the engine that is loaded. Segments beside whole programs: `measure_segments.py`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LAYERS = (8, 16, 32, 64, 80)
CODE_LAYERS = (24, 48, 80)
PARTS = ("passes", "cpu", "quantize", "ranks", "reshard")
# Llama configurations: of many weights, and of many layers
WIDE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}
NARROW = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
}
_MIB = 1 << 20


def measure_trace(num_layers: int) -> dict[str, Any]:
    """Trace and rewrite a Llama of 70B shapes with this many layers; nothing is allocated."""
    import torch
    from transformers import LlamaConfig

    from specc.passes.frontend import hf_model
    from specc.passes.frontend.trace import trace
    from specc.passes.pipeline import Pipeline

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=num_layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    )
    start, cpu = time.perf_counter(), time.process_time()
    program = trace(hf_model.build_on_meta(config, torch.bfloat16), "target")
    traced = time.perf_counter()
    Pipeline().run(program)
    done = time.perf_counter()
    return {
        "num_layers": num_layers,
        "num_parameters": program.num_parameters,
        "trace_s": round(traced - start, 2),
        "passes_s": round(done - traced, 2),
        "total_s": round(done - start, 2),
        # unlike wall time, this hardly depends on what else the machine does
        "cpu_s": round(time.process_time() - cpu, 2),
        "peak_rss_bytes": peak_rss_bytes(),
    }


def measure_cut(num_ranks: int) -> dict[str, Any]:
    """Trace, rewrite and cut the 70B shape."""
    from specc.passes import pipeline
    from specc.passes.shard.shard import Shard

    seconds: dict[str, float] = {}
    phases = (*pipeline.PHASES, ("shard", (lambda: Shard(num_ranks),)))

    class Cutting(pipeline.Pipeline):
        def run(self, program: Any) -> Any:
            self.phases = phases
            records = super().run(program)
            plan = program.shard
            seconds["cut_s"] = round(records[-1].seconds, 2)
            seconds["collectives"] = len(plan.collectives)
            seconds["bytes_a_rank"] = plan.local_bytes
            seconds["share"] = round(plan.local_bytes * num_ranks / plan.whole_bytes, 5)
            return records

    whole, pipeline.Pipeline = pipeline.Pipeline, Cutting  # type: ignore[misc]
    try:
        return {"num_ranks": num_ranks, **measure_trace(LAYERS[-1]), **seconds}
    finally:
        pipeline.Pipeline = whole  # type: ignore[misc]


def bytes_read() -> int:
    """Bytes that this process has asked the system for."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def measure_weights(
    directory: Path,
    backend: str,
    num_ranks: int,
    segments: bool = False,
    quantize: str | None = None,
) -> dict[str, Any]:
    """Compile the checkpoint in this directory, without the probe, which maps all weights."""
    import specc

    before, children = peak_rss_bytes(), cpu_seconds(resource.RUSAGE_CHILDREN)
    start, cpu, read = time.perf_counter(), time.process_time(), bytes_read()
    compilation = specc.compile(
        directory / "model",
        None,
        directory / f"engine-{backend}",
        dtype="bfloat16",
        max_seq_len=1024,
        backend=backend,
        probe=False,
        tensor_parallel_size=num_ranks,
        segments=segments,
        quantize=quantize,
    )
    return {
        "backend": backend,
        "quantize": quantize,
        "num_ranks": num_ranks,
        "segments": segments,
        "bytes_read": bytes_read() - read,
        "checkpoint_bytes": sum(f.stat().st_size for f in (directory / "model").iterdir()),
        "num_layers": len(compilation.manifest.models[0].layers),
        "num_parameters": compilation.manifest.models[0].num_parameters,
        "compile_s": round(time.perf_counter() - start, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
        # processes that compiling starts
        "children_cpu_s": round(cpu_seconds(resource.RUSAGE_CHILDREN) - children, 2),
        "phases_s": {name: round(value, 2) for name, value in compilation.seconds.items()},
        "peak_rss_before_bytes": before,
        "peak_rss_bytes": peak_rss_bytes(),
        "children_peak_rss_bytes": peak_rss_bytes(resource.RUSAGE_CHILDREN),
    }


def measure_passes(directory: Path, backend: str) -> dict[str, Any]:
    """Seconds to load the engine in this directory, and of its passes of 1 and of 16 tokens."""
    import torch

    from specc.runtime.engine import Engine

    begin = time.perf_counter()
    engine = Engine.load(directory / f"engine-{backend}")
    load_s, found = time.perf_counter() - begin, {}
    for count in (1, 16):
        places = torch.arange(count)
        inputs = (
            places,
            places,
            torch.tensor([0, count], dtype=torch.int32),
            places.int(),
            torch.zeros(1, dtype=torch.int32),
            None,
            torch.arange(engine.cache.shape.blocks_per_sequence, dtype=torch.int32)[None],
            places[-1:],
        )
        seconds = []
        for _ in range(40):
            begin = time.perf_counter()
            engine.target(*inputs)
            seconds.append(time.perf_counter() - begin)
        found[str(count)] = round(statistics.median(seconds[10:]) * 1e3, 3)
    weights = directory / f"engine-{backend}" / "target" / "weights.safetensors"
    return {
        "load_s": round(load_s, 2),
        "pass_ms": found,
        "weights_file_bytes": weights.stat().st_size,
        "planned_bytes": engine.manifest.total_memory,
        "loaded_peak_rss_bytes": peak_rss_bytes(),
    }


def measure_reshard(directory: Path, backend: str, num_ranks: int) -> dict[str, Any]:
    """Make an engine of so many ranks of the one in this directory, without the probe."""
    import specc

    engine, before = directory / f"engine-{backend}", peak_rss_bytes()
    start, cpu, read = time.perf_counter(), time.process_time(), bytes_read()
    made = specc.reshard(engine, directory / f"to-{num_ranks}", num_ranks, probe=False)
    return {
        "backend": backend,
        "num_ranks": num_ranks,
        "bytes_read": bytes_read() - read,
        "engine_bytes": sum(f.stat().st_size for f in engine.rglob("*") if f.is_file()),
        "reshard_s": round(time.perf_counter() - start, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
        "phases_s": {name: round(value, 2) for name, value in made.seconds.items()},
        "peak_rss_before_bytes": before,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def write_random_checkpoint(directory: Path, shape: dict[str, int]) -> None:
    """Write a Llama checkpoint of random bfloat16 parameters, one layer a file."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig

    from specc.passes.frontend import hf_model

    config = LlamaConfig(**shape, max_position_embeddings=2048, architectures=["LlamaForCausalLM"])
    directory.mkdir(parents=True)
    config.save_pretrained(directory)
    words = {str(i): i for i in range(config.vocab_size)}
    Tokenizer(models.WordLevel(words, "0")).save(str(directory / "tokenizer.json"))
    shards: dict[str, dict[str, torch.Tensor]] = {}
    index: dict[str, str] = {}
    for name, value in hf_model.build_on_meta(config, torch.bfloat16).named_parameters():
        part = name.split(".")[2] if ".layers." in name else "rest"
        index[name] = f"model-{part}.safetensors"
        shards.setdefault(index[name], {})[name] = value
    for file, tensors in shards.items():
        random = {
            name: torch.randn(value.shape, dtype=torch.bfloat16) * 0.02
            for name, value in tensors.items()
        }
        save_file(random, directory / file)
    data = {"metadata": {}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(data))


def peak_rss_bytes(who: int = resource.RUSAGE_SELF) -> int:
    """Highest resident memory of this process, or of the largest of its children."""
    return resource.getrusage(who).ru_maxrss * 1024


def cpu_seconds(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def run_apart(*arguments: str, **environment: str) -> dict[str, Any]:
    """Run one measurement of this script in its own process."""
    command = [sys.executable, __file__, *arguments]
    result = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | environment
    )
    return json.loads(result.stdout.splitlines()[-1])


def compile_apart(
    shape: dict[str, int],
    backend: str,
    num_ranks: int = 1,
    reshard_to: Sequence[int] = (),
    quantize: str | None = None,
) -> dict[str, Any]:
    """Write a checkpoint and compile it with empty caches, then make engines of other ranks of it.

    Args:
        shape: of the model.
        backend: of the engine.
        num_ranks: that share it.
        reshard_to: ranks of each further engine; what these cost is under `reshard`.
        quantize: round its weights so, and measure passes.
    """
    with tempfile.TemporaryDirectory() as directory:
        run_apart("--write-checkpoint", directory, "--shape", json.dumps(shape))
        caches = {"SPECC_CACHE_DIR": f"{directory}/cache"}
        options = ["--backend", backend, "--ranks", str(num_ranks)]
        options += ["--quantize", quantize] if quantize else []
        made = run_apart("--weights", directory, *options, **caches)
        for other in reshard_to:
            given = ("--backend", backend, "--reshard", str(other))
            found = run_apart("--weights", directory, *given, **caches)
            made.setdefault("reshard", []).append(found)
            peak = found["peak_rss_bytes"] / _MIB
            print(f"{num_ranks} to {other}: {found['reshard_s']} s, {peak:.0f} MiB", flush=True)
        if quantize is not None:
            made |= run_apart("--passes", directory, "--backend", backend)
            print(f"{quantize}: load {made['load_s']} s, passes {made['pass_ms']} ms", flush=True)
    print(
        f"{made['checkpoint_bytes'] / 1e9:.2f} GB, {made['num_layers']} layers, {backend}:"
        f" {made['compile_s']} s, peak {made['peak_rss_bytes'] / _MIB:.0f} MiB,"
        f" children {made['children_cpu_s']} s, {made['children_peak_rss_bytes'] / _MIB:.0f} MiB",
        flush=True,
    )
    return made


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draw seconds over layers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    layers = [entry["num_layers"] for entry in results]
    axes.plot(layers, [entry["cpu_s"] for entry in results], "o-", label="processor time")
    axes.plot(layers, [entry["total_s"] for entry in results], "s:", label="wall time")
    axes.set(
        xlabel="layers (Llama 70B shapes)",
        ylabel="seconds, trace and passes",
        xlim=(0, None),
        ylim=(0, None),
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Run all measurements and write JSON and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("compile_scale.json"))
    parser.add_argument("--part", choices=PARTS, default="passes")
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--write-checkpoint", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    parser.add_argument("--segments", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quantize", help=argparse.SUPPRESS)
    parser.add_argument("--passes", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--reshard", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cut", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.layers:
        print(json.dumps(measure_trace(arguments.layers)))
        return
    if arguments.write_checkpoint:
        write_random_checkpoint(arguments.write_checkpoint / "model", arguments.shape)
        print("{}")
        return
    if arguments.reshard:
        measured = measure_reshard(arguments.weights, arguments.backend, arguments.reshard)
        print(json.dumps(measured))
        return
    if arguments.weights:
        given = (arguments.backend, arguments.ranks, arguments.segments)
        measured = measure_weights(arguments.weights, *given, arguments.quantize)
        print(json.dumps(measured))
        return
    if arguments.passes:
        print(json.dumps(measure_passes(arguments.passes, arguments.backend)))
        return
    if arguments.cut:
        print(json.dumps(measure_cut(arguments.cut)))
        return
    import torch
    import transformers

    traces: list[dict[str, Any]] = []
    results: dict[str, Any] = {}
    if arguments.part == "passes":
        for num_layers in LAYERS:
            traces.append(run_apart("--layers", str(num_layers)))
            entry = traces[-1]
            peak = entry["peak_rss_bytes"] / _MIB
            print(f"{num_layers} layers: {entry['total_s']} s, peak {peak:.0f} MiB", flush=True)
        results = {"traces": traces, "weights": compile_apart(WIDE, "eager")}
    elif arguments.part == "quantize":
        results = {"engines": [compile_apart(WIDE, "cpu", quantize="int4")]}
    elif arguments.part == "ranks":
        cut = run_apart("--cut", "8")
        print(f"70B for 8 ranks: {cut['total_s']} s, {cut['peak_rss_bytes'] / _MIB:.0f} MiB")
        results = {"cut": cut, "weights": compile_apart(WIDE, "eager", 4)}
    elif arguments.part == "reshard":
        results = {"weights": compile_apart(WIDE, "eager", 4, (2, 1))}
    else:
        layers = [compile_apart(NARROW | {"num_hidden_layers": n}, "cpu") for n in CODE_LAYERS]
        results = {"layers": layers, "weights": compile_apart(WIDE, "cpu")}
    report = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    } | results
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if traces:
        plot(traces, arguments.output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
