"""Quantized weights of an ONNX file that TensorRT is to build: which forms it keeps the meaning of.

A layer of TensorRT has levels and scales, and no size of a group: how many rows of the levels share
a scale follows from the two shapes. So groups have to divide the rows, or nothing says whether it
takes the last one for short. Its parser knows neither uint4 nor uint8, and its scales have no zero
points.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specc.errors import TensorRTError

if TYPE_CHECKING:
    import onnx

# of levels, in words of onnx.TensorProto
_FP8 = "FLOAT8E4M3FN"
_LEVELS = ("INT8", "INT4", _FP8)


@dataclass(frozen=True)
class Dequantized:
    """One weight that is stored as levels and scales.

    Args:
        node: name of the ONNX node.
        output: the tensor that it computes, [K, N].
        levels: shape [K, N].
        scales: shape [N], or [G, N], of which each is for K / G rows.
        axis: that scales lie along, or that is divided into groups.
        kind: of the levels, a name of onnx.TensorProto.
        readers: names of the nodes that read the weight, or what a Cast makes of it.
    """

    node: str
    output: str
    levels: tuple[int, ...]
    scales: tuple[int, ...]
    axis: int
    kind: str
    readers: tuple[str, ...]

    @property
    def is_fp8(self) -> bool:
        return self.kind == _FP8


def dequantized_weights(graph: onnx.GraphProto) -> Iterator[Dequantized]:
    """Every `DequantizeLinear` of a graph, in its order.

    Raises:
        TensorRTError: one of another form than those above.
    """
    import onnx

    held = {item.name: item for item in graph.initializer}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for node in graph.node:
        if node.op_type != "DequantizeLinear":
            continue
        where = f"{node.name} (DequantizeLinear)"
        given = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
        if len(node.input) > 2 and node.input[2]:
            raise _refused(f"{where} with zero points", "none: TensorRT's scales have no others")
        if any(name not in held for name in node.input[:2]):
            raise _refused(f"{where} of computed values", "levels and scales of the file")
        levels, scales = (held[name] for name in node.input[:2])
        kind = onnx.TensorProto.DataType.Name(levels.data_type)
        if kind not in _LEVELS:
            raise _refused(f"{where} of {kind}", f"levels of {', '.join(_LEVELS)}")
        found = Dequantized(
            node.name, node.output[0], tuple(levels.dims), tuple(scales.dims),
            int(given.get("axis", 1)), kind, tuple(_readers(readers, node.output[0])),
        )  # fmt: skip
        _check_scales(where, found, int(given.get("block_size", 0)))
        yield found


def _readers(readers: dict[str, list[onnx.NodeProto]], value: str) -> Iterator[str]:
    for node in readers.get(value, ()):
        if node.op_type == "Cast":
            yield from _readers(readers, node.output[0])
        else:
            yield node.name


def _check_scales(where: str, found: Dequantized, group: int) -> None:
    """One scale for each column, or for each column and whole group of rows."""
    rows, columns = found.levels
    if not group:
        wanted: Any = (1, (columns,))
    elif rows % group:
        raise _refused(
            f"{where} of {rows} rows in groups of {group}",
            "groups that divide the rows: TensorRT has no size of a group, only shapes",
        )
    else:
        wanted = (0, (rows // group, columns))
    if (found.axis, found.scales) != wanted:
        raise _refused(
            f"{where} with scales {list(found.scales)} along axis {found.axis}",
            f"{list(wanted[1])} along axis {wanted[0]}",
        )


def _refused(found: str, needed: str) -> TensorRTError:
    return TensorRTError(
        found, needed, "compile the model again with specc: it writes none of these"
    )
