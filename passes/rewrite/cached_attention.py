"""Rewrite dense attention of a padded program into a cache write and masked attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from specc.artifact.cache_rows import Reach, reach_of, reaches_of
from specc.errors import UnsupportedAttentionError
from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.facts import (
    DENSE_ATTENTION,
    attention_is_cached,
    has_no_dense_attention,
    is_off_meta_device,
)
from specc.passes.program import (
    AttentionLayer,
    Program,
    Slopes,
    add_placeholder,
    emit_call,
    last_placeholder,
    module_path,
    replace,
)
from specc.passes.rewrite.cached_latent import cached_latent
from specc.passes.rewrite.tree_attention import attention_operands, fold_repeat, slopes_input

aten = torch.ops.aten
_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


class RewriteCachedAttention(Pass):
    """`sdpa(q, k, v, mask)` → `masked_attention(q, cache_write(…), cache_write(…), mask)`.

    So does `specc.dense_attention`, which stands for attention that a model spells out.
    What each layer's mask means was recovered from the flat trace of the same model, and so was
    the proof that tokens meet in attention alone. Masks become inputs, one for each reach of
    layers, since only a runtime knows committed lengths and trees. Of a layer with slopes the mask
    is what is added to its scores, once for all layers with the same ones (`specc.distance_bias`).
    Of a layer whose flat program caches a latent there is one cache (`cached_latent`).

    Args:
        layers: of the flat program, in the order of execution.
        cache_rows: L, rows of a sequence's cache.
        slopes: of the flat program's layers; of none where it is empty.
    """

    requires = (is_off_meta_device,)
    ensures = (has_no_dense_attention, attention_is_cached)

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        cache_rows: int,
        slopes: Sequence[Slopes | None] = (),
    ) -> None:
        self._layers = layers
        self._cache_rows = cache_rows
        self._slopes = slopes or [None] * len(layers)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        graph = program.graph
        nodes = program.calls(*DENSE_ATTENTION)
        if len(nodes) != len(self._layers):
            raise UnsupportedAttentionError(
                f"{len(nodes)} attention layers where tokens are [batch, nodes], and"
                f" {len(self._layers)} where they are flat",
                "a model that computes the same for both",
                "compile with --backend cpu or cuda, which take flat tokens",
            )
        masks = self._add_masks(program)
        biases = _Biases(program)
        last = last_placeholder(graph)
        write_index = program.placeholder("write_index")
        each = zip(nodes, self._layers, self._slopes, strict=True)
        for number, (node, layer, slopes) in enumerate(each):
            *operands, scale = attention_operands(node)
            batched = [_of_batch(program, item) for item in operands]
            is_joined = batched[0] is not operands[0]
            q, *rows = batched
            latent = cached_latent(program, node, q, *rows) if layer.values_in_keys else None
            if latent is not None:
                q, rows = latent.queries, [latent.row]
            rows = [self._kv_heads(node, item, layer) for item in rows]
            batch = q.meta["val"].shape[0]
            caches = []
            for part, update in zip("kv", rows, strict=False):
                shape = (batch, layer.num_kv_heads, self._cache_rows, layer.head_dim)
                value = update.meta["val"].new_empty(shape)
                last = add_placeholder(program, f"{part}_cache_{number}", value, last)
                program.caches[last.target] = (number, part)
                with graph.inserting_before(node):
                    caches.append(emit_call(graph, ops.cache_write, last, update, write_index))
            with graph.inserting_before(node):
                mask = masks[reach_of(layer)]
                if slopes is not None:
                    mask = biases.of(mask, slopes, scale, q.meta["val"].dtype)
                # of a latent, the one row is key and value both
                cached = caches[0], caches[-1]
                cap = {"softcap": layer.softcap} if layer.softcap else {}
                attended = emit_call(graph, ops.masked_attention, q, *cached, mask, scale, **cap)
                output = attended if latent is None else latent.expand(graph, attended)
                if is_joined:
                    heads = emit_call(graph, aten.flatten.using_ints, attended, 0, 1)
                    output = emit_call(graph, aten.unsqueeze.default, heads, 0)
            attended.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
            program.layers.append(layer)
            replace(node, output)
            result.rewrites += 1
        graph.eliminate_dead_code()
        return result

    def _add_masks(self, program: Program) -> dict[Reach, fx.Node]:
        """An input [B, 1, N, L] for each reach of layers."""
        tokens = program.placeholder("tokens").meta["val"]
        batch, nodes = tokens.shape
        last, masks = last_placeholder(program.graph), {}
        for reach in reaches_of(self._layers):
            value = tokens.new_empty((batch, 1, nodes, self._cache_rows), dtype=torch.bool)
            last = add_placeholder(program, reach.mask_input, value, last)
            masks[reach] = last
        program.runtime_inputs += tuple(mask.target for mask in masks.values())
        return masks

    def _kv_heads(self, node: fx.Node, item: fx.Node, layer: AttentionLayer) -> fx.Node:
        """The heads that the cache holds: those of the flat program."""
        folded = fold_repeat(item)
        if folded is not None and folded.meta["val"].shape[1] == layer.num_kv_heads:
            item = folded
        shape = item.meta["val"].shape
        if tuple(map(str, shape[1::2])) != (str(layer.num_kv_heads), str(layer.head_dim)):
            raise UnsupportedAttentionError(
                f"layer {module_path(node) or node.name}: keys of {shape[1]} heads of {shape[3]},"
                f" and {layer.num_kv_heads} of {layer.head_dim} where tokens are flat",
                "a model that computes the same for both",
                "compile with --backend cpu or cuda, which take flat tokens",
            )
        return item


class _Biases:
    """What masks become where layers have slopes; each kind is computed once in a pass."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: dict[tuple[fx.Node, bytes, float], fx.Node] = {}

    def of(self, mask: fx.Node, slopes: Slopes, scale: float, dtype: torch.dtype) -> fx.Node:
        """[B, H, N, L], before where calls are being inserted."""
        graph, rounded = self._program.graph, scale if slopes.rounds else 0.0
        key = mask, slopes.values.numpy().tobytes(), rounded
        if key not in self._known:
            values = slopes_input(self._program, slopes, mask)
            positions = self._program.placeholder("positions")
            # the least number of a dtype plus a score is that again, or nearly
            hidden = torch.finfo(dtype).min
            bias = emit_call(
                graph,
                ops.distance_bias,
                mask,
                positions,
                values,
                hidden=hidden,
                rounded_scale=rounded,
            )
            self._known[key] = emit_call(graph, aten.to.dtype, bias, dtype)
        return self._known[key]


def _of_batch(program: Program, item: fx.Node) -> fx.Node:
    """The [B, H, N, D] of an operand [1, B · H, N, D]; other operands as they are."""
    batch = str(program.placeholder("tokens").meta["val"].shape[0])
    rows = item.args[0] if item.target is aten.unsqueeze.default and item.args[1] == 0 else None
    while rows is not None and rows.target in _RESHAPES:
        rows = rows.args[0]
        if rows.meta["val"].dim() == 4 and str(rows.meta["val"].shape[0]) == batch:
            return rows
    return item
