"""Binaries of candidates for capability 9.0, compiled without a GPU into Triton's cache."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from tests.gpu.compile_only import compile_only
from tests.gpu.sweep_tiles import ROWS, NoGraphs
from tests.gpu.tile_calls import Problem
from tests.gpu.tile_candidates import SHAPES, candidates, name_of


def compile_part(part: str, output: Path) -> int:
    """Compile every so many-th candidate, launched both ways, and say what each takes."""
    number, count = (int(text) for text in part.split("/"))
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
    with compile_only() as kernels:
        for shape, rows, item in calls:
            name = name_of(item) if item else ""
            if (shape.operator, name) in own:
                weight = weights[: shape.n * shape.k].view(shape.n, shape.k)
                problem = Problem(shape, rows, torch.device("meta"))
                found |= _compile(f"{shape.operator} {name}", problem, item, weight, kernels)
    output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _compile(
    name: str, problem: Problem, item: Any, weight: Any, kernels: list[Any]
) -> dict[str, dict[str, Any]]:
    """Launched both ways; what it takes, under its name, or the error. The library's says none."""
    from specc.kernels.cuda.launch import dependent_launches

    found: dict[str, dict[str, Any]] = {}
    for is_dependent in (False, True):
        kernels.clear()
        try:
            with dependent_launches(is_dependent):
                problem.call(item, weight)
        except Exception as error:
            found[name] = {"error": f"{error}"[-300:]}
            continue
        if item:
            found[name] = _resources(kernels[-1])
    return found


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
