"""Products by quantized weights in ONNX: `DequantizeLinear` of levels, then `MatMul`.

Blocks of the engine's file mean nothing to ONNX, so the levels are written once more, as ONNX has
them: [K, N], those of 4 bits two in a byte, the first in its low half, with scales [N], or [G, N]
over groups of rows. The product has one of two types (`Products`), for two readers:

- float32 whatever the engine's type, since scales are, and (u - z) · s is what the engine means. Of
  this form onnxruntime makes one `MatMulNBits`.
- that of the rows. (u - z) · s is rounded to it, once from float32, as a weight of that type would
  be. Of this form TensorRT makes one kernel, which reads the integers; of int4 only where scales
  have the type of the rows, too, so those are rounded first.

Source: ONNX 1.23, DequantizeLinear (axis, block_size) of opset 21 and later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from specc.artifact.quantized_layout import FP8_MOST, QuantizedLayout, unpack
from specc.artifact.safetensors_io import SafetensorsReader
from specc.errors import UnsupportedGraphError
from specc.passes.program import Program, Weight

if TYPE_CHECKING:
    import onnx_ir

# what the exporter emits, until the weights are there
DOMAIN, LINEAR = "specc", "LinearQ"
# the type of products by quantized weights
Products = Literal["float32", "rows"]
_ALIGNMENT = 64


def quantized_product() -> Any:
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
    return Op(Opset(DOMAIN, 1), LINEAR, schema)


@dataclass(frozen=True)
class Parts:
    """A weight as `DequantizeLinear` reads it.

    Args:
        levels: [K, N] int8 or uint8, of 4 bits one in each; of fp8 uint8, its bits.
        scales: [N], or [G, N], float32, or in the type of rows.
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


def parts_of(stored: Tensor, weight: Weight, name: str, rows: torch.dtype = torch.float32) -> Parts:
    """A weight out of its blocks.

    Args:
        stored: uint8 [blocks, bytes].
        weight: its name, shape and layout, of integers or fp8.
        rows: type that the product is in.
    Raises:
        UnsupportedGraphError: a zero point that the type of the levels does not hold, or a scale
            with which weights may be beyond the type of the rows.
    """
    layout = weight.quantized
    assert layout is not None, "it is quantized"
    assert layout.kind != "mxfp4", "refused before: specc.passes.rewrite.require_supported"
    levels, scales, zeros = unpack(stored, weight.shape, layout)
    largest = float(scales.abs().max()) * (FP8_MOST if layout.is_float else layout.middle)
    if largest > torch.finfo(rows).max:
        dtype = str(rows).removeprefix("torch.")
        raise UnsupportedGraphError(
            f"{name}: {weight.key} with a scale that stands for weights up to {largest:g}",
            f"weights of {dtype}, in which it is multiplied: up to {torch.finfo(rows).max:g}",
            "compile with --dtype bfloat16, or --backend cpu",
        )
    most = (1 << layout.bits) - 1
    if layout.has_zeros and int(zeros.max()) > most:
        raise UnsupportedGraphError(
            f"{name}: {weight.key} with a zero point of {int(zeros.max())}",
            f"zero points from 0 to {most}: those of ONNX have the type of the levels",
            "compile with --backend cpu or cuda",
        )
    if layout.group and layout.bits == 4:
        scales = scales.to(rows)
    turn = lambda x: x.T.contiguous() if layout.group else x.flatten()  # noqa: E731
    if layout.bits == 8 and not layout.has_zeros:
        levels, scales = _with_positive_scales(levels, scales, layout)
    if layout.is_float:
        return Parts(levels.T, turn(scales), None, layout.group)
    if layout.has_zeros:
        return Parts(levels.T, turn(scales), turn(zeros.to(torch.uint8)), layout.group)
    signed = (levels.to(torch.int16) - layout.middle).to(torch.int8)
    return Parts(signed.T, turn(scales), None, layout.group)


