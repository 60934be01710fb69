"""Which calls of aten's operators the library's kernels take; others are torch's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import fx

# numbers that kernels of aten's operators do not compute with
_OTHER_NUMBERS = re.compile(r"(?<!b)float16|float64|float8|complex")
_WHOLE = ("int", "uint", "bool")
# SPECC_MOST_RESULTS of kernels/cpu/specc.h
_MOST_PARTS = 4


def takes(node: fx.Node, name: str) -> bool:
    """Whether the library's kernel of this name takes a call.

    Args:
        node: the call, of a stored graph.
        name: such as `aten::add.Tensor`, of an operator that the library has.
    """
    if not name.startswith("aten::"):
        return True
    if any(_OTHER_NUMBERS.search(_described(item)) for item in (node, *node.all_input_nodes)):
        return False
    form = _FORMS.get(name)
    return form is None or form(node, _bound(node))


def _bound(node: Any) -> dict[str, Any]:
    """Arguments by the names of the schema, defaults filled in."""
    given = dict(enumerate(node.args))
    return {
        x.name: given[i] if i in given else node.kwargs.get(x.name, x.default_value)
        for i, x in enumerate(node.target._schema.arguments)
    }


def _described(node: Any) -> str:
    """Dtype and sizes of a value, as the graph's file has them; nothing where it has none."""
    return str(node.meta.get("described", "")) if isinstance(node, fx.Node) else ""


def _num_dims(node: fx.Node) -> int:
    sizes = _described(node).partition("[")[2].rstrip("]")
    return sizes.count(",") + 1 if sizes else 0


def _is_whole(node: Any) -> bool:
    return _described(node).startswith(_WHOLE)


def _one_row_of_indices(_: fx.Node, bound: dict[str, Any]) -> bool:
    indices = bound["indices"]
    return len(indices) == 1 and _described(indices[0]).startswith("int")


def _over_the_last(_: fx.Node, bound: dict[str, Any]) -> bool:
    return bound["dim"] in (-1, _num_dims(bound["self"]) - 1)


def _over_one(_: fx.Node, bound: dict[str, Any]) -> bool:
    return len(bound["normalized_shape"]) == 1


def _is_power(_: fx.Node, bound: dict[str, Any]) -> bool:
    return not _is_whole(bound["self"]) or bound["exponent"] in (2, 3)


def _few_parts(node: fx.Node, _: dict[str, Any]) -> bool:
    asked = [user.args[1] for user in node.users if len(user.args) == 2]
    last = max((index for index in asked if isinstance(index, int)), default=0)
    return max(_described(node).count("["), last + 1) <= _MOST_PARTS


def _of_one_dtype(_: fx.Node, bound: dict[str, Any]) -> bool:
    return len({_described(item).partition("[")[0] for item in bound["tensors"]} - {""}) <= 1


_FORMS: dict[str, Callable[[fx.Node, dict[str, Any]], bool]] = {
    "aten::index.Tensor": _one_row_of_indices,
    "aten::index_put": lambda node, x: _one_row_of_indices(node, x) and not x["accumulate"],
    "aten::index_put_": lambda node, x: _one_row_of_indices(node, x) and not x["accumulate"],
    "aten::split.Tensor": _few_parts,
    "aten::split.sizes": _few_parts,
    "aten::split_with_sizes": _few_parts,
    "aten::chunk": _few_parts,
    "aten::unbind.int": _few_parts,
    "aten::softmax.int": _over_the_last,
    "aten::log_softmax.int": _over_the_last,
    "aten::layer_norm": _over_one,
    "aten::rms_norm": _over_one,
    "aten::pow.Tensor_Scalar": _is_power,
    "aten::cat": _of_one_dtype,
    "aten::stack": _of_one_dtype,
    "aten::cumsum": lambda _, x: _is_whole(x["self"]),
    "aten::argmax": lambda _, x: x["dim"] is not None,
    "aten::amax": lambda _, x: len(x["dim"]) == 1,
    "aten::arange": lambda _, x: isinstance(x["end"], int | fx.Node),
}
