"""Traces of models that are alike, and their ONNX files: made once, in seconds each.

Traces are kept on disk, too (tests/kept.py), for other workers and later runs; ONNX files are made
once in a process. Only models of transformers are known by what they are made of; of others every
trace is new.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import _graph_pickler
from torch.fx._graph_pickler import GraphPickler
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from specc.artifact.graph_io import graph_to_json
from specc.compiler import compiled_model
from specc.passes.frontend.trace import trace
from specc.passes.frontend.trace_padded import trace_padded
from specc.passes.lower.onnx import lower
from specc.passes.lower.onnx.lower import OnnxFile, lower_onnx
from specc.passes.lower.onnx.quantized import Products
from specc.passes.program import Program, RowInput
from specc.passes.rewrite import padded
from tests.kept import keep_bytes

Trace = Callable[[nn.Module, str, int | None], Program]

_LIBRARIES = ("transformers.", "torch.nn.")
# where a model came from, which a trace does not read
_ORIGINS = ("_name_or_path", "name_or_path")
# of this repository, all that `trace` and `trace_padded` import (tests/test_traces.py)
SOURCES = (
    "kernels/operator.py",
    "kernels/operators",
    "kernels/ops.py",
    "kernels/reference",
    "passes/frontend",
    "passes/program.py",
    "passes/values.py",
    "specc/artifact",
    "specc/bounds.py",
    "specc/close_name.py",
    "specc/drafters",
    "specc/errors.py",
    "specc/sampling",
    "specc/sharding",
    "specc/speculation",
    "specc/system",
    "tests/traces.py",
)
_known: dict[Hashable, Program] = {}
_written: dict[Hashable, tuple[bytes, OnnxFile]] = {}


def trace_once(
    model: nn.Module,
    name: str,
    rope_length: int | None = None,
    how: Trace = trace,
    rows: Sequence[RowInput] = (),
    hands_on: bool = False,
) -> Program:
    """What `how` makes of a model, for the caller to change."""
    if rows:
        # of a head, which is small
        return trace(model, name, rope_length, rows, hands_on)
    key = fingerprint(model)
    if key is None:
        return how(model, name, rope_length)
    if (how, rope_length, key) not in _known:
        make = functools.partial(how, model, name, rope_length)
        _known[how, rope_length, key] = _kept(make, how, rope_length, key)
    known = _known[how, rope_length, key]
    return Program(
        name,
        copy.deepcopy(known.graph_module),
        dict(known.weights),
        {key: value.clone() for key, value in known.constants.items()},
        runtime_inputs=known.runtime_inputs,
    )


def _kept(make: Callable[[], Program], *key: Hashable) -> Program:
    """A new trace, or the one that was kept of the same, in this run or an earlier one."""
    described = stable_repr(key)
    if described is None:
        return make()
    return unpack(keep_bytes(lambda: pack(make()), described, sources=SOURCES))


def pack(program: Program) -> bytes:
    """A trace as bytes: graph, fake values with their symbols, weights and constants."""
    mode = next(
        node.meta["val"].fake_mode
        for node in program.graph.find_nodes(op="placeholder")
        if isinstance(node.meta["val"], Tensor)
    )
    switches = {key: value for key, value in vars(mode).items() if type(value) is bool}
    parts = program.name, program.graph_module, program.weights, program.constants
    # with the modules that nodes come from, which errors name
    options = _graph_pickler.Options(ops_filter=None, node_metadata_key_filter=None)
    return GraphPickler.dumps((*parts, program.runtime_inputs, switches), options)


def unpack(data: bytes) -> Program:
    """The trace that `pack` was given, whose values have a mode and symbols of their own."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    found: Any = GraphPickler.loads(data, mode)
    name, graph_module, weights, constants, runtime_inputs, switches = found
    vars(mode).update(switches)
    return Program(name, graph_module, weights, constants, runtime_inputs=runtime_inputs)


