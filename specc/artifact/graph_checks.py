"""What a stored graph may do: calls of known operators, with arguments that these can take.

A graph of an engine runs in the process that loads it. Operators check the tensors that they are
given, but not that somebody means well: sizes are what the graph says, and a few of torch's
operators read beside what they are given. So a graph is looked at before it runs: the operator is
one of `graph_operators`, each argument is of the kind that its schema names, and numbers are no
larger than any model has them.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from specc.artifact.graph_operators import is_known
from specc.artifact.quantized_layout import QuantizedLayout, is_order

# of a graph: the largest models have some thousand nodes
MOST_NODES = 1 << 16
# elements of what a graph makes of numbers alone: masks and tables of positions have some million
MOST_ELEMENTS = 1 << 28
# of an argument that is a list: dimensions, or tensors that are joined
_MOST_ITEMS = 1 << 12
# bits of a size, and of what is computed with sizes: torch takes 63, Python any number
_SIZE_BITS, _MOST_BITS = 31, 256
_INT64 = range(-(1 << 63), 1 << 63)
# what operators of specc are told: rows, columns, nodes, bits
_OWN_NUMBERS = range(-1, (1 << 31) + 1)

_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e8m0fnu",
        "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    )
)  # fmt: skip
_MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format)
_DEVICES = ("cpu", "meta", "cuda")
# `trunc` of the least integer by -1 ends the process
_WORDS = (
    "none", "tanh", "floor", "constant", "silu", "gelu", "gelu_tanh", "relu", "clamped", "softmax",
    "sigmoid", "chosen", "halves", "neighbors", "apart", "",
)  # fmt: skip

# operator → arguments that say how much it makes
_MAKERS = {
    **dict.fromkeys(
        ("full", "zeros", "ones", "empty", "new_zeros", "new_ones", "new_full", "new_empty"),
        ("size",),
    ),
    "repeat": ("repeats",),
    "repeat_interleave": ("repeats",),
    "arange": ("start", "end"),
    "constant_pad_nd": ("pad",),
    "pad": ("pad",),
    "one_hot": ("num_classes",),
}
_ARITHMETIC = {
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg,
    torch.sym_max, torch.sym_min,
}  # fmt: skip
_COMPARISONS = {operator.le, operator.lt, operator.ge, operator.gt, operator.eq}


class Kind(enum.Enum):
    TENSOR = "a tensor"
    TENSORS = "several tensors"
    NUMBER = "a number"
    BOOL = "true or false"
    NOTHING = "nothing"


def check_graph(graph: fx.Graph) -> None:
    """Look at all calls of a graph, in order.

    Raises:
        ValueError: more nodes than any program has, an operator that no program calls, or an
            argument that it does not take.
    """
    if len(graph.nodes) > MOST_NODES:
        raise ValueError(f"{len(graph.nodes)} nodes, at most {MOST_NODES}")
    checks = _Checks()
    for node in graph.nodes:
        try:
            checks.add(node)
        except ValueError as error:
            raise ValueError(f"node {node.name}: {error}") from None


class _Checks:
    """Kinds of the values so far, and the bits of those that are numbers."""

    def __init__(self) -> None:
        self._kinds: dict[fx.Node, Kind] = {}
        self._bits: dict[fx.Node, int] = {}

    def add(self, node: fx.Node) -> None:
        kind = Kind.TENSOR
        if node.op == "call_function":
            kind = self._call(node)
        elif node.op == "call_module":
            for item in (*node.args, *node.kwargs.values()):
                self._expect(item is None or self._is(item, Kind.TENSOR), "an input", item)
        self._kinds[node] = kind

    def _call(self, node: fx.Node) -> Kind:
        target: Any = node.target
        if not is_known(target):
            raise ValueError(f"calls {target}, which no program does")
        if not isinstance(target, torch._ops.OpOverload):
            return self._python(node)
        schema = target._schema
        bound = _bind(schema, node.args, node.kwargs)
        is_own = target.namespace == "specc"
        for argument in schema.arguments:
            if argument.name in bound:
                value = bound[argument.name]
                where = f"{argument.name} of {target}"
                self._argument(str(argument.real_type), value, where)
                if is_own:
                    for item in _integers(value):
                        self._expect(item in _OWN_NUMBERS, where, item)
        makes = _MAKERS.get(schema.name.partition("::")[2], ())
        _check_made(str(target), [bound.get(name) for name in makes])
        return self._returned(node, [str(item.real_type) for item in schema.returns])

    def _returned(self, node: fx.Node, types: Sequence[str]) -> Kind:
        if not types:
            return Kind.NOTHING
        if types == ["Tensor"]:
            return Kind.TENSOR
        if all(kind in ("Tensor", "List[Tensor]") for kind in types):
            return Kind.TENSORS
        if types in (["int"], ["SymInt"]):
            self._bits[node] = _SIZE_BITS
            return Kind.NUMBER
        raise ValueError(f"returns {', '.join(types)}")

    def _python(self, node: fx.Node) -> Kind:
        """Arithmetic with sizes, and parts of values."""
        if node.kwargs:
            raise ValueError(f"{node.target} with names of arguments")
        if node.target is operator.getitem:
            source, index = node.args
            is_tensor = self._is(source, Kind.TENSOR)
            self._expect(is_tensor or self._is(source, Kind.TENSORS), "source", source)
            self._index(index, is_whole=is_tensor)
            return Kind.TENSOR
        bits = [self._bits_of(item) for item in node.args]
        if len(bits) != (1 if node.target is operator.neg else 2):
            raise ValueError(f"{node.target} of {len(bits)} numbers")
        if node.target in (operator.floordiv, operator.mod) and node.args[1] == 0:
            raise ValueError("divides by 0")
        if node.target in _COMPARISONS:
            return Kind.BOOL
        assert node.target in _ARITHMETIC, "all that are known"
        self._bits[node] = sum(bits) if node.target is operator.mul else max(bits) + 1
        if self._bits[node] > _MOST_BITS:
            raise ValueError(f"a number of {self._bits[node]} bits, at most {_MOST_BITS}")
        return Kind.NUMBER

    def _bits_of(self, item: Any) -> int:
        if isinstance(item, fx.Node) and item in self._bits:
            return self._bits[item]
        self._expect(type(item) is int and item in _INT64, "a number", item)
        return int(item.bit_length())

    def _index(self, index: Any, is_whole: bool) -> None:
        items = index if is_whole and isinstance(index, tuple | list) else (index,)
        for item in items:
            if is_whole and isinstance(item, slice):
                parts = (item.start, item.stop, item.step)
                fits = all(part is None or self._is_integer(part) for part in parts)
            else:
                fits = self._is_integer(item) or (is_whole and item is None)
            self._expect(fits, "an index", item)

    def _argument(self, kind: str, value: Any, where: str) -> None:
        """Raises ValueError: a value that is not of the type of a schema."""
        while kind.startswith("Optional["):
            if value is None:
                return
            kind = kind[len("Optional[") : -1]
        if kind.startswith("List["):
            inner = kind[len("List[") : -1]
            if inner in ("Tensor", "Optional[Tensor]") and self._is(value, Kind.TENSORS):
                return
            if inner == "int" and self._is_integer(value):
                return  # one for all dimensions
            self._expect(isinstance(value, list | tuple), where, value)
            if len(value) > _MOST_ITEMS:
                raise ValueError(f"{where} has {len(value)} items, at most {_MOST_ITEMS}")
            for item in value:
                self._argument(inner, item, where)
            return
        self._expect(self._fits(kind, value), where, value)

    def _fits(self, kind: str, value: Any) -> bool:
        if kind == "Tensor":
            # torch takes numbers for tensors
            return self._is(value, Kind.TENSOR) or self._is_number(value)
        if kind in ("int", "SymInt"):
            return self._is_integer(value)
        if kind in ("number", "float"):
            return self._is_number(value) or self._is(value, Kind.NUMBER)
        if kind == "bool":
            return type(value) is bool
        if kind == "str":
            return type(value) is str and (value in _WORDS or is_order(value) or _is_layout(value))
        if kind == "ScalarType":
            return value in _DTYPES
        if kind == "Layout":
            return value is torch.strided
        if kind == "Device":
            return isinstance(value, torch.device) and value.type in _DEVICES
        return kind == "MemoryFormat" and value in _MEMORY_FORMATS

    def _is(self, item: Any, kind: Kind) -> bool:
        return isinstance(item, fx.Node) and self._kinds.get(item) is kind

    def _is_integer(self, item: Any) -> bool:
        return (type(item) is int and item in _INT64) or self._is(item, Kind.NUMBER)

    def _is_number(self, item: Any) -> bool:
        return isinstance(item, float | bool) or self._is_integer(item)

    def _expect(self, fits: bool, where: str, value: Any) -> None:
        if not fits:
            kind = self._kinds.get(value) if isinstance(value, fx.Node) else None
            raise ValueError(f"{where} is {kind.value if kind else repr(value)[:60]}")


def _is_layout(name: str) -> bool:
    try:
        QuantizedLayout.named(name)
    except ValueError:
        return False
    return True


def _bind(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name → argument; raises ValueError: one too many, one twice, one that there is not."""
    places = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    if len(args) > len(places):
        raise ValueError(f"{len(args)} arguments for {schema.name}, which takes {len(places)}")
    bound = dict(zip(places, args, strict=False))
    names = {argument.name for argument in schema.arguments}
    if wrong := [name for name in kwargs if name in bound or name not in names]:
        raise ValueError(f"the argument {wrong[0]} of {schema.name}")
    bound |= kwargs
    for argument in schema.arguments:
        if argument.name not in bound and not argument.has_default_value():
            raise ValueError(f"no {argument.name} for {schema.name}")
    return bound


def _integers(value: Any) -> list[int]:
    items = value if isinstance(value, list | tuple) else (value,)
    return [item for item in items if type(item) is int]


def _check_made(target: str, values: Sequence[Any]) -> None:
    """Raises ValueError: more elements than any program makes of numbers."""
    found = [abs(item) for value in values for item in _numbers(value)]
    most = max(found, default=0) if target.startswith("aten.arange") else math.prod(found)
    if not all(number <= MOST_ELEMENTS for number in (most, *found)):
        raise ValueError(f"{target} makes {most:.3g} elements, at most {MOST_ELEMENTS}")


def _numbers(value: Any) -> list[float]:
    items = value if isinstance(value, list | tuple) else (value,)
    return [item for item in items if type(item) in (int, float) and item not in (0, -1)]
