"""Lower a padded program to a standard ONNX file beside the engine's weights.

torch's exporter translates the operators of aten; those of specc are in `operators.py`. The
file holds no weight: its initializers name places in the safetensors file that eager graphs of
the engine read, too. So nothing is copied, and no weight is read here, but for quantized ones
(`quantized.py`).
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from specc.artifact.cache_rows import cache_output, reaches_of
from specc.artifact.safetensors_io import SafetensorsReader
from specc.errors import ConfigError, UnsupportedGraphError
from specc.kernels import ops
from specc.passes.lower.onnx.operators import OPSET, translations
from specc.passes.lower.onnx.quantized import Products, expand_quantized
from specc.passes.program import PADDED_INPUTS, Program
from specc.system.extras import install_command

if TYPE_CHECKING:
    import onnx_ir

# sizes of the example inputs: distinct, and none of them 0 or 1, which torch would specialize
_SIZES = {"batch": 3, "nodes": 8, "rows": 6}
_DIMS: dict[str, dict[int, str]] = {
    "tokens": {0: "batch", 1: "nodes"},
    "positions": {0: "batch", 1: "nodes"},
    "write_index": {0: "batch"},
    "logit_rows": {0: "rows"},
}
_MASK_DIMS, _CACHE_DIMS = {0: "batch", 2: "nodes"}, {0: "batch"}
_DOCS = {
    "tokens": "Token ids of each sequence's nodes; a tree's are in the order of its levels.",
    "positions": "Position of each node in its sequence: committed tokens + depth in the tree.",
    "write_index": "Cache row of each sequence's first node; the others follow it, in order."
    " write_index + nodes must not exceed the rows of the cache: runtimes drop such rows silently.",
    "logit_rows": "Which nodes get logits: b * nodes + n for node n of sequence b.",
    "logits": "Logits of the asked nodes, in the order of logit_rows.",
}
_MASK_DOC = (
    "True where a node attends to a cache row: committed rows, its ancestors in the tree, itself."
    " Every node must attend to some row."
)


@dataclass(frozen=True)
class OnnxFile:
    """What an ONNX file holds.

    Args:
        opset: of the default domain.
        operators: operator type → number of nodes.
        inputs: names of the runtime's inputs, caches last.
        outputs: `logits`, then the caches.
    """

    opset: int
    operators: dict[str, int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def require_onnx() -> None:
    """Raises ConfigError: a package is missing that writes ONNX files."""
    try:
        import onnx
        import onnx_ir  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"no package {error.name}", "onnx and onnxscript", install_command("onnx")
        ) from error
    if onnx.defs.onnx_opset_version() < OPSET:
        raise ConfigError(
            f"onnx {onnx.__version__}, which knows opset {onnx.defs.onnx_opset_version()}",
            f"opset {OPSET}, which has TensorScatter",
            install_command("onnx"),
        )


def lower_onnx(
    program: Program, path: Path, weights: Path, products: Products = "float32"
) -> OnnxFile:
    """Write a padded program as ONNX.

    Args:
        program: after its last phase; not changed.
        weights: the engine's weights, in the same directory.
        products: type of those by quantized weights.
    Raises:
        UnsupportedGraphError: an operator that ONNX does not have, or a weight that the type of
            products does not hold.
    """
    return _write(_translate(program), program, program.constants, path, weights, products)


def lower_ranks(program: Program, files: Sequence[tuple[Path, Path]]) -> OnnxFile:
    """Write a padded program that was cut, once for each rank: they differ in weights alone.

    Sums over ranks are nodes `DistCollective` of the domain `specc`, see `operators`.

    Args:
        program: after its last phase; not changed.
        files: of each rank, the file to write and its weights, in the same directory.
    Returns:
        what each of them holds.
    Raises:
        UnsupportedGraphError: an operator that ONNX does not have.
    """
    import onnx_ir

    plan = program.shard
    assert plan is not None, "it was cut"
    assert len(files) == plan.num_ranks, "a file of each rank"
    text = onnx_ir.to_proto(_translate(program))
    for rank, (path, weights) in enumerate(files):
        own = {item.name: item.value(rank) for item in plan.constants}
        model = onnx_ir.from_proto(text)
        found = _write(model, program, program.constants | own, path, weights)
    return found


def _translate(program: Program) -> onnx_ir.Model:
    """The program as a model of ONNX, its weights and constants among its inputs."""
    exported = _export(program)
    try:
        with _quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = torch.onnx.export(
                exported,
                dynamo=True,
                opset_version=OPSET,
                custom_translation_table=translations(
                    1 if program.shard is None else program.shard.num_ranks
                ),
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise UnsupportedGraphError(
            f"{program.name}: {_cause(error)}",
            "operators that ONNX has",
            "compile with --backend cpu or cuda, and report the architecture",
        ) from error
    assert made is not None
    _name_values(made.model, program)
    return made.model


def _write(
    model: onnx_ir.Model,
    program: Program,
    constants: Mapping[str, Tensor],
    path: Path,
    weights: Path,
    products: Products = "float32",
) -> OnnxFile:
    """Write what `_translate` has made, with these weights and constants."""
    import onnx
    import onnx_ir

    expand_quantized(model, program, path, weights, products)
    _bind_weights(model, program, constants, weights)
    _describe(model, program)
    onnx_ir.save(model, path)
    # also reads what the initializers point at
    onnx.checker.check_model(str(path), full_check=True)
    operators: dict[str, int] = {}
    for node in model.graph:
        operators[node.op_type] = operators.get(node.op_type, 0) + 1
    names = tuple(str(value.name) for value in model.graph.inputs)
    outputs = tuple(str(value.name) for value in model.graph.outputs)
    return OnnxFile(OPSET, dict(sorted(operators.items())), names, outputs)


def _export(program: Program) -> ExportedProgram:
    """Export the graph anew, with every placeholder as an input and the caches as outputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    (output,) = program.graph.find_nodes(op="output")
    written = {node.args[0].target: node for node in program.calls(ops.cache_write)}
    for node in program.graph.nodes:
        if node is not output:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    results = [output.args[0], *(written[name] for name in program.caches)]
    graph.output(tuple(copies[node] for node in results))
    module = fx.GraphModule(program.graph_module, graph)

    dims = {name: Dim(name, min=1, max=4096 if name == "batch" else 1 << 20) for name in _SIZES}
    inputs, dynamic = [], []
    # nothing is computed: a weight may be larger than the memory
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        for node in graph.find_nodes(op="placeholder"):
            named = _dims_of(program, node.target)
            value = node.meta["val"]
            shape = [
                _SIZES[named[i]] if i in named else int(size) for i, size in enumerate(value.shape)
            ]
            inputs.append(torch.empty(shape, dtype=value.dtype))
            dynamic.append({i: dims[name] for i, name in named.items()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(
            module,
            tuple(inputs),
            dynamic_shapes=tuple(dynamic),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )


def _dims_of(program: Program, name: str) -> dict[int, str]:
    """Dynamic dimensions of a placeholder."""
    if name in program.caches:
        return _CACHE_DIMS
    if name in program.runtime_inputs:
        return _DIMS.get(name, _MASK_DIMS)
    return {}


def _name_values(model: onnx_ir.Model, program: Program) -> None:
    """Names of inputs and outputs, and of their dynamic dimensions everywhere."""
    graph = model.graph
    placeholders = program.graph.find_nodes(op="placeholder")
    symbols: dict[str, str] = {}
    for value, node in zip(graph.inputs, placeholders, strict=True):
        value.name = str(node.target)
        for place, name in _dims_of(program, node.target).items():
            assert value.shape is not None, "every input was exported with a shape"
            symbols[str(value.shape[place])] = name
    names = ["logits", *map(cache_output, program.caches)]
    for value, name in zip(graph.outputs, names, strict=True):
        value.name = name
    values = [*graph.inputs, *graph.outputs, *(v for node in graph for v in node.outputs)]
    for value in values:
        if value.shape is not None:
            for place, size in enumerate(value.shape):
                if str(size) in symbols:
                    value.shape[place] = symbols[str(size)]
    logits = graph.outputs[0].shape
    assert logits is not None
    logits[0] = "rows"


def _bind_weights(
    model: onnx_ir.Model, program: Program, constants: Mapping[str, Tensor], weights: Path
) -> None:
    """Turn weight inputs into initializers that name a place in the engine's weights.

    Small constants become initializers with values.
    """
    import onnx_ir as ir

    graph = model.graph
    keys: dict[str, onnx_ir.Value] = {}
    with SafetensorsReader(weights) as reader:
        for value in list(graph.inputs):
            name = str(value.name)
            if name in constants:
                graph.inputs.remove(value)
                value.const_value = _small_tensor(constants[name], name)
                graph.register_initializer(value)
            elif name in program.weights:
                graph.inputs.remove(value)
                key = program.weights[name].key
                if key in keys:
                    ir.convenience.replace_all_uses_with(value, keys[key])
                    continue
                begin, length = reader.place(key)
                assert value.dtype is not None
                value.name = key
                value.const_value = ir.ExternalTensor(
                    weights.name,
                    begin,
                    length,
                    value.dtype,
                    shape=ir.Shape(program.weights[name].shape),
                    name=key,
                    base_dir=weights.parent,
                )
                graph.register_initializer(value)
                keys[key] = value


def _small_tensor(value: Tensor, name: str) -> Any:
    import onnx_ir as ir

    if value.dtype is torch.bfloat16:
        return ir.Tensor(value.view(torch.uint16).numpy(), dtype=ir.DataType.BFLOAT16, name=name)
    return ir.Tensor(value.numpy(), name=name)


def _describe(model: onnx_ir.Model, program: Program) -> None:
    model.producer_name = "specc"
    model.metadata_props.clear()
    # what torch traced, with its own names
    model.graph.metadata_props.clear()
    for node in model.graph:
        # names of files on this machine among them
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.graph.name = program.name
    model.doc_string = (
        f"{program.name} of a specc engine: one pass over [batch, nodes] tokens. Bind every"
        " cache input and its output (…_out) to one address: the pass writes its keys and values"
        " in place."
    )
    masks = {reach.mask_input: reach.description for reach in reaches_of(program.layers)}
    for value in (*model.graph.inputs, *model.graph.outputs):
        name = str(value.name).removesuffix("_out")
        if name in program.caches:
            layer, part = program.caches[name]
            what = {"k": "Keys", "v": "Values"}[part]
            if program.layers[layer].values_in_keys:
                what = f"Keys, whose first {program.layers[layer].value_dim} columns are values,"
            way = (
                "after the pass; bind it to the input's address"
                if name != value.name
                else (
                    "of the committed tokens, of each sequence's rows [kv heads, rows, head size]"
                )
            )
            value.doc_string = f"{what} of layer {program.layers[layer].name} {way}."
        else:
            words = _DOCS.get(name, _MASK_DOC), masks.get(name, "")
            value.doc_string = " ".join(filter(None, words))


def _cause(error: BaseException) -> str:
    """The first line of what the exporter failed for."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter logs, for example, that torchvision is not installed."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir", "onnxscript")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


assert set(_DIMS) == set(PADDED_INPUTS)
