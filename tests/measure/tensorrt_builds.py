"""Build TensorRT engines for several GPUs on a machine without one, and list what came out.

    python tests/measure/tensorrt_builds.py --output out/tensorrt_builds.json

Configurations only: weights are random, the emitter and the builder are specc's own. The shape
`llama-8b-4-layers` is Llama 3 8B with 4 of its 32 layers; a plan holds the weights. Every model and
dtype has a process of its own, so that memory peaks do not mix. Needs TensorRT-RTX, 12 GiB of
memory and 10 GiB in the temporary directory. --models measures some; others keep the entries
that the file has.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CAPABILITIES = ("8.0", "8.9", "12.0")
DTYPES = ("float16", "bfloat16")
LARGE = "llama-8b-4-layers"
MAX_SEQ_LEN, MAX_NODES = 512, 64
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "vocab_size": 128,
}
_GEMMA = {
    "num_hidden_layers": 3,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _TINY),
    "qwen3": ("Qwen3Config", _TINY | {"head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", _TINY | {"head_dim": 16} | _GEMMA),
    "mistral": ("MistralConfig", _TINY | {"sliding_window": 16}),
    LARGE: (
        "LlamaConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "vocab_size": 128256,
        },
    ),
}
# (smallest, tuned for, largest) of sequences, nodes of each, rows of logits
PROFILES = {
    "prefill": ((1, 1, 1), (1, 64, 64), (1, 1, 1)),
    "decode": ((1, 1, 8), (1, 1, 1), (1, 1, 8)),
    "tree 3,2,1": ((1, 1, 8), (16, 16, 16), (1, 16, 128)),
    "draft level": ((1, 1, 8), (2, 4, 8), (1, 4, 64)),
}


def emit(name: str, dtype: str, directory: Path) -> dict[str, Any]:
    """Write `model.onnx` and random weights."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from specc.artifact.cache_rows import CacheRows
    from specc.passes.frontend import hf_model
    from specc.passes.frontend.trace import trace
    from specc.passes.lower.onnx.lower import lower_onnx
    from specc.passes.pipeline import Pipeline
    from specc.passes.rewrite.padded import padded_program

    kind, fields = MODELS[name]
    start = time.perf_counter()
    config = getattr(transformers, kind)(**fields)
    module = hf_model.build_on_meta(config, getattr(torch, dtype))
    flat = trace(module, "target")
    Pipeline().run(flat)
    rows = CacheRows.of(MAX_SEQ_LEN, MAX_NODES, 1).total
    program, _ = padded_program(module, flat, rows)
    traced = time.perf_counter() - start
    torch.manual_seed(0)
    weights = {
        weight.key: torch.empty(weight.shape, dtype=getattr(torch, dtype)).normal_(std=0.02)
        for weight in flat.weights.values()
    }
    save_file(weights, directory / "weights.safetensors")
    num_bytes = sum(x.numel() * x.element_size() for x in weights.values())
    del weights
    start = time.perf_counter()
    lower_onnx(program, directory / "model.onnx", directory / "weights.safetensors")
    return {
        "num_parameters": flat.num_parameters,
        "weights_bytes": num_bytes,
        "cache_rows": rows,
        "trace_s": round(traced, 2),
        "onnx_s": round(time.perf_counter() - start, 2),
    }


def build(directory: Path, capability: str) -> dict[str, Any]:
    """Build for one GPU; the plan is not kept."""
    from specc.passes.lower.tensorrt.builder import BuildOptions
    from specc.passes.lower.tensorrt.lower import build_engine
    from specc.passes.lower.tensorrt.shape_profile import ShapeProfile

    plan = directory / "engine.plan"
    profiles = [ShapeProfile(name, *ranges) for name, ranges in PROFILES.items()]
    report = build_engine(directory / "model.onnx", plan, profiles, BuildOptions(capability))
    plan.unlink()
    attentions = report.layers.attentions
    return {
        "compute_capability": capability,
        "lane": report.lane,
        "fallback": report.fallback,
        "layers": {
            " = ".join(profile["names"]): report.layers.count(i)
            for i, profile in enumerate(report.profiles)
        },
        "attentions": len(attentions),
        "fused_attentions": sum(attention.is_fused for attention in attentions),
        "cache_reads": sum(len(attention.cache_reads) for attention in attentions),
        "reads_lengths": report.reads_lengths,
        "engine_bytes": report.num_bytes,
        "engine_weights_bytes": report.weights_bytes,
        "activation_bytes": report.activation_bytes,
        "build_s": round(report.seconds, 2),
        "warnings": list(report.warnings),
    }


def measure(name: str, dtype: str) -> dict[str, Any]:
    """Emit once, build for every GPU."""
    with tempfile.TemporaryDirectory(prefix="specc-tensorrt-") as folder:
        directory = Path(folder)
        emitted = emit(name, dtype, directory)
        builds = [build(directory, capability) for capability in CAPABILITIES]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"model": name, "dtype": dtype, **emitted, "builds": builds, "peak_rss_bytes": peak}


def in_process(name: str, dtype: str) -> dict[str, Any]:
    """`measure` in a process of its own; what libraries print is not the result."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--output", file.name]
        subprocess.run([*command, "--one", name, dtype], check=True, stdout=subprocess.DEVNULL)
        return json.loads(Path(file.name).read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        result = measure(*arguments.one)
        arguments.output.write_text(json.dumps(result), encoding="utf-8")
        return
    from specc.system.machine import describe_machine
    from specc.tensorrt import library as trt

    kept = []
    if arguments.output.is_file():
        kept = json.loads(arguments.output.read_text(encoding="utf-8"))["results"]
    results = [entry for entry in kept if entry["model"] not in arguments.models]
    for name in arguments.models:
        for dtype in DTYPES:
            results.append(in_process(name, dtype))
            for entry in results[-1]["builds"]:
                print(
                    f"{name:18} {dtype:9} {entry['compute_capability']:>4}  {entry['lane']:8} "
                    f"layers {'/'.join(str(n) for n in entry['layers'].values()):12} "
                    f"fused {entry['fused_attentions']}/{entry['attentions']}  "
                    f"{entry['engine_bytes'] / 1e6:8.1f} MB  {entry['build_s']:6.1f} s",
                    flush=True,
                )
    results.sort(key=lambda entry: list(MODELS).index(entry["model"]))
    report = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python tests/measure/tensorrt_builds.py --output "
        + f"out/{arguments.output.name}",
        "tensorrt": trt.facts().title,
        "python": platform.python_version(),
        "machine": describe_machine(),
        "gpu": None,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "max_seq_len": MAX_SEQ_LEN,
        "profiles": PROFILES,
        "results": results,
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
