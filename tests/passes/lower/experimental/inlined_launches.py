"""Print what Inductor gets of a small model whose operators are launches of compiled kernels.

    python -P tests/passes/lower/experimental/inlined_launches.py llama

A process without TRITON_INTERPRET. The first line is JSON of the exported launches, the second of
the calls in the last graph before Inductor generates code: what it launches, and what it copies.
Which tensors a kernel writes, torch reads from Triton's intermediate code for sm_90; that needs no
GPU, only a driver that says which one it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch
import torch._inductor.compile_fx
import triton
from torch import fx
from triton.backends.compiler import GPUTarget

from specc.passes.lower.experimental.aot_inductor import inductor_options
from tests.passes.lower.experimental.inlined import (
    FUNCTIONAL,
    MUTATION,
    describe,
    export_for,
    kernel_name,
)

COPIES = ("clone", "copy_", "copy", "_to_copy", "clone_preserve_strides")


class Hopper:
    """A driver of a GPU that is not there; compiling up to Triton's own code asks for no more."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Reached(BaseException):
    """Inductor begins to generate code."""


def last_graph(exported: torch.export.ExportedProgram) -> fx.Graph:
    """The graph that Inductor generates code from, all of its passes done."""
    found: list[fx.Graph] = []

    def stop(module: fx.GraphModule, *args: Any, **options: Any) -> None:
        found.append(module.graph)
        raise Reached

    before = torch._inductor.compile_fx.GraphLowering
    torch._inductor.compile_fx.GraphLowering = stop
    try:
        with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(Reached):
            torch._inductor.aoti_compile_and_package(
                exported, package_path=f"{scratch}/x.pt2", inductor_configs=inductor_options()
            )
    finally:
        torch._inductor.compile_fx.GraphLowering = before
    (graph,) = found
    return graph


def call(node: fx.Node) -> list[Any] | None:
    """A launch as [kernel], a copy as [operator, shape, whether it is onto itself]."""
    if node.target in (FUNCTIONAL, MUTATION):
        return [kernel_name(node), *(["functional"] if node.target is FUNCTIONAL else [])]
    name = getattr(getattr(node.target, "overloadpacket", node.target), "__name__", "")
    if name in COPIES:
        return [name, list(node.args[0].meta["val"].shape), len(set(node.args[:2])) == 1]
    return None


def main() -> None:
    assert "TRITON_INTERPRET" not in os.environ, "the interpreter has kernels of another kind"
    triton.runtime.driver.set_active(Hopper())
    from tests.models import VOCAB
    from tests.passes.lower.experimental.test_inline_kernels import CACHE, lowered, wide
    from tests.passes.modules import several_passes

    program, _ = lowered(sys.argv[1])
    inputs = wide(several_passes(VOCAB)[1])
    exported = export_for(program, inputs, torch.empty(CACHE), None)
    print(json.dumps(describe(exported)))
    print(json.dumps([x for node in last_graph(exported).nodes if (x := call(node))]))


if __name__ == "__main__":
    main()
