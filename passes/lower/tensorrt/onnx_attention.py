"""What TensorRT has to be told about a decoder's ONNX file: its caches, attentions and masks.

TensorRT's parser takes some forms without keeping their meaning, and refuses others long after it
was asked. So the file is read first, and every form that specc does not write is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specc.errors import TensorRTError
from specc.passes.lower.onnx.operators import COLLECTIVE, SUM
from specc.passes.lower.tensorrt.dequantized import Dequantized, dequantized_weights

if TYPE_CHECKING:
    import onnx

# inputs of the operator Attention
_Q, _K, _V, _MASK, _PAST_K, _PAST_V, _LENGTHS = range(7)
_DO = "compile the model again with specc: it writes none of these"


@dataclass(frozen=True)
class Cache:
    """One KV cache: an input and an output of the file, to be bound to one address.

    Args:
        input, output: names.
        node: the TensorScatter that writes it.
        shape: (KV heads, rows, head size), after the batch.
    """

    input: str
    output: str
    node: str
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class CachedAttention:
    """One attention over caches.

    Args:
        node: name of the ONNX node.
        keys, values: names of the caches' outputs, which it reads.
        mask: input of the file, bool, True = attend.
        scale: factor of query · key.
    """

    node: str
    output: str
    keys: str
    values: str
    mask: str
    scale: float


@dataclass(frozen=True)
class RankSum:
    """One sum over ranks.

    Args:
        node: name of the ONNX node.
        num_ranks: that it goes over.
    """

    node: str
    output: str
    num_ranks: int


@dataclass(frozen=True)
class DecoderForm:
    """Caches and attentions of a file, in its order.

    Args:
        sums: over ranks, of a file of one of several.
        elem_type: ONNX element type of caches and queries.
        dims: input → its dimensions, a name where one is dynamic.
        weights: those that are quantized.
    """

    caches: tuple[Cache, ...]
    attentions: tuple[CachedAttention, ...]
    elem_type: int
    dims: dict[str, tuple[int | str, ...]]
    sums: tuple[RankSum, ...] = ()
    weights: tuple[Dequantized, ...] = ()

    @property
    def dtype(self) -> str:
        """Of caches and queries, torch's name."""
        import onnx

        name = onnx.TensorProto.DataType.Name(self.elem_type).lower()
        return {"float": "float32", "double": "float64"}.get(name, name)

    @property
    def rows(self) -> int:
        """Rows of the shortest cache."""
        return min(cache.shape[1] for cache in self.caches)


