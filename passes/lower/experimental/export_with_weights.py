"""Export a padded program with its weights inside: what compilers of whole models take."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from specc.artifact.safetensors_io import SafetensorsReader
from specc.errors import UnsupportedGraphError, WeightError
from specc.kernels import ops
from specc.kernels.reference.fused import rms_norm_reference
from specc.passes.program import Program, bind_args

# sizes of the example inputs: distinct, and none of them 0 or 1, which torch would specialize
_SIZES = {"batch": 3, "nodes": 8, "rows": 6}
_MOST = {"batch": 4096, "nodes": 1 << 20, "rows": 1 << 20}
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
# operators of specc that stay, and those that become operators of aten
KEPT = (ops.cache_write, ops.masked_attention)
_DECOMPOSED = {ops.rms_norm: rms_norm_reference}


def export_with_weights(program: Program, weights: Mapping[str, Tensor]) -> ExportedProgram:
    """Export the graph anew; inputs are the runtime's and the caches, outputs logits and caches.

    Args:
        program: padded, after its last phase; not changed.
        weights: key of each weight → tensor; not copied.
    Returns:
        the program: of specc's operators it has `KEPT` alone. A view names every size that is
        known, since readers that see -1 take it for unknown.
    Raises:
        WeightError: a weight is not there.
        UnsupportedGraphError: an operator that no reader knows.
    """
    _check_operators(program)
    holder, graph = nn.Module(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    names: dict[str, str] = {}
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        value = _held(program, node, weights) if node.op == "placeholder" else None
        if value is None:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            _name_sizes(copies[node], node)
        else:
            # tied weights are one tensor
            key = program.weights[node.target].key if node.target in program.weights else ""
            name = names.setdefault(key or node.target, f"held_{len(names)}")
            holder.register_buffer(name, value)
            copies[node] = graph.get_attr(name)
            copies[node].meta = dict(node.meta)
    (output,) = program.graph.find_nodes(op="output")
    written = {node.args[0].target: node for node in program.calls(ops.cache_write)}
    results = [output.args[0], *(written[name] for name in program.caches)]
    graph.output(tuple(copies[node] for node in results))
    module = fx.GraphModule(holder, graph)

    sizes = input_sizes(program)
    dims = {name: Dim(name, min=1, max=most) for name, most in _MOST.items()}
    inputs, dynamic = [], []
    # nothing is computed: caches of the example batch need no memory
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        for name, shape in sizes.items():
            dtype = program.placeholder(name).meta["val"].dtype
            example = [_SIZES[size] if isinstance(size, str) else size for size in shape]
            inputs.append(torch.empty(example, dtype=dtype))
            dynamic.append({i: dims[x] for i, x in enumerate(shape) if isinstance(x, str)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(
            module,
            tuple(inputs),
            dynamic_shapes=tuple(dynamic),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
        return exported.run_decompositions(dict(_DECOMPOSED))


def read_weights(program: Program, path: Path) -> dict[str, Tensor]:
    """Weights of a program from the engine's file, mapped into memory: key → tensor.

    Raises:
        WeightError: the file cannot be read, or lacks one.
    """
    weights = {}
    with SafetensorsReader(path) as reader:
        size = path.stat().st_size
        data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        for weight in program.weights.values():
            begin, length = reader.place(weight.key)
            part = data[begin : begin + length]
            if begin % weight.dtype.itemsize:
                part = part.clone()
            weights[weight.key] = part.view(weight.dtype).view(weight.shape)
    return weights


def input_sizes(program: Program) -> dict[str, tuple[int | str, ...]]:
    """Inputs that a pass brings, caches included, in order → their sizes; `batch`, `nodes` and
    `rows` are dynamic.
    """
    tokens = program.placeholder("tokens").meta["val"].shape
    rows = program.placeholder("logit_rows").meta["val"].shape[0]
    symbols = {str(tokens[0]): "batch", str(tokens[1]): "nodes", str(rows): "rows"}
    return {
        name: tuple(
            symbols[str(size)] if str(size) in symbols else int(size)
            for size in program.placeholder(name).meta["val"].shape
        )
        for name in (*program.runtime_inputs, *program.caches)
    }


def _held(program: Program, node: fx.Node, weights: Mapping[str, Tensor]) -> Tensor | None:
    """The value of a placeholder that is no input."""
    name = node.target
    if name in program.constants:
        return program.constants[name]
    if name not in program.weights:
        return None
    weight = program.weights[name]
    value = weights.get(weight.key)
    if value is None or tuple(value.shape) != weight.shape or value.dtype != weight.dtype:
        found = "nothing" if value is None else f"{value.dtype} {list(value.shape)}"
        raise WeightError(
            f"{program.name}: {found} for {weight.key}",
            f"{weight.dtype} {list(weight.shape)}",
            "compile the engine again",
        )
    return value


def _name_sizes(copy: fx.Node, node: fx.Node) -> None:
    """Heads that a view leaves to be counted are static for attention only if they are named."""
    if node.target not in _VIEWS:
        return
    sizes = bind_args(node)["shape" if node.target == _VIEWS[1] else "size"]
    made = node.meta["val"].shape
    named = [
        int(found) if size == -1 and not isinstance(found, torch.SymInt) else mine
        for size, found, mine in zip(sizes, made, copy.args[1], strict=True)
    ]
    copy.args = (copy.args[0], named)


def _check_operators(program: Program) -> None:
    known = {*KEPT, *_DECOMPOSED}
    for node in program.graph.nodes:
        namespace = getattr(node.target, "namespace", None)
        if node.op != "call_function" or node.target in known or node.target is operator.getitem:
            continue
        if namespace == "specc":
            raise UnsupportedGraphError(
                f"{program.name}: {node.target}, which torch-tensorrt has no converter for",
                f"{', '.join(str(x) for x in known)} and operators of aten",
                "compile with --backend tensorrt, which goes by ONNX",
            )
