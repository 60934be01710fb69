"""Write a program as the runtime reads it: inputs by kind, then the graph."""

from __future__ import annotations

from typing import Any

import torch

from specc.artifact.graph_io import graph_to_json
from specc.passes.program import RUNTIME_INPUTS, Program


def constant_key(placeholder: str) -> str:
    """Name of a constant in the engine's weight file."""
    return f"constant.{placeholder}"


def program_to_json(program: Program) -> dict[str, Any]:
    """JSON of a program; the order of inputs is that of its placeholders."""
    inputs: list[dict[str, Any]] = []
    for node in program.graph.find_nodes(op="placeholder"):
        name = node.target
        entry: dict[str, Any] = {"name": name}
        if name in program.weights:
            weight = program.weights[name]
            entry |= {"kind": "weight", "key": weight.key, "dtype": _dtype(weight.dtype)}
            entry["shape"] = list(weight.stored_shape)
            if weight.in_blocks:
                entry["blocks_of"] = list(weight.shape)
        elif name in program.constants:
            value = program.constants[name]
            entry |= {"kind": "constant", "key": constant_key(name), "dtype": _dtype(value.dtype)}
            entry["shape"] = list(value.shape)
        elif name in program.caches:
            layer, part = program.caches[name]
            value = node.meta["val"]
            entry |= {"kind": "cache", "layer": layer, "part": part}
            # the number of blocks and their size are the runtime's choice
            entry |= {"dtype": _dtype(value.dtype), "shape": [int(x) for x in value.shape[2:]]}
        else:
            assert name in RUNTIME_INPUTS, name
            entry["kind"] = "input"
        inputs.append(entry)
    return {
        # a specc that knows no blocks is to refuse the program, not to misread its weights
        "schema_version": 2 if any(w.in_blocks for w in program.weights.values()) else 1,
        "name": program.name,
        "inputs": inputs,
        "graph": graph_to_json(program.graph),
    }


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
