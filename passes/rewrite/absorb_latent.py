"""Cache the latent that keys and values are expanded from, in place of what it is expanded to."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import Any

import torch
from torch import fx

from specc.artifact.kv_rows import INT8, row_bytes
from specc.artifact.mla_cache import LATENT
from specc.errors import ConfigError
from specc.kernels import ops
from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.facts import attention_is_a_tree
from specc.passes.program import (
    AttentionLayer,
    Program,
    bind_args,
    emit_call,
    replace,
)
from specc.passes.rewrite.columns import columns
from specc.passes.step.step_graph import TARGET

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_COPIES = (aten.contiguous.default, aten.clone.default)


class AbsorbLatent(Pass):
    """Attention over keys and values of each head → over the latent that they are expanded from.

    Where keys are [c · Wk of each head, a part that all heads share] and values are c · Wv of each
    head, of the same latent c [T, R], a score is

        (q · (c Wkᵀ)) + q' · shared = (q Wk) · c + q' · shared,

    so queries [q Wk, q'] meet one head of keys [c, shared], values are c, and Wv follows attention.
    The cache then holds c and the shared part, once for all heads; values are the first R columns
    of keys, and rows in the type of the model hold them once (`AttentionLayer.values_in_keys`).
    Scores and outputs are the same sums in another order; the scale stays.

    Wk and Wv are views of the weights that expanded the latent, which keep their names and rows,
    and are held in the model's type: products of heads read no quantized weights. Where a
    checkpoint has integers of them that takes more memory, as much as the cache saves within about
    R tokens.

    Args:
        choice: see `specc.artifact.mla_cache`, `latent` or `auto`.
        kv_cache_dtype: see `specc.artifact.kv_rows`.
        num_ranks: that share the model. The latent is whole on each of them.
    Raises:
        ConfigError: `latent` is asked for, and the target has no layer for it.
    Source: DeepSeek-V2, arXiv:2405.04434 §2.1 and appendix C.
    """

    requires = (attention_is_a_tree,)
    ensures = (attention_is_a_tree,)

    def __init__(self, choice: str, kv_cache_dtype: str, num_ranks: int = 1) -> None:
        self._choice, self._kv_cache_dtype = choice, kv_cache_dtype
        self._num_ranks = num_ranks

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for number, node in enumerate(program.calls(ops.tree_attention)):
            if (shared := _shared_keys(node)) is None:
                continue
            with result.attempt(node.name):
                found = _latent_of(program, node, shared)
                layer = self._layer_over(program.layers[number], found)
                if self._choice != LATENT:
                    self._require_gain(program, number, layer, found)
                _rewrite(program, node, found)
                program.layers[number] = layer
        program.graph.eliminate_dead_code()
        if self._choice == LATENT and program.name == TARGET and not result.rewrites:
            reasons = "; ".join(dict.fromkeys(item.reason for item in result.declined))
            raise ConfigError(
                f"--mla-cache {LATENT}, and no layer of {program.name} whose keys and values are"
                " expanded from one latent" + (f" ({reasons})" if reasons else ""),
                "a model with multi-head latent attention",
                "leave out --mla-cache",
            )
        return result

    def _layer_over(self, layer: AttentionLayer, found: _Latent) -> AttentionLayer:
        # a row of int8 has a scale of its own, which the whole row decides
        return replace_fields(
            layer,
            num_kv_heads=1,
            head_dim=found.size + sum(_width(part.source) for part in found.shared),
            value_dim=found.size,
            values_in_keys=self._kv_cache_dtype != INT8,
        )

    def _require_gain(
        self, program: Program, number: int, layer: AttentionLayer, found: _Latent
    ) -> None:
        """Raises NoMatch: a token's rows would not be fewer bytes."""
        before, dtype = program.layers[number], found.latent.meta["val"].dtype
        kind = (dtype, self._kv_cache_dtype)
        # heads are cut for ranks, where their number allows it; the latent is not
        ranks = self._num_ranks if before.num_kv_heads % self._num_ranks == 0 else 1
        sizes = [
            x.num_kv_heads * sum(row_bytes(width, *kind) for width in x.cached_columns)
            for x in (before, layer)
        ]
        sizes[0] //= ranks
        if sizes[1] >= sizes[0]:
            raise NoMatch(
                f"a token would take {sizes[1]} bytes of cache on each rank, and takes {sizes[0]}"
            )


@dataclass(frozen=True)
class _Shared:
    """Part of a key that all heads have: [1, 1, T, r], at this column of the key."""

    source: fx.Node
    first: int


@dataclass(frozen=True)
class _Keys:
    """Operands of attention whose keys have a part that all heads share.

    Args:
        own: the other part [1, H, T, n].
        first: its column.
        shared: in order.
    """

    own: fx.Node
    first: int
    shared: tuple[_Shared, ...]


@dataclass(frozen=True)
class _Expanded:
    """[1, H, T, last - first]: columns of what a weight [H · width, R] makes of each token."""

    latent: fx.Node
    weight: fx.Node
    num_heads: int
    width: int
    first: int
    last: int


@dataclass(frozen=True)
class _Latent:
    """What attention reads: a latent, and two weights that expand it."""

    keys: _Expanded
    values: _Expanded
    own_first: int
    shared: tuple[_Shared, ...]

    @property
    def latent(self) -> fx.Node:
        return self.keys.latent

    @property
    def size(self) -> int:
        return _width(self.latent)


def _shared_keys(attention: fx.Node) -> _Keys | None:
    """The parts of keys that are one head's and shared by all; None where they are not made so."""
    key = _of_one_sequence(bind_args(attention)["k"])
    if key is None or key.target is not aten.cat.default or key.meta["val"].dim() != 4:
        return None
    bound = bind_args(key)
    if bound["dim"] % 4 != 3 or key.meta["val"].shape[1] == 1:
        return None
    own, shared, first = [], [], 0
    for part in bound["tensors"]:
        if (source := _of_all_heads(part)) is not None:
            shared.append(_Shared(source, first))
        else:
            own.append((part, first))
        first += _width(part)
    if len(own) != 1 or not shared:
        return None
    return _Keys(*own[0], tuple(shared))


def _of_all_heads(part: fx.Node) -> fx.Node | None:
    """The [1, 1, T, r] that is spread over heads."""
    if part.target is not aten.expand.default:
        return None
    source: fx.Node = part.args[0]
    own, spread = source.meta["val"].shape, part.meta["val"].shape
    is_one = len(own) == 4 and str(own[1]) == "1"
    rest = [[str(shape[dim]) for dim in (0, 2, 3)] for shape in (own, spread[-4:])]
    return source if is_one and len(spread) == 4 and rest[0] == rest[1] else None


def _latent_of(program: Program, attention: fx.Node, parts: _Keys) -> _Latent:
    """What keys and values are expanded from.

    Raises:
        NoMatch: not from one latent, or not by a weight of each head alone.
    """
    bound = bind_args(attention)
    value = _of_one_sequence(bound["v"])
    keys = _expanded(program, parts.own, "keys")
    values = _expanded(program, value, "values")
    if keys.latent is not values.latent:
        raise NoMatch("keys and values are not expanded from one latent")
    num_heads = int(bound["q"].meta["val"].shape[0])
    if not keys.num_heads == values.num_heads == num_heads:
        raise NoMatch(f"{num_heads} heads of queries read {keys.num_heads} of keys")
    items = (bound["q"], keys.latent, keys.weight, values.weight, *(x.source for x in parts.shared))
    dtypes = {str(item.meta["val"].dtype) for item in items}
    if len(dtypes) > 1:
        raise NoMatch(f"its operands are of {', '.join(sorted(dtypes))}")
    return _Latent(keys, values, parts.first, parts.shared)


def _of_one_sequence(node: fx.Node) -> fx.Node | None:
    """The [1, H, T, D] of an operand [H, T, D]."""
    return node.args[0] if node.target is aten.squeeze.dim and node.args[1] == 0 else None


def _expanded(program: Program, node: fx.Node | None, what: str) -> _Expanded:
    """Follow columns of heads back to the projection that makes them.

    Raises:
        NoMatch: there is none, or it is not a product with a parameter alone.
    """
    if node is None:
        raise NoMatch(f"its {what} are not those of one sequence")
    first, width, is_turned = 0, _width(node), False
    while True:
        if (found := columns(node)) is not None:
            node, first = found[0], first + found[1]
        elif node.target is aten.transpose.int and _turns_heads(node):
            node, is_turned = node.args[0], not is_turned
        elif node.target in _COPIES:
            node = node.args[0]
        else:
            break
    linear = node.args[0] if node.target in _VIEWS else None
    if not is_turned or linear is None or linear.target is not aten.linear.default:
        raise NoMatch(f"its {what} are not columns of a projection to heads")
    bound, sizes, rows = bind_args(linear), node.meta["val"].shape, linear.meta["val"].shape
    # [1, T, H, w] of [..., T, H · w]
    leading = [str(size) for size in rows[:-2]]
    is_split = len(sizes) == 4 and str(sizes[0]) == "1" and set(leading) <= {"1"}
    if not is_split or str(sizes[1]) != str(rows[-2]) or sizes[2] * sizes[3] != rows[-1]:
        raise NoMatch(f"its {what} are not the heads of a projection, one after the other")
    if bound["bias"] is not None:
        raise NoMatch(f"the projection to its {what} has a bias")
    if bound["weight"].target not in program.weights:
        raise NoMatch(f"the weight of the projection to its {what} is computed")
    place = first, first + width
    return _Expanded(bound["input"], bound["weight"], int(sizes[2]), int(sizes[3]), *place)


def _turns_heads(node: fx.Node) -> bool:
    """Whether a transpose of four dimensions exchanges heads and tokens."""
    bound, rank = bind_args(node), node.meta["val"].dim()
    return rank == 4 and {bound["dim0"] % rank, bound["dim1"] % rank} == {1, 2}


def _rewrite(program: Program, attention: fx.Node, found: _Latent) -> None:
    graph, bound = program.graph, bind_args(attention)
    q, keys, values = bound["q"], found.keys, found.values
    own_width = keys.last - keys.first
    with graph.inserting_before(attention):
        # [H, T, n] · [H, n, R]
        own = _query_columns(graph, q, found.own_first, own_width)
        absorbed = emit_call(graph, aten.bmm.default, own, _rows_of_heads(graph, keys))
        rest = [_query_columns(graph, q, x.first, _width(x.source)) for x in found.shared]
        queries = emit_call(graph, aten.cat.default, [absorbed, *rest], -1)
        latent = _one_head(graph, found.latent)
        shared = [_one_head(graph, x.source) for x in found.shared]
        row = emit_call(graph, aten.cat.default, [latent, *shared], -1)
        for name, width in (("k_cache", _width(row)), ("v_cache", found.size)):
            value = bound[name].meta["val"]
            bound[name].meta["val"] = value.new_empty((*value.shape[:2], 1, width))
        others = attention.args[3:]
        attended = emit_call(
            graph, ops.tree_attention, queries, row, latent, *others, **attention.kwargs
        )
        # [H, T, R] · [H, R, DV]
        rows = _rows_of_heads(graph, values)
        if rows.meta["val"].dtype != torch.float32:
            # products of halves with such a view take ten times as long, of few rows
            rows = emit_call(graph, aten.contiguous.default, rows)
        up = emit_call(graph, aten.transpose.int, rows, 1, 2)
        output = emit_call(graph, aten.bmm.default, attended, up)
    for node in (attended, output):
        node.meta["nn_module_stack"] = attention.meta.get("nn_module_stack")
    replace(attention, output)


def _rows_of_heads(graph: fx.Graph, item: _Expanded) -> fx.Node:
    """Of a weight [H · width, R], the rows of these columns of each head: [H, n, R], a view."""
    size = _width(item.weight)
    heads = emit_call(graph, aten.view.default, item.weight, [item.num_heads, item.width, size])
    if (item.first, item.last) == (0, item.width):
        return heads
    return emit_call(graph, aten.slice.Tensor, heads, 1, item.first, item.last)


def _query_columns(graph: fx.Graph, q: fx.Node, first: int, width: int) -> fx.Node:
    """Columns of queries [H, T, D]; what they were joined from, where that is the same."""
    whole = _of_one_sequence(q)
    if whole is not None and whole.target is aten.cat.default:
        start, parts = 0, bind_args(whole)
        for part in parts["tensors"] if parts["dim"] % 4 == 3 else ():
            if (start, _width(part)) == (first, width):
                return emit_call(graph, aten.squeeze.dim, part, 0)
            start += _width(part)
    return emit_call(graph, aten.slice.Tensor, q, -1, first, first + width)


def _one_head(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """[1, T, D] of [T, D], [1, T, D] or [1, 1, T, D]."""
    value = node.meta["val"]
    if value.dim() == 4:
        return emit_call(graph, aten.squeeze.dim, node, 0)
    return emit_call(graph, aten.unsqueeze.default, node, 0) if value.dim() == 2 else node


def _width(node: fx.Node) -> int:
    return int(node.meta["val"].shape[-1])


def values_in_keys(attention: fx.Node) -> bool:
    """Whether each value is the first columns of its key, as the graph says by itself."""
    bound: dict[str, Any] = bind_args(attention)
    key = bound["k"]
    if key.target is not aten.cat.default:
        return False
    parts = bind_args(key)
    return parts["tensors"][0] is bound["v"] and parts["dim"] % key.meta["val"].dim() == 2