def read_form(model: onnx.ModelProto) -> DecoderForm:
    """Find caches, attentions and quantized weights; nodes without a name get one.

    Raises:
        TensorRTError: TensorRT would drop, refuse or change something.
    """
    _name_nodes(model)
    graph = model.graph
    dims = {
        value.name: tuple(
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param
            for dim in value.type.tensor_type.shape.dim
        )
        for value in graph.input
    }
    types = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    outputs = {value.name for value in graph.output}
    caches = tuple(_caches(graph, dims, outputs))
    if not caches:
        raise _refused("no TensorScatter", "a cache write for each layer's keys and values")
    elem_types = {types[cache.input] for cache in caches}
    if len(elem_types) != 1:
        raise _refused("caches of several dtypes", "one dtype in all caches")
    attentions = tuple(_attentions(graph, dims, types, {cache.output: cache for cache in caches}))
    if not attentions:
        raise _refused("no Attention", "an Attention for each layer")
    read = {name for attention in attentions for name in (attention.keys, attention.values)}
    for cache in caches:
        if cache.output not in read:
            raise _refused(f"{cache.input}, which no Attention reads", "a reader of every cache")
    weights = tuple(dequantized_weights(graph))
    return DecoderForm(caches, attentions, elem_types.pop(), dims, tuple(_sums(graph)), weights)


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Attributes of a node as Python values; strings decoded."""
    import onnx

    values = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}


def _caches(graph: Any, dims: dict[str, Any], outputs: set[str]) -> Iterator[Cache]:
    writers: dict[str, str] = {}
    for node in graph.node:
        if node.op_type != "TensorScatter":
            continue
        where, given = f"{node.name} (TensorScatter)", attributes(node)
        if (mode := given.get("mode", "linear")) != "linear":
            raise _refused(f"{where} with mode {mode}", "mode linear: TensorRT has no other")
        if (axis := given.get("axis", -2)) not in (2, -2):
            raise _refused(f"{where} with axis {axis}", "axis 2, the rows of the cache")
        if len(node.input) < 3 or not node.input[2]:
            raise _refused(f"{where} without write_indices", "the row of each sequence")
        cache, output = node.input[0], node.output[0]
        if cache not in dims:
            raise _refused(f"{where} into {cache}, a computed tensor", "a cache that is an input")
        if cache in writers:
            raise _refused(
                f"{cache} written by {writers[cache]} and by {node.name}", "one write of each cache"
            )
        writers[cache] = node.name
        if output not in outputs:
            raise _refused(
                f"{where} whose result {output} is no output",
                "an output for each cache, bound to the address of its input",
            )
        shape = dims[cache]
        if len(shape) != 4 or not all(isinstance(size, int) for size in shape[1:]):
            raise _refused(
                f"{cache} of shape {_show(shape)}", "[batch, KV heads, rows, head size], rows fixed"
            )
        yield Cache(cache, output, node.name, (shape[1], shape[2], shape[3]))


def _attentions(
    graph: Any, dims: dict[str, Any], types: dict[str, int], caches: dict[str, Cache]
) -> Iterator[CachedAttention]:
    import onnx

    for node in graph.node:
        if node.op_type != "Attention":
            continue
        where, given = f"{node.name} (Attention)", attributes(node)
        inputs = list(node.input) + [""] * (_LENGTHS + 1 - len(node.input))
        if inputs[_LENGTHS]:
            raise _refused(
                f"{where} with nonpad_kv_seqlen, which TensorRT's parser drops without a word",
                "lengths that are part of the mask",
            )
        mask = inputs[_MASK]
        if given.get("is_causal"):
            raise _refused(
                f"{where} with is_causal" + (" and a mask" if mask else ""),
                "a mask alone: TensorRT takes one or the other, and a tree needs the mask",
            )
        if given.get("softcap"):
            raise _refused(
                f"{where} with softcap {given['softcap']:g}", "no softcap: TensorRT has none"
            )
        if inputs[_PAST_K] or inputs[_PAST_V] or len([x for x in node.output if x]) > 1:
            raise _refused(
                f"{where} with past, present or score tensors", "caches written by TensorScatter"
            )
        if given.get("q_num_heads") or given.get("kv_num_heads"):
            raise _refused(f"{where} of packed heads", "[batch, heads, nodes, head size]")
        if not mask:
            raise _refused(f"{where} without a mask", "a mask: it carries lengths and the tree")
        if mask not in dims or types[mask] != onnx.TensorProto.BOOL:
            raise _refused(f"{where} with the mask {mask}", "a bool input of the file")
        keys, values = inputs[_K], inputs[_V]
        for name in (keys, values):
            if name not in caches:
                raise _refused(f"{where} over {name}", "keys and values of a written cache")
        head_size = caches[keys].shape[2]
        scale = float(given.get("scale", head_size**-0.5))
        yield CachedAttention(node.name, node.output[0], keys, values, mask, scale)


def _sums(graph: Any) -> Iterator[RankSum]:
    for node in graph.node:
        if node.op_type != COLLECTIVE:
            continue
        where, given = f"{node.name} ({COLLECTIVE})", attributes(node)
        num_ranks = given.pop("nb_rank", 0)
        if given != SUM or num_ranks < 2:
            raise _refused(
                f"{where} with {given} of {num_ranks} ranks", f"{SUM}, and two ranks or more"
            )
        yield RankSum(node.name, node.output[0], num_ranks)


def _name_nodes(model: onnx.ModelProto) -> None:
    """Layers of an engine are found by the names of their nodes."""
    taken = {node.name for node in model.graph.node}
    seen: set[str] = set()
    for i, node in enumerate(model.graph.node):
        if not node.name or node.name in seen:
            name = f"{node.op_type}_{i}"
            while name in taken:
                name += "_"
            node.name = name
            taken.add(name)
        seen.add(node.name)


def _show(shape: tuple[int | str, ...]) -> str:
    return f"[{', '.join(str(size) for size in shape)}]"


def _refused(found: str, needed: str) -> TensorRTError:
    return TensorRTError(found, needed, _DO)
