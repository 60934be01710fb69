"""Export a model program for sizes that never change, its operators as launches of their kernels.

Triton launches through `torch.library.wrap_triton` are nodes of the exported graph, so Inductor
compiles the kernels into the code that it generates. Grids, splits and tiles follow from shapes:
they are plain numbers of the graph, which is why no size may be dynamic.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from specc.errors import UnsupportedGraphError
from specc.passes.lower.cuda.pass_sizes import PassSizes
from specc.passes.lower.inductor.package import BoundProgram


@dataclass(frozen=True)
class CacheSizes:
    """Sizes of the caches of an engine, the same for all of its models.

    Args:
        num_blocks: of a cache.
        block_size: rows of a block.
        blocks_per_sequence: width of the block table.
    """

    num_blocks: int
    block_size: int
    blocks_per_sequence: int


def export_inlined(
    program: Mapping[str, Any],
    sizes: PassSizes,
    caches: CacheSizes,
    device: torch.device,
    inlined: Callable[[], AbstractContextManager[object]] | None = None,
) -> torch.export.ExportedProgram:
    """Export a program as launches; no weight is read, and none needs a value.

    Args:
        program: content of a `program.json` after the phases of the backend cuda.
        sizes: of the pass that the result serves.
        caches: of the engine.
        device: that the launches are for; their parameters depend on it.
        inlined: context in which launches are traced; None is for kernels that Triton compiles.
    Returns:
        of signature (inputs, caches) → logits, as `BoundProgram`; parameters are `w0`, `w1`, ….
    Raises:
        UnsupportedGraphError: an operator that no kernel stands for.
    """
    # Triton is optional where engines are compiled for any other backend
    from specc.kernels.cuda.launch import inlined as traced
    from specc.kernels.cuda.register import KERNELS

    with torch.device(device):
        module = BoundProgram(program)
        inputs = example_inputs(sizes, caches)
        kept = [
            torch.zeros(caches.num_blocks, caches.block_size, *shape, dtype=dtype)
            for shape, dtype in module.cache_shapes
        ]
    _call_launches(module.graph, KERNELS, device)
    with (inlined or traced)(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return torch.export.export(module, (inputs, kept), strict=False)


def example_inputs(sizes: PassSizes, caches: CacheSizes) -> list[Tensor | None]:
    """Zeros of the shapes of a pass, in the order of RUNTIME_INPUTS, on the current device."""
    i32, i64 = torch.int32, torch.int64
    tokens = sizes.tokens
    return [
        torch.zeros(tokens, dtype=i64),
        torch.zeros(tokens, dtype=i64),
        torch.zeros(sizes.batch + 1, dtype=i32),
        torch.zeros(tokens, dtype=i32),
        torch.zeros(sizes.batch, dtype=i32),
        torch.zeros(tokens, sizes.words, dtype=i64) if sizes.words else None,
        torch.zeros(sizes.batch, caches.blocks_per_sequence, dtype=i32),
        torch.zeros(sizes.rows, dtype=i64),
    ]


def _call_launches(
    graph: fx.GraphModule, kernels: Mapping[str, Callable[..., Any]], device: torch.device
) -> None:
    """Call the functions that launch kernels instead of the operators; tensors are of `device`."""
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if node.kwargs.get("device") is not None:
            # programs are traced without a device of their own
            node.kwargs = {**node.kwargs, "device": device}
        if getattr(node.target, "namespace", None) != "specc":
            continue
        name = node.target.overloadpacket.__name__
        if name not in kernels:
            raise UnsupportedGraphError(
                f"the program calls specc::{name}, which no kernel stands for",
                f"operators of {', '.join(sorted(kernels))}",
                "compile with --backend cuda, which runs such models operator by operator",
            )
        node.target = kernels[name]
    graph.recompile()