def stable_repr(key: Hashable) -> str | None:
    """What `repr` says, with names for classes and functions: the same in every process.

    None: a part has no such name.
    """
    if isinstance(key, tuple):
        parts = [stable_repr(part) for part in key]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if isinstance(key, type | types.FunctionType | types.BuiltinFunctionType):
        found = sys.modules.get(key.__module__ or "")
        for name in key.__qualname__.split("."):
            found = inspect.getattr_static(found, name, None)
        return f"{key.__module__}.{key.__qualname__}" if found is key else None
    text = repr(key)
    return None if " at 0x" in text else text


def write_once(
    program: Program, path: Path, weights: Path, products: Products = "float32"
) -> OnnxFile:
    """What `lower_onnx` writes: a model's name, and places of its weights, but no weight."""
    if any(weight.quantized is not None for weight in program.weights.values()):
        # levels are written beside the file, from the weights
        return lower_onnx(program, path, weights, products)
    with weights.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    constants = [(key, _bytes_of(value)) for key, value in program.constants.items()]
    described = repr((program.weights, program.caches, program.layers, program.runtime_inputs))
    key = json.dumps(graph_to_json(program.graph)), described, header, weights.name, *constants
    if key not in _written:
        made = lower_onnx(program, path, weights)
        _written[key] = path.read_bytes(), made
        return made
    # not on every machine that reads this file: tests/gpu/output.py
    import onnx

    data, made = _written[key]
    model = onnx.ModelProto.FromString(data)
    model.graph.name = program.name
    path.write_bytes(model.SerializeToString())
    return made


@contextlib.contextmanager
def shared_traces() -> Iterator[None]:
    """Let the compiler trace models that are alike once, and write their ONNX files once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_model, "trace", trace_once)
        once = functools.partial(trace_once, how=trace_padded)
        patch.setattr(padded, "trace_padded", once)
        patch.setattr(lower, "lower_onnx", write_once)
        yield


def fingerprint(model: nn.Module) -> Hashable | None:
    """All of a model that a trace can see, but for the values of its parameters.

    None is a model with parts that are neither of transformers nor of torch, or that were changed.
    """
    modules: list[Hashable] = []
    for path, module in model.named_modules():
        kind, hooks = type(module), (module._forward_hooks, module._forward_pre_hooks)
        if not kind.__module__.startswith(_LIBRARIES) or "forward" in vars(module) or any(hooks):
            return None
        modules.append((path, kind, module.training, _attributes(module)))
    parameters = list(model.named_parameters(remove_duplicate=False))
    first = {id(parameter): key for key, parameter in reversed(parameters)}
    kinds = [(key, first[id(parameter)], *_kind_of(parameter)) for key, parameter in parameters]
    buffers = [
        (key, *_kind_of(buffer), None if buffer.is_meta else _bytes_of(buffer))
        for key, buffer in model.named_buffers(remove_duplicate=False)
    ]
    config: Any = getattr(model, "config", None)
    fields = {} if config is None else vars(config)
    described = repr({key: fields[key] for key in sorted(fields) if key not in _ORIGINS})
    return tuple(modules), tuple(kinds), tuple(buffers), described


def _kind_of(value: Tensor) -> tuple[Hashable, ...]:
    return value.dtype, value.device, tuple(value.shape), value.stride()


def _bytes_of(value: Tensor) -> bytes:
    return value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _attributes(module: nn.Module) -> tuple[Hashable, ...]:
    """Numbers, names, lists and functions that a module computes with."""
    kinds = (bool, int, float, str, list, tuple, torch.dtype, type(None))
    return tuple(
        # two partial functions never equal each other
        (
            key,
            value if callable(value) and not isinstance(value, functools.partial) else repr(value),
        )
        for key, value in sorted(vars(module).items())
        if key not in _ORIGINS and (isinstance(value, kinds) or callable(value))
    )
