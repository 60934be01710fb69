"""Compile the shipped configurations of all Triton kernels without a GPU, and say what they use.

    python -P tests/kernels/cuda/aot.py --capabilities 90 --output usage.json [--only attend]

A process of its own, without TRITON_INTERPRET. Triton compiles a kernel that asks for more shared
memory than a device has, and one that spills: only the numbers tell.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# files of specc/kernels/cuda with a function `shipped`
MODULES = (
    *("act_and_mul", "accept_greedy", "attend", "commit_kv", "merge", "rms_norm", "rope_write"),
    *("rows", "sampling", "tree_expand", "write_kv"),
)
# bytes of shared memory that a block may ask for, by compute capability (CUDA programming guide,
# technical specifications per compute capability)
MAX_SHARED = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}
_TENSOR_CORES = re.compile(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)")


def usage(module: str, capability: int, index: int) -> dict[str, Any]:
    """What one configuration uses: registers a thread, bytes of stack and shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget

    shipped = list(importlib.import_module(f"specc.kernels.cuda.{module}").shipped(capability))
    item = shipped[index]
    begin = time.perf_counter()
    compiled = triton.compile(
        item.source(), target=GPUTarget("cuda", capability, 32), options=item.options
    )
    seconds = time.perf_counter() - begin
    found = {"module": module, "name": item.name, "capability": capability}
    found |= _resources(compiled.asm["cubin"])
    found["shared"] = compiled.metadata.shared
    found["tensor_core_instructions"] = len(_TENSOR_CORES.findall(compiled.asm["ptx"]))
    return found | {"seconds": round(seconds, 2)}


def _resources(cubin: bytes) -> dict[str, int]:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {
        "registers": max(int(n) for n in re.findall(r"REG:(\d+)", text)),
        "stack": max(int(n) for n in re.findall(r"STACK:(\d+)", text)),
    }


def count(module: str, capability: int) -> int:
    return len(list(importlib.import_module(f"specc.kernels.cuda.{module}").shipped(capability)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--capabilities", type=int, nargs="+", default=[80, 90, 100, 120])
    parser.add_argument("--only", nargs="+", default=MODULES, choices=MODULES)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    assert "TRITON_INTERPRET" not in os.environ, "the interpreter compiles nothing"
    # a warm cache would hide what no longer compiles
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="specc-aot-")
    import torch
    import triton

    work = [
        (module, capability, index)
        for module in options.only
        for capability in options.capabilities
        for index in range(count(module, capability))
    ]
    with concurrent.futures.ProcessPoolExecutor(options.workers) as pool:
        found = []
        for item in pool.map(usage, *zip(*work, strict=True)):
            found.append(item)
            print(json.dumps(item), file=sys.stderr, flush=True)
    report = {"triton": triton.__version__, "torch": torch.__version__, "kernels": found}
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
