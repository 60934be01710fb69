"""Cache the latent that keys and values are expanded from, in place of what it is expanded to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as replace_fields
from typing import Any

import torch
from torch import fx

from specc.artifact.kv_rows import AUTO, row_bytes
from specc.artifact.mla_cache import LATENT
from specc.errors import ConfigError
from specc.kernels import ops
from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.facts import attention_is_a_tree
from specc.passes.program import AttentionLayer, Program, bind_args, emit_call, replace
from specc.passes.rewrite.latent import (
    Latent,
    has_shared_keys,
    latent_of,
    query_columns,
    rows_of_heads,
    width_of,
)
from specc.passes.step.step_graph import TARGET

aten = torch.ops.aten


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
        most: columns of a latent and of what heads share, beyond which a layer stays as it is;
            None is any.
        takes_two_widths: the backend computes values of another width than keys. Where it does not,
            layers of such are rewritten whatever their rows take.
        most_voting: where queries of the target vote on blocks, the widest rows whose queries can,
            in a type ("bfloat16"); it gives None for any. Layers of one width that can vote, and
            could not over their latents, stay as they are.
    Raises:
        ConfigError: `latent` is asked for, and the target has no layer for it, or one that has to
            vote and could not.
    Source: DeepSeek-V2, arXiv:2405.04434 §2.1 and appendix C.
    """

    requires = (attention_is_a_tree,)
    ensures = (attention_is_a_tree,)

    def __init__(
        self,
        choice: str,
        kv_cache_dtype: str,
        num_ranks: int = 1,
        most: tuple[int, int] | None = None,
        takes_two_widths: bool = True,
        most_voting: Callable[[str], int | None] | None = None,
    ) -> None:
        self._choice, self._kv_cache_dtype = choice, kv_cache_dtype
        self._num_ranks, self._most = num_ranks, most
        self._takes_two_widths = takes_two_widths
        self._most_voting = most_voting

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for number, node in enumerate(program.calls(ops.tree_attention)):
            key = _of_one_sequence(bind_args(node)["k"])
            if key is None or not has_shared_keys(key):
                continue
            with result.attempt(node.name):
                bound = bind_args(node)
                query, value = (_of_one_sequence(bound[name]) for name in "qv")
                if query is None or value is None:
                    raise NoMatch("its queries or values are not those of one sequence")
                found = latent_of(program, query, key, value)
                layer = self._layer_over(program.layers[number], found)
                self._require_room(layer)
                before = program.layers[number]
                is_able = self._takes_two_widths or before.columns_of_values == before.head_dim
                if is_able and program.name == TARGET:
                    self._require_votes(before, layer, found)
                if self._choice != LATENT and is_able:
                    self._require_gain(before, layer, found)
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

    def _layer_over(self, layer: AttentionLayer, found: Latent) -> AttentionLayer:
        # a quantized row has a scale of its own, which the whole row decides
        return replace_fields(
            layer,
            num_kv_heads=1,
            head_dim=found.size + sum(width_of(part.source) for part in found.shared),
            value_dim=found.size,
            values_in_keys=self._kv_cache_dtype == AUTO,
        )

    def _require_room(self, layer: AttentionLayer) -> None:
        """Raises NoMatch: rows that are wider than attention takes."""
        columns = layer.value_dim, layer.head_dim - layer.value_dim
        if self._most and any(own > most for own, most in zip(columns, self._most, strict=True)):
            raise NoMatch(
                f"a latent of {columns[0]} columns and {columns[1]} that heads share: its backend"
                f" takes {self._most[0]} and {self._most[1]} at most"
            )

    def _require_votes(self, before: AttentionLayer, layer: AttentionLayer, found: Latent) -> None:
        """Raises NoMatch, or ConfigError: queries could not vote any more."""
        dtype = str(found.latent.meta["val"].dtype).removeprefix("torch.")
        most = self._most_voting(dtype) if self._most_voting else None
        if most is None or not before.head_dim <= most < layer.head_dim:
            return
        if self._choice == LATENT:
            raise ConfigError(
                f"--mla-cache {LATENT}, a self-draft that chooses blocks, and latents of"
                f" {layer.head_dim} columns in {dtype}",
                f"rows of {most} columns or less for the queries that vote, as the"
                f" {before.head_dim} of expanded keys",
                "leave out --mla-cache, or choose no blocks",
            )
        raise NoMatch(
            f"a row of {layer.head_dim} columns, and queries that vote on blocks: its backend takes"
            f" {most} at most"
        )

    def _require_gain(self, before: AttentionLayer, layer: AttentionLayer, found: Latent) -> None:
        """Raises NoMatch: a token's rows would not be fewer bytes."""
        dtype = found.latent.meta["val"].dtype
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


