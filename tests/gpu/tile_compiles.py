"""Binaries of candidates for capability 9.0, compiled without a GPU into Triton's cache."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from tests.gpu.sweep_tiles import ROWS, NoGraphs
from tests.gpu.tile_calls import Problem
from tests.gpu.tile_candidates import SHAPES, candidates, name_of


class _Driver:
    """What compiles for a device that is not there; it launches nothing."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_part(part: str, output: Path) -> int:
    """Compile every so many-th candidate, launched both ways, and say what each takes."""
    from triton import runtime
    from triton.runtime.jit import JITFunction

    from specc.kernels.cuda.launch import dependent_launches

    number, count = (int(text) for text in part.split("/"))
    runtime.driver.set_active(_Driver())
    run, kernels = JITFunction.run, []

    def warm_up(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        kernels.append(run(kernel, *args, grid=grid, warmup=True, **options))

    JITFunction.run = warm_up
    weights = NoGraphs().weights()
    found: dict[str, Any] = {}
    calls = [
        (shape, rows, item)
        for shape in SHAPES
        for rows in ROWS
        for item in (None, *candidates(shape, rows))
    ]
    # alike of other shapes and rows are one binary, so that neighbours go to one process
    calls.sort(key=lambda call: (call[0].operator, name_of(call[2]) if call[2] else ""))
    names = sorted({(shape.operator, name_of(item) if item else "") for shape, _, item in calls})
    own = set(names[number::count])
    for shape, rows, item in calls:
        name = name_of(item) if item else ""
        if (shape.operator, name) not in own:
            continue
        weight = weights[: shape.n * shape.k].view(shape.n, shape.k)
        problem = Problem(shape, rows, torch.device("meta"))
        for is_dependent in (False, True):
            kernels.clear()
            try:
                with dependent_launches(is_dependent):
                    problem.call(item, weight)
            except Exception as error:
                found[f"{shape.operator} {name}"] = {"error": f"{error}"[-300:]}
                continue
            if item:
                found[f"{shape.operator} {name}"] = _resources(kernels[-1])
    output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _resources(kernel: Any) -> dict[str, Any]:
    """Registers, bytes of the stack that spills take, and of shared memory; and its folder."""
    import triton

    file = Path(kernel.metadata_group[f"{kernel.metadata.name}.cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    output = subprocess.run(
        [tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True
    ).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", output)[0]
    found = {"registers": int(registers), "stack": int(stack)}
    return found | {"shared": kernel.metadata.shared, "folder": file.parent.name}
