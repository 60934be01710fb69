"""The fast lane: TensorRT's own operators in the place of Attention and TensorScatter.

The parser lowers standard Attention to TensorRT's with a multiplication on the queries and one on
the whole cache of keys, even for a scale of 1, and has no way to pass lengths. `TRT_Attention` and
`TRT_KVCacheUpdate` are the layers themselves: queries are scaled here, in fp32 so that a scale
that fp16 cannot hold does not bias every score, and lengths tell the kernel where the rows end.
No other program reads these operators: the standard form is what is checked elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specc.errors import TensorRTError
from specc.passes.lower.tensorrt.onnx_attention import DecoderForm

if TYPE_CHECKING:
    import onnx

DOMAIN = "trt"
OPERATORS = frozenset({"TRT_Attention", "TRT_KVCacheUpdate"})
# input that the rewritten file has besides: rows of each cache that hold something, [batch] i32.
# Not computed in the graph: a shape would cost a copy from the host in every pass
LENGTHS = "kv_lengths"

_PREFIX = "trt_"


def use_trt_attention(model: onnx.ModelProto, form: DecoderForm) -> onnx.ModelProto:
    """Return the file with TensorRT's operators; every other node is kept as it is.

    Args:
        model: with or without its external weights; not changed.
    Returns:
        the same inputs and outputs, and the input `kv_lengths` [batch] i32, last: write_index +
        nodes of each sequence.
    Raises:
        TensorRTError: a name that the rewrite needs is taken.
    """
    import onnx

    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    _check_names(graph)
    attentions = {attention.node: attention for attention in form.attentions}
    caches = {cache.node for cache in form.caches}
    indices: dict[str, str] = {}
    nodes: list[onnx.NodeProto] = []

    def add(op: str, inputs: list[str], output: str, name: str, **attributes: Any) -> str:
        made = onnx.helper.make_node(op, inputs, [output], name=name, **attributes)
        nodes.append(made)
        return output

    for node in graph.node:
        if node.name in caches:
            index = node.input[2]
            if index not in indices:
                name = f"{_PREFIX}{index}"
                indices[index] = add("Cast", [index], name, name, to=onnx.TensorProto.INT32)
            inputs = [node.input[0], node.input[1], indices[index]]
            trt = {"domain": DOMAIN, "mode": "linear", "axis": -2}
            add("TRT_KVCacheUpdate", inputs, node.output[0], node.name, **trt)
        elif node.name in attentions:
            attention = attentions[node.name]
            query = node.input[0]
            if attention.scale != 1:
                query = _scaled(add, attention.node, query, attention.scale, form.elem_type, graph)
            inputs = [query, attention.keys, attention.values, attention.mask, "", LENGTHS]
            trt = {"domain": DOMAIN, "causal_kind": "none"}
            add("TRT_Attention", inputs, node.output[0], node.name, **trt)
        else:
            nodes.append(node)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    batch = form.dims[form.caches[0].input][0]
    lengths = onnx.helper.make_tensor_value_info(LENGTHS, onnx.TensorProto.INT32, [batch])
    graph.input.append(lengths)
    result.opset_import.append(onnx.helper.make_operatorsetid(DOMAIN, 1))
    return result


def _scaled(
    add: Any, node: str, query: str, scale: float, elem_type: int, graph: onnx.GraphProto
) -> str:
    """Queries times the scale, rounded once."""
    import onnx

    name = f"{_PREFIX}{node}_scale"
    wide, half = onnx.TensorProto.FLOAT, elem_type != onnx.TensorProto.FLOAT
    graph.initializer.append(onnx.helper.make_tensor(name, wide, [], [scale]))
    if half:
        query = add("Cast", [query], f"{name}_wide", f"{name}_wide", to=wide)
    query = add("Mul", [query, name], f"{name}_mul", f"{name}_mul")
    if half:
        query = add("Cast", [query], f"{name}_query", f"{name}_query", to=elem_type)
    return query


def _check_names(graph: onnx.GraphProto) -> None:
    names = {name for node in graph.node for name in (*node.output, node.name)}
    names |= {item.name for item in (*graph.input, *graph.initializer)}
    taken = sorted(name for name in names if name.startswith(_PREFIX) or name == LENGTHS)
    if taken:
        raise TensorRTError(
            f"the name {taken[0]} in the ONNX file",
            f"no name that begins with {_PREFIX}, and none that is {LENGTHS}",
            "compile the model again with specc: it writes no such name",
        )