def _rewrite(program: Program, attention: fx.Node, found: Latent) -> None:
    graph, bound = program.graph, bind_args(attention)
    q, keys, values = bound["q"], found.keys, found.values
    own_width = keys.last - keys.first
    with graph.inserting_before(attention):
        # [H, T, n] · [H, n, R]
        own = _query_columns(graph, q, found.own_first, own_width)
        absorbed = emit_call(graph, aten.bmm.default, own, rows_of_heads(graph, keys))
        rest = [_query_columns(graph, q, x.first, width_of(x.source)) for x in found.shared]
        queries = emit_call(graph, aten.cat.default, [absorbed, *rest], -1)
        latent = _one_head(graph, found.latent)
        shared = [_one_head(graph, x.source) for x in found.shared]
        row = emit_call(graph, aten.cat.default, [latent, *shared], -1)
        for name, width in (("k_cache", width_of(row)), ("v_cache", found.size)):
            value = bound[name].meta["val"]
            bound[name].meta["val"] = value.new_empty((*value.shape[:2], 1, width))
        others = attention.args[3:]
        attended = emit_call(
            graph, ops.tree_attention, queries, row, latent, *others, **attention.kwargs
        )
        # [H, T, R] · [H, R, DV]
        rows = rows_of_heads(graph, values)
        if rows.meta["val"].dtype != torch.float32:
            # products of halves with such a view take ten times as long, of few rows
            rows = emit_call(graph, aten.contiguous.default, rows)
        up = emit_call(graph, aten.transpose.int, rows, 1, 2)
        output = emit_call(graph, aten.bmm.default, attended, up)
    for node in (attended, output):
        node.meta["nn_module_stack"] = attention.meta.get("nn_module_stack")
    replace(attention, output)


def _of_one_sequence(node: fx.Node) -> fx.Node | None:
    """The [1, H, T, D] of an operand [H, T, D]."""
    return node.args[0] if node.target is aten.squeeze.dim and node.args[1] == 0 else None


def _query_columns(graph: fx.Graph, q: fx.Node, first: int, width: int) -> fx.Node:
    """Columns of queries [H, T, D]."""
    whole = _of_one_sequence(q)
    assert whole is not None, "it was matched"
    return emit_call(graph, aten.squeeze.dim, query_columns(graph, whole, first, width), 0)


def _one_head(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """[1, T, D] of [T, D], [1, T, D] or [1, 1, T, D]."""
    value = node.meta["val"]
    if value.dim() == 4:
        return emit_call(graph, aten.squeeze.dim, node, 0)
    return emit_call(graph, aten.unsqueeze.default, node, 0) if value.dim() == 2 else node


def values_in_keys(attention: fx.Node) -> bool:
    """Whether each value is the first columns of its key, as the graph says by itself."""
    bound: dict[str, Any] = bind_args(attention)
    key = bound["k"]
    if key.target is not aten.cat.default:
        return False
    parts = bind_args(key)
    return parts["tensors"][0] is bound["v"] and parts["dim"] % key.meta["val"].dim() == 2
