"""A program as JSON: what an engine directory holds of it."""

from __future__ import annotations

from typing import Any

import torch

from specc.artifact.graph_io import store_graph
from specc.passes.program import (
    FEATURES,
    HANDED_ON,
    HIDDEN,
    MASS,
    RUNTIME_INPUTS,
    STATES,
    Program,
    Weight,
    constant_key,
)


def program_to_json(program: Program) -> dict[str, Any]:
    """JSON of a program; the order of inputs is that of its placeholders."""
    inputs: list[dict[str, Any]] = []
    for node in program.graph.find_nodes(op="placeholder"):
        name = node.target
        entry: dict[str, Any] = {"name": name}
        if name in program.weights:
            weight = program.weights[name]
            entry |= {"kind": "weight", "key": weight.key, "dtype": _dtype(weight.stored_dtype)}
            entry["shape"] = list(weight.stored_shape)
            if weight.quantized is not None:
                entry |= {"layout": weight.layout, "quantized_of": list(weight.shape)}
                if (order := _order_key(program, weight)) is not None:
                    entry["columns"] = order
            if weight.in_blocks:
                entry["blocks_of"] = list(weight.shape)
            if weight.is_turned:
                entry["is_turned"] = True
            if name in program.of_target:
                entry["of_target"] = program.of_target[name]
                entry |= {"is_lent": True} if program.is_lent else {}
        elif name in program.constants:
            value = program.constants[name]
            key = program.constant_keys.get(name, constant_key(name))
            entry |= {"kind": "constant", "key": key, "dtype": _dtype(value.dtype)}
            entry["shape"] = list(value.shape)
        elif name in program.caches:
            layer, part = program.caches[name]
            value = node.meta["val"]
            entry |= {"kind": "cache", "layer": layer, "part": part}
            # the number of blocks and their size are the runtime's choice
            entry |= {"dtype": _dtype(value.dtype), "shape": [int(x) for x in value.shape[2:]]}
        elif name in program.states:
            layer, part = program.states[name]
            entry |= {"kind": "state", "layer": layer, "part": part}
            # how many there are, and replay rows of each, are the runtime's choice
            value = node.meta["val"]
            sizes = [int(x) for x in value.shape[1 if part == "state" else 2 :]]
            entry |= {"dtype": _dtype(value.dtype), "shape": sizes}
        elif name in program.target_caches:
            layer, part = program.target_caches[name]
            # after the slabs of features
            first = len(program.caches) // 2 + (program.feature_width > 0) + 1
            place = first + program.attended_layers.index(layer)
            value = node.meta["val"]
            entry |= {"kind": "cache", "layer": place, "part": part, "target_layer": layer}
            entry |= {"dtype": _dtype(value.dtype), "shape": [int(x) for x in value.shape[2:]]}
        elif program.reads_features and name in (HANDED_ON, FEATURES):
            value = node.meta["val"]
            # the target's slab is the last but for its layers
            place = len(program.caches) // 2 + (name == FEATURES and program.feature_width > 0)
            entry |= {"kind": "cache", "layer": place, "part": "rows"}
            entry |= {"dtype": _dtype(value.dtype), "shape": [int(value.shape[2])]}
        elif name == FEATURES:
            assert program.taps is not None
            # paged as the caches of the layers are, after which it has its number
            value = node.meta["val"]
            entry |= {"kind": "cache", "layer": len(program.caches) // 2, "part": "rows"}
            entry |= {"dtype": _dtype(value.dtype), "shape": [program.feature_width]}
            entry["boundaries"] = list(program.taps.boundaries)
            entry["is_last_normed"] = program.taps.is_last_normed
        else:
            assert name in (*RUNTIME_INPUTS, STATES, MASS, HIDDEN, *program.row_inputs), name
            entry["kind"] = "input"
            if name == HIDDEN or name in program.row_inputs:
                value = node.meta["val"]
                entry["dtype"] = _dtype(value.dtype)
                # the number of tokens is the runtime's choice
                entry["shape"] = [n if isinstance(n, int) else None for n in value.shape]
        inputs.append(entry)
    layouts = {weight.layout for weight in program.weights.values()}
    return {
        # a specc that does not know these is to refuse the program, not to misread its weights
        "schema_version": 3 if layouts - {"rows", "blocks"} else 2 if "blocks" in layouts else 1,
        "name": program.name,
        "inputs": inputs,
        "graph": store_graph(program.graph),
    }


def _order_key(program: Program, weight: Weight) -> str | None:
    """Key of the constant that says in which order a quantized weight has its columns, if any."""
    # as `quantized_inputs.kept_of`: parts that have not all the same were rounded anew, in their
    # own order
    found = {program.integers.get(name) for name in weight.parameters}
    kept = found.pop() if len(found) == 1 else None
    if kept is None or kept.layout != weight.quantized or (columns := kept.columns) is None:
        return None
    keys = (
        program.constant_keys.get(name, constant_key(name))
        for name, value in program.constants.items()
        if value.dtype == columns.dtype and torch.equal(value, columns)
    )
    return next(keys, None)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
