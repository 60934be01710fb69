"""Instructions of kernels as compiled for a capability: in SASS, without a GPU.

    python -m tests.measure.instructions linear_q_fragments --only m8-n32
    python -m tests.measure.instructions rope_write --only bf16-d128 --rows int8

A line for each configuration: instructions of the kernel, barriers among them, and where it
multiplies on tensor cores, of the loop with the most such products: its instructions, and those for
each weight of a thread. An `mma.m16n8k16` has 8 weights of a thread, and a tile of BM rows takes
BM / 8 of them for the same weights.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from tests.kernels.cuda import aot

_LABEL, _INSTRUCTION = re.compile(r"\s*(\.L_x_\d+):"), re.compile(r"\s*/\*[0-9a-f]+\*/\s+(.*?);")
_BRANCH = re.compile(r"BRA\b.*?`\((\.L_x_\d+)\)")
_WEIGHTS, _COLUMNS = 8, 8  # of a thread in a product, and of rows in its instruction


def sass(item: Any, capability: int) -> str:
    """A configuration as the GPU runs it."""
    import triton
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(item.source(), target=target, options=item.options)
    tool = Path(nvidia.__file__).with_name("bin") / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True)
    return done.stdout


def instructions_of(text: str) -> tuple[list[str], list[list[str]]]:
    """All instructions, and those of each loop."""
    found, loops, labels = [], [], {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif (instruction := _INSTRUCTION.match(line)) and instruction[1] != "NOP":
            found.append(instruction[1])
            branch = _BRANCH.search(instruction[1])
            if branch and branch[1] in labels:
                loops.append(found[labels[branch[1]] :])
    return found, loops


def report(item: Any, text: str) -> str:
    found, loops = instructions_of(text)
    barriers = sum(line.split()[0].startswith("BAR.SYNC") for line in found if line)
    line = f"{item.name}: {len(found)} instructions, {barriers} barriers"
    products, loop = max(
        ((sum("HMMA" in x for x in loop), loop) for loop in loops),
        default=(0, []),
        key=lambda x: x[0],
    )
    if products:
        weights = products * _WEIGHTS / max(1, item.constexprs.get("BM", _COLUMNS) // _COLUMNS)
        line += f"; loop {len(loop)}, {len(loop) / weights:.3f} a weight"
    return line


def main(
    module: Annotated[str, typer.Argument(help="file of specc/kernels/cuda")],
    capability: int = 90,
    only: Annotated[str, typer.Option(help="pattern of names of configurations")] = "",
    rows: Annotated[str, typer.Option(help="what caches hold: int8 or fp8")] = "",
) -> None:
    """Compile configurations of a file, and count."""
    with tempfile.TemporaryDirectory(prefix="specc-instructions-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for item in aot.items(module, capability, 0, (), rows):
            if re.search(only, item.name) and not item.is_dependent:
                print(report(item, sass(item, capability)), flush=True)


if __name__ == "__main__":
    typer.run(main)
