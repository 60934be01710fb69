"""Launches as nodes of a graph where Triton interprets its kernels, and programs exported so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops import triton_kernel_wrap
from torch.fx.node import base_types

from specc.kernels.cuda.launch import inlined
from specc.passes.lower.cuda.pass_sizes import PassSizes
from specc.passes.lower.experimental.inline_kernels import CacheSizes, export_inlined
from specc.passes.program import Program
from specc.passes.program_json import program_to_json

TABLE = triton_kernel_wrap.kernel_side_table
MUTATION = triton_kernel_wrap.triton_kernel_wrapper_mutation
FUNCTIONAL = triton_kernel_wrap.triton_kernel_wrapper_functional
CPU = torch.device("cpu")


class InterpretedLaunch:
    """What `wrap_triton` makes of a compiled kernel, for one that is interpreted.

    `wrap_triton` itself would run such a kernel at once, on tensors without data. The node is the
    same; run, it launches the interpreted kernel.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, (*grid, 1, 1)[:3])

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        values = dict(zip(self._kernel.arg_names, args, strict=False)) | options
        in_graph = {k: v for k, v in values.items() if isinstance(v, base_types)}
        others = {k: v for k, v in values.items() if k not in in_graph}
        MUTATION(
            kernel_idx=TABLE.add_kernel(self._kernel),
            constant_args_idx=TABLE.add_constant_args(others),
            grid=[grid],
            tma_descriptor_metadata={},
            kwargs=in_graph,
        )


def interpreted() -> Any:
    return inlined(InterpretedLaunch)


def export_for(
    program: Program, inputs: dict[str, Tensor | None], cache: Tensor, context: Any = interpreted
) -> torch.export.ExportedProgram:
    """Export a program for the sizes of these inputs and of a cache [blocks, block_size, …]."""
    words = inputs["ancestors"]
    sizes = PassSizes(
        tokens=len(inputs["tokens"]),
        rows=len(inputs["logit_rows"]),
        batch=len(inputs["cache_len"]),
        words=0 if words is None else words.shape[1],
    )
    table = inputs["block_table"].shape[1]
    caches = CacheSizes(cache.shape[0], cache.shape[1], table)
    return export_inlined(program_to_json(program), sizes, caches, CPU, context)


def launches_of(exported: torch.export.ExportedProgram) -> list[fx.Node]:
    """Nodes that launch a kernel, in order."""
    return [node for node in exported.graph.nodes if node.target in (MUTATION, FUNCTIONAL)]


def kernel_name(node: fx.Node) -> str:
    """Name of the kernel that a node launches, without its options."""
    kernel = TABLE.get_kernel(node.kwargs["kernel_idx"])
    while hasattr(kernel.fn, "fn"):  # wrap_triton puts options around it
        kernel = kernel.fn
    return kernel.fn.__name__


def describe(exported: torch.export.ExportedProgram) -> list[dict[str, Any]]:
    """What a graph launches, as JSON: kernels, grids, numbers and which tensors they get."""
    result = []
    for node in launches_of(exported):
        kernel = TABLE.get_kernel(node.kwargs["kernel_idx"])
        absent = TABLE.get_constant_args(node.kwargs["constant_args_idx"])
        values = dict(node.kwargs["kwargs"])
        for config in getattr(kernel, "configs", ()):  # wrap_triton keeps these options apart
            values |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
        tensors = {k: v.meta["val"] for k, v in values.items() if isinstance(v, fx.Node)}
        result.append(
            {
                "kernel": kernel_name(node),
                "grid": [list(grid) for grid in node.kwargs["grid"]],
                "numbers": {"num_stages": 3, "num_warps": 4}
                | {k: v for k, v in values.items() if k not in tensors},
                "tensors": {k: [str(v.dtype), *v.shape] for k, v in tensors.items()},
                "absent": sorted(absent),
            }
        )
    return result