def _with_positive_scales(
    levels: Tensor, scales: Tensor, layout: QuantizedLayout
) -> tuple[Tensor, Tensor]:
    """The same weights by scales above 0, which is what TensorRT takes of levels of 8 bits.

    Where a scale is negative and an int8 level is -128, which has no opposite, they are left.

    Args:
        levels: [N, K] uint8, as `unpack` has them.
        scales: [N, G] float32.
        layout: of 8 bits, without zero points.
    """
    outputs, columns = levels.shape
    width = layout.group or columns
    wide = lambda x: x.repeat_interleave(width, 1)[:, :columns]  # noqa: E731
    zero = 0 if layout.is_float else layout.middle
    none = scales == 0
    levels = torch.where(wide(none), zero, levels)
    down = scales < 0
    if layout.is_float:
        opposite = levels ^ 128
    else:
        opposite = (2 * layout.middle - levels.to(torch.int16)).clamp(max=255).to(torch.uint8)
        short = torch.nn.functional.pad(levels, (0, -columns % width), value=zero)
        down &= (short.view(outputs, -1, width) > 0).all(-1)
    levels = torch.where(wide(down), opposite, levels)
    return levels, torch.where(none, 1.0, torch.where(down, -scales, scales))


def require_positive_scales(parts: Parts, weight: Weight, name: str) -> None:
    """Refuse what TensorRT cannot read of 8 bits.

    Args:
        parts: of `parts_of`, which turns negative scales where it can.
    Raises:
        UnsupportedGraphError: a scale of 8 bits below 0.
    """
    layout = weight.quantized
    assert layout is not None, "it is quantized"
    if layout.bits == 8 and bool((parts.scales <= 0).any()):
        raise UnsupportedGraphError(
            f"{name}: {weight.key} with a negative scale and a level of -128 in int8",
            "scales above 0: TensorRT reads no others of 8 bits",
            "compile with --backend cpu, cuda or onnx",
        )


def expand_quantized(
    model: onnx_ir.Model, program: Program, path: Path, weights: Path, products: Products
) -> None:
    """Put standard nodes in place of every `LinearQ`, and write the levels that they read.

    The levels are in a file beside the model's, of its name with `.levels` for `.onnx`. No more
    than one weight is in memory at a time.

    Args:
        model: changed.
    Raises:
        UnsupportedGraphError: see `parts_of`; or for TensorRT (`products` "rows") a negative scale
            of levels of 8 bits.
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
                rows = torch.float32 if products == "float32" else weight.dtype
                parts = parts_of(_read(reader, weight), weight, program.name, rows)
                if products == "rows":
                    require_positive_scales(parts, weight, program.name)
                made[weight.key] = _inputs(graph, weight, parts, file, out)
            nodes = list(_nodes(call, made[weight.key], products))
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
        own = ir.DataType(_SCALES[tensor.dtype]) if name == "scales" else kind
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
    if layout.is_float:
        return "FLOAT8E4M3FN"
    return f"{'U' if layout.has_zeros else ''}INT{layout.bits}"


def _packed(values: Tensor) -> Tensor:
    """Values of 4 bits in their order, two in a byte, the first in its low half."""
    flat = values.contiguous().view(torch.uint8).flatten() & 15
    flat = torch.nn.functional.pad(flat, (0, flat.numel() % 2))
    return flat[::2] | flat[1::2] << 4


def _nodes(call: onnx_ir.Node, inputs: _Inputs, products: Products) -> Iterator[onnx_ir.Node]:
    """What a product is made of, in order; the last one has its result."""
    import onnx_ir as ir

    x, _, bias = (*call.inputs, None)[:3]
    assert x is not None
    kind = x.dtype
    inner = kind if products == "rows" else ir.DataType.FLOAT

    def cast(value: onnx_ir.Value, to: onnx_ir.DataType | None) -> Iterator[onnx_ir.Node]:
        if to is not None and value.dtype not in (None, to):
            yield ir.node("Cast", [value], {"to": int(to)})

    def typed(node: onnx_ir.Node, to: onnx_ir.DataType | None) -> onnx_ir.Value:
        value = node.outputs[0]
        value.type = None if to is None else ir.TensorType(to)
        return value

    found = ir.node("DequantizeLinear", inputs.values, inputs.attributes)
    yield found
    weight = typed(found, inputs.values[1].dtype)
    for node in cast(weight, inner):
        yield node
        weight = typed(node, inner)
    for node in cast(x, inner):
        yield node
        x = typed(node, inner)
    product = ir.node("MatMul", [x, weight])
    yield product
    y = typed(product, inner)
    if bias is not None:
        for node in cast(bias, inner):
            yield node
            bias = typed(node, inner)
        total = ir.node("Add", [y, bias])
        yield total
        y = typed(total, inner)
    yield from cast(y, kind)


# scales: torch's type → that of TensorProto
_SCALES = {torch.float32: 1, torch.float16: 10, torch.bfloat16: 16}
