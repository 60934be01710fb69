"""How mixtures of experts reorder tokens, and what torch's operators do along a dim of tokens.

What specc's own do is in their table (`specc.kernels.operators`).

In a mixture, rows are sorted by expert, multiplied in groups and put back. Each step keeps one row
a token, in an order that a sort defines; the indices that lead there and back are numbers about the
whole pass, so their only use is as indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import fx

from specc.kernels.operator import Product, SortedRows
from specc.passes.program import bind_args

UNKNOWN = object()  # no step of routing

# roles of numbers
_PERMUTATION = "permutation"  # places before the sort; detail: entries a token where they point
_INVERSE = "inverse"  # places after the sort; detail: the sort
_PLACES = "places"  # 0, 1, 2, …; detail: None where they start or step otherwise
_BLANK = "blank"  # not written yet
_EXPERTS = "experts"  # sorted expert ids
CHOICES = "choices"  # [rows, experts]: whether the row's id is this expert
# the same numbers in the same order, under another shape or dtype
CONVERSIONS = frozenset(("to", "_to_copy", "type_as", "contiguous", "clone", "alias", "detach"))
VIEWS = frozenset(("view", "reshape", "_unsafe_view", "flatten", "unflatten"))
MOVES = frozenset(
    (
        "unsqueeze", "squeeze", "transpose", "permute", "movedim", "swapaxes", "t", "mT", "numpy_T",
        "view_as_complex", "view_as_real",
    )
)  # fmt: skip
SAME = CONVERSIONS | VIEWS | MOVES
# along dims named by the arguments `dim`, `dims` or `dimension`; without one, along all
ALONG = frozenset(
    (
        "softmax", "_softmax", "log_softmax", "_log_softmax", "logsumexp", "sum", "mean", "prod",
        "max", "min", "amax", "amin", "argmax", "argmin", "median", "kthvalue", "topk",
        "all", "any", "count_nonzero", "norm", "linalg_vector_norm",
        "var", "std", "var_mean", "std_mean",
        "sort", "argsort", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "diff",
        "flip", "roll", "glu", "cat", "chunk", "split", "split_with_sizes", "unbind", "narrow",
        "select", "slice", "index_select", "gather", "scatter", "repeat_interleave", "unfold",
        "slice_scatter",
    )
)  # fmt: skip
REDUCTIONS = frozenset(("max", "min", "amax", "amin", "sum", "mean", "prod"))
# along the last dimension where no shape says otherwise
NORMS = frozenset(("layer_norm", "native_layer_norm", "rms_norm"))
# factors of products, and what is added to them
FACTORS = {
    "linear": Product("input", "weight", "bias"),
    "mm": Product("self", "mat2", "", True),
    "bmm": Product("self", "mat2", "", True),
    "matmul": Product("self", "other", "", True),
    "addmm": Product("mat1", "mat2", "self", True),
    "baddbmm": Product("batch1", "batch2", "self", True),
}
# element by element, and yet without the tag; `repeat` of tokens would change their number
POINTWISE = frozenset(
    (
        "floor_divide", "hardswish", "polar", "log_sigmoid", "__and__", "__or__", "repeat", "stack",
        "zeros_like", "ones_like", "full_like",
    )
)  # fmt: skip
# may take the number of tokens as an argument, which can only name a size of the result
SIZED = VIEWS | {"expand"}


@dataclass(frozen=True)
class Tokens:
    """A tensor that counts tokens along one dimension.

    Args:
        dim: that dimension.
        ndim: dimensions of the tensor.
        scale: entries a token.
        order: None in the order of the pass, the node that sorted them, or `logit_rows`.
        role: what its numbers are, where they are not a token's own data.
        detail: see the roles.
        is_position: made of positions alone.
    """

    dim: int
    ndim: int
    scale: int
    order: fx.Node | str | None
    role: str = ""
    detail: Any = None
    is_position: bool = False

    @property
    def right(self) -> int:
        """The dimension counted from the right: -1 is the last."""
        return self.dim - self.ndim

    @property
    def is_place(self) -> bool:
        """Whether its numbers depend on where tokens stand in the pass."""
        return self.role in (_PERMUTATION, _INVERSE, _PLACES, _BLANK)


@dataclass(frozen=True)
class Counts:
    """[experts]: rows that chose each expert in this sort, or their running sum."""

    order: fx.Node
    are_ends: bool


# None: depends on no token; a string names another kind of input
State = Tokens | Counts | str | None


def route(node: fx.Node, name: str, states: Mapping[fx.Node, Any]) -> Any:
    """The state that a step of routing gives a node, or UNKNOWN."""
    step = _STEPS.get(name)
    return UNKNOWN if step is None else step(node, states)


def _arange(node: fx.Node, states: Mapping[fx.Node, Any]) -> Any:
    size = node.meta["val"].shape[0]
    is_plain = len(node.args) == 1
    if isinstance(size, int):
        return UNKNOWN
    return Tokens(0, 1, 0, None, _PLACES, size if is_plain else None)


def _sort(node: fx.Node, states: Mapping[fx.Node, Any]) -> Any:
    """Sorted values and permutation; sorting a permutation gives its inverse."""
    state, bound = states[node.args[0]], bind_args(node)
    if not _is_vector(state) or bound["dim"] not in (0, -1):
        return UNKNOWN
    if state.role == _PERMUTATION and state.detail == state.scale and not bound["descending"]:
        inverse = replace(state, order=None, role=_INVERSE, detail=state.order)
        return inverse if name_of(node) == "argsort" else [replace(inverse, role=_PLACES), inverse]
    is_integer = not node.args[0].meta["val"].dtype.is_floating_point  # type: ignore[union-attr]
    if state.role or state.order is not None or not is_integer:
        return UNKNOWN
    role = "" if bound["descending"] else _EXPERTS
    sorted_ids = replace(state, order=node, role=role, is_position=False)
    permutation = replace(sorted_ids, role=_PERMUTATION, detail=state.scale)
    return permutation if name_of(node) == "argsort" else [sorted_ids, permutation]


def _floor_divide(node: fx.Node, states: Mapping[fx.Node, Any]) -> Any:
    """Places of rows become places of their tokens."""
    state, divisor = states.get(node.args[0]), node.args[1]
    if not isinstance(state, Tokens) or state.role != _PERMUTATION or type(divisor) is not int:
        return UNKNOWN
    if divisor < 1 or state.detail % divisor:
        return UNKNOWN
    return replace(state, detail=state.detail // divisor)


def _index(node: fx.Node, states: Mapping[fx.Node, Any]) -> Any:
    """Rows into the order of the sort by its permutation, and back by its inverse."""
    source, indices = states[node.args[0]], node.args[1]
    if len(indices) != 1 or not isinstance(source, Tokens) or source.dim or source.is_place:
        return UNKNOWN
    index = states.get(indices[0])
    if not _is_vector(index):
        return UNKNOWN
    into = index.role == _PERMUTATION and (source.order, source.scale) == (None, index.detail)
    back = index.role == _INVERSE and (source.order, source.scale) == (index.detail, index.scale)
    if not into and not back:
        return UNKNOWN
    return replace(source, scale=index.scale, order=index.order, role="", detail=None)


def _empty_like(node: fx.Node, states: Mapping[fx.Node, Any]) -> Any:
    state = states[node.args[0]]
    return replace(state, role=_BLANK) if isinstance(state, Tokens) else UNKNOWN


def _index_put(node: fx.Node, states: Mapping[fx.Node, Any]) -> Any:
    """Counting up at the places of a permutation gives its inverse."""
    bound = bind_args(node)
    if len(bound["indices"]) != 1 or bound["accumulate"]:
        return UNKNOWN
    blank, values = states[bound["self"]], states[bound["values"]]
    permutation = states.get(bound["indices"][0])
    if not (_is_vector(permutation) and _is_vector(blank) and _is_vector(values)):
        return UNKNOWN
    if permutation.role != _PERMUTATION or permutation.detail != permutation.scale:
        return UNKNOWN
    if values.role != _PLACES or values.detail is None:
        return UNKNOWN
    if blank.scale != permutation.scale or values.scale != permutation.scale:
        return UNKNOWN
    return replace(permutation, order=None, role=_INVERSE, detail=permutation.order)


def _eq(node: fx.Node, states: Mapping[fx.Node, Any]) -> Any:
    """Compare sorted ids [rows, 1] with the numbers of all experts."""
    ids, experts = states[node.args[0]], node.args[1]
    if not isinstance(ids, Tokens) or ids.role != _EXPERTS or not isinstance(experts, fx.Node):
        return UNKNOWN
    is_range = experts.target is torch.ops.aten.arange.default and len(experts.args) == 1
    if not is_range or states[experts] is not None or (ids.dim, ids.ndim) != (0, 2):
        return UNKNOWN
    return replace(ids, role=CHOICES)


def _sum(node: fx.Node, states: Mapping[fx.Node, Any]) -> Any:
    state, bound = states[node.args[0]], bind_args(node)
    if not isinstance(state, Tokens) or state.role != CHOICES or bound.get("dim") != [0]:
        return UNKNOWN
    if (state.dim, state.ndim, node.meta["val"].dim()) != (0, 2, 1):
        return UNKNOWN
    return Counts(state.order, are_ends=False)  # type: ignore[arg-type]


def _cumsum(node: fx.Node, states: Mapping[fx.Node, Any]) -> Any:
    state = states[node.args[0]]
    is_count = isinstance(state, Counts) and not state.are_ends and node.args[1] in (0, -1)
    return replace(state, are_ends=True) if is_count else UNKNOWN


def route_sorted(node: fx.Node, rule: SortedRows, states: Mapping[fx.Node, Any]) -> Any:
    """Rows in the order of a sort, each with the weights of the expert that the sort found."""
    bound = bind_args(node)
    rows, weights, ends = (states[bound[name]] for name in (rule.rows, rule.weight, rule.ends))
    is_sorted = isinstance(rows, Tokens) and isinstance(ends, Counts) and rows.order is ends.order
    if not is_sorted or rows.is_place or (rows.dim, rows.ndim) != (0, 2):
        return UNKNOWN
    if not ends.are_ends or weights is not None:
        return UNKNOWN
    return replace(rows, role="", detail=None)


def name_of(node: fx.Node) -> str:
    """Name of an operator without namespace and overload."""
    return node.target._schema.name.partition("::")[2]  # type: ignore[union-attr]


def _is_vector(state: Any) -> TypeGuard[Tokens]:
    return isinstance(state, Tokens) and state.ndim == 1


_STEPS = {
    "arange": _arange,
    "sort": _sort,
    "argsort": _sort,
    "floor_divide": _floor_divide,
    "index": _index,
    "empty_like": _empty_like,
    "index_put": _index_put,
    "eq": _eq,
    "sum": _sum,
    "cumsum": _cumsum,
}


def outputs_of(node: fx.Node) -> Iterator[Any]:
    """The values of a node, one or several."""
    value = node.meta["val"]
    yield from value if isinstance(value, list | tuple) else (value,)


def is_in_order(state: State) -> TypeGuard[Tokens]:
    """Whether there is one entry for each token of the pass, which says nothing of its place."""
    if not isinstance(state, Tokens) or state.is_place:
        return False
    return (state.scale, state.order) == (1, None)


def is_whole(node: fx.Node, name: str) -> bool:
    """Whether a slice takes everything."""
    if name != "slice":
        return False
    bound = bind_args(node)
    sizes = [item.meta["val"].shape[bound["dim"]] for item in (node, bound["self"])]
    return bound["start"] in (None, 0) and bound["step"] == 1 and str(sizes[0]) == str(sizes[1])
