"""Products by quantized weights in ONNX: `DequantizeLinear` of levels, then `MatMul`.

Blocks of the engine's file mean nothing to ONNX, so the levels are written once more, as ONNX has
them: [K, N], those of 4 bits two in a byte, the first in its low half, with scales [N], or [G, N]
over groups of rows. That is the form of which onnxruntime makes one `MatMulNBits`. The product is
float32 whatever the engine's type: scales are, and (u - z) · s is what the engine means.

Source: ONNX 1.23, DequantizeLinear (axis, block_size) of opset 21 and later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specc.artifact.quantized_layout import QuantizedLayout, unpack
from specc.artifact.safetensors_io import SafetensorsReader
from specc.errors import UnsupportedGraphError
from specc.passes.program import Program, Weight

if TYPE_CHECKING:
    import onnx_ir

# what the exporter emits, until the weights are there
DOMAIN, LINEAR = "specc", "LinearQ"
_ALIGNMENT = 64


def linear_q() -> Any:
    """What the exporter makes of `specc.linear_q`: a node of its own, see `expand_quantized`."""
    from onnx.defs import OpSchema
    from onnxscript.values import Op, Opset

    types = [f"tensor({name})" for name in ("float", "float16", "bfloat16")]
    schema = OpSchema(
        LINEAR,
        DOMAIN,
        1,
        inputs=[
            OpSchema.FormalParameter("x", "T"),
            OpSchema.FormalParameter("weight", "tensor(uint8)"),
            OpSchema.FormalParameter(
                "bias", "T", param_option=OpSchema.FormalParameterOption.Optional
            ),
        ],
        outputs=[OpSchema.FormalParameter("y", "T")],
        type_constraints=[("T", types, "")],
    )
    product = Op(Opset(DOMAIN, 1), LINEAR, schema)

    def translate(
        x: Any, weight: Any, bias: Any, out_features: int, bits: int, group: int, has_zeros: bool,
        is_float: bool = False,
    ) -> Any:  # fmt: skip
        # all but the operands is known of the weight
        return product(x, weight, bias)

    return translate


@dataclass(frozen=True)
class Parts:
    """A weight as `DequantizeLinear` reads it.

    Args:
        levels: [K, N] int8 or uint8, of 4 bits one in each.
        scales: [N], or [G, N], float32.
        zeros: like the scales, in the type of the levels; None is 0.
        group: rows of a scale; 0 for all.
    """

    levels: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int

    @property
    def attributes(self) -> dict[str, int]:
        return {"axis": 0, "block_size": self.group} if self.group else {"axis": 1}


def parts_of(stored: Tensor, weight: Weight, name: str) -> Parts:
    """A weight out of its blocks.

    Args:
        stored: uint8 [blocks, bytes].
        weight: its name, shape and layout, of integers.
        name: of the model.
    Raises:
        UnsupportedGraphError: a zero point that the type of the levels does not hold.
    """
    layout = weight.quantized
    assert layout is not None, "it is quantized"
    assert not layout.is_float, "refused before: specc.passes.rewrite.require_layouts"
    levels, scales, zeros = unpack(stored, weight.shape, layout)
    most = (1 << layout.bits) - 1
    if layout.has_zeros and int(zeros.max()) > most:
        raise UnsupportedGraphError(
            f"{name}: {weight.key} with a zero point of {int(zeros.max())}",
            f"zero points from 0 to {most}: those of ONNX have the type of the levels",
            "compile with --backend cpu or cuda",
        )
    turn = lambda x: x.T.contiguous() if layout.group else x.flatten()  # noqa: E731
    if layout.has_zeros:
        return Parts(levels.T, turn(scales), turn(zeros.to(torch.uint8)), layout.group)
    signed = (levels.to(torch.int16) - layout.middle).to(torch.int8)
    return Parts(signed.T, turn(scales), None, layout.group)


def expand_quantized(model: onnx_ir.Model, program: Program, path: Path, weights: Path) -> None:
    """Put standard nodes in place of every `LinearQ`, and write the levels that they read.

    The levels are in a file beside the model's, of its name with `.levels` for `.onnx`. No more
    than one weight is in memory at a time.

    Args:
        model: changed.
        program: that it was made of.
        path: of the model's file.
        weights: of the engine, with the blocks.
    """
    import onnx_ir as ir

    graph = model.graph
    calls = [node for node in graph if (node.domain, node.op_type) == (DOMAIN, LINEAR)]
    if not calls:
        return
    model.opset_imports.pop(DOMAIN, None)
    made: dict[str, _Inputs] = {}
    file = path.with_suffix(".levels")
    with SafetensorsReader(weights) as reader, file.open("wb") as out:
        for call in calls:
            assert call.inputs[1] is not None
            weight = program.weights[str(call.inputs[1].name)]
            if weight.key not in made:
                parts = parts_of(_read(reader, weight), weight, program.name)
                made[weight.key] = _inputs(graph, weight, parts, file, out)
            nodes = list(_nodes(call, made[weight.key]))
            last = nodes[-1].outputs[0]
            last.type, last.shape = call.outputs[0].type, call.outputs[0].shape
            ir.convenience.replace_nodes_and_values(
                graph, call, [call], nodes, list(call.outputs), [last]
            )
    for value in list(graph.inputs):
        name = str(value.name)
        if name in program.weights and program.weights[name].quantized is not None:
            graph.inputs.remove(value)


def _read(reader: SafetensorsReader, weight: Weight) -> Tensor:
    stored = torch.empty(weight.stored_shape, dtype=torch.uint8)
    view, place = memoryview(stored.numpy().data).cast("B"), 0
    for chunk in reader.read_chunks(weight.key):
        view[place : place + len(chunk)] = chunk
        place += len(chunk)
    return stored


@dataclass(frozen=True)
class _Inputs:
    """Initializers of a weight, and the attributes of its `DequantizeLinear`."""

    values: list[onnx_ir.Value]
    attributes: Mapping[str, int]


def _inputs(graph: onnx_ir.Graph, weight: Weight, parts: Parts, file: Path, out: Any) -> _Inputs:
    import onnx_ir as ir

    layout = weight.quantized
    assert layout is not None
    kind = getattr(ir.DataType, _kind(layout))
    values = []
    named = {"levels": parts.levels, "scales": parts.scales, "zeros": parts.zeros}
    for name, tensor in named.items():
        if tensor is None:
            continue
        own = ir.DataType.FLOAT if name == "scales" else kind
        data = _packed(tensor) if layout.bits == 4 and name != "scales" else tensor.contiguous()
        begin = out.tell() + -out.tell() % _ALIGNMENT
        out.write(bytes(begin - out.tell()))
        out.write(data.view(torch.uint8).numpy().data)
        key = f"{weight.key}.{name}"
        external = ir.ExternalTensor(
            file.name, begin, out.tell() - begin, own,
            shape=ir.Shape(tensor.shape), name=key, base_dir=file.parent,
        )  # fmt: skip
        value = ir.Value(
            name=key, shape=ir.Shape(tensor.shape), type=ir.TensorType(own), const_value=external
        )
        graph.register_initializer(value)
        values.append(value)
    return _Inputs(values, parts.attributes)


def _kind(layout: QuantizedLayout) -> str:
    return f"{'U' if layout.has_zeros else ''}INT{layout.bits}"


def _packed(values: Tensor) -> Tensor:
    """Values of 4 bits in their order, two in a byte, the first in its low half."""
    flat = values.contiguous().view(torch.uint8).flatten() & 15
    flat = torch.nn.functional.pad(flat, (0, flat.numel() % 2))
    return flat[::2] | flat[1::2] << 4


def _nodes(call: onnx_ir.Node, inputs: _Inputs) -> Iterator[onnx_ir.Node]:
    """What a product is made of, in order; the last one has its result."""
    import onnx_ir as ir

    x, _, bias = (*call.inputs, None)[:3]
    assert x is not None
    kind = x.dtype

    def cast(value: onnx_ir.Value, to: onnx_ir.DataType | None) -> Iterator[onnx_ir.Node]:
        if to is not None and value.dtype not in (None, to):
            yield ir.node("Cast", [value], {"to": int(to)})

    def typed(node: onnx_ir.Node, to: onnx_ir.DataType | None) -> onnx_ir.Value:
        value = node.outputs[0]
        value.type = None if to is None else ir.TensorType(to)
        return value

    weight = ir.node("DequantizeLinear", inputs.values, inputs.attributes)
    yield weight
    for node in cast(x, ir.DataType.FLOAT):
        yield node
        x = typed(node, ir.DataType.FLOAT)
    product = ir.node("MatMul", [x, weight.outputs[0]])
    yield product
    y = typed(product, ir.DataType.FLOAT)
    if bias is not None:
        for node in cast(bias, ir.DataType.FLOAT):
            yield node
            bias = typed(node, ir.DataType.FLOAT)
        total = ir.node("Add", [y, bias])
        yield total
        y = typed(total, ir.DataType.FLOAT)
    yield from cast(y, kind)
