"""Rewrite dense attention of a padded program into a cache write and masked attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from specc.artifact.cache_rows import mask_input
from specc.errors import UnsupportedAttentionError
from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.facts import attention_is_cached, has_no_dense_attention, is_off_meta_device
from specc.passes.program import (
    AttentionLayer,
    Program,
    add_placeholder,
    emit_call,
    last_placeholder,
    module_path,
    replace,
)
from specc.passes.rewrite.tree_attention import attention_operands, fold_repeat

aten = torch.ops.aten


class RewriteCachedAttention(Pass):
    """`sdpa(q, k, v, mask)` → `masked_attention(q, cache_write(…), cache_write(…), mask)`.

    What each layer's mask means was recovered from the flat trace of the same model, and so was
    the proof that tokens meet in attention alone. Masks become inputs, one for each window, since
    only a runtime knows committed lengths and trees.

    Args:
        layers: of the flat program, in the order of execution.
        cache_rows: L, rows of a sequence's cache.
    """

    requires = (is_off_meta_device,)
    ensures = (has_no_dense_attention, attention_is_cached)

    def __init__(self, layers: Sequence[AttentionLayer], cache_rows: int) -> None:
        self._layers = layers
        self._cache_rows = cache_rows

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        graph = program.graph
        nodes = program.calls(aten.scaled_dot_product_attention.default)
        if len(nodes) != len(self._layers):
            raise UnsupportedAttentionError(
                f"{len(nodes)} attention layers where tokens are [batch, nodes], and"
                f" {len(self._layers)} where they are flat",
                "a model that computes the same for both",
                "compile with --backend cpu or cuda, which take flat tokens",
            )
        masks = self._add_masks(program)
        last = last_placeholder(graph)
        write_index = program.placeholder("write_index")
        for number, (node, layer) in enumerate(zip(nodes, self._layers, strict=True)):
            q, k, v, scale = attention_operands(node)
            k, v = (self._kv_heads(node, item, layer) for item in (k, v))
            batch = q.meta["val"].shape[0]
            caches = []
            for part, update in (("k", k), ("v", v)):
                shape = (batch, layer.num_kv_heads, self._cache_rows, layer.head_dim)
                value = update.meta["val"].new_empty(shape)
                last = add_placeholder(program, f"{part}_cache_{number}", value, last)
                program.caches[last.target] = (number, part)
                with graph.inserting_before(node):
                    caches.append(emit_call(graph, ops.cache_write, last, update, write_index))
            with graph.inserting_before(node):
                attended = emit_call(
                    graph, ops.masked_attention, q, *caches, masks[layer.window], scale
                )
            attended.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
            program.layers.append(layer)
            replace(node, attended)
            result.rewrites += 1
        graph.eliminate_dead_code()
        return result

    def _add_masks(self, program: Program) -> dict[int, fx.Node]:
        """An input [B, 1, N, L] for each window."""
        tokens = program.placeholder("tokens").meta["val"]
        batch, nodes = tokens.shape
        last, masks = last_placeholder(program.graph), {}
        for window in sorted({layer.window for layer in self._layers}):
            value = tokens.new_empty((batch, 1, nodes, self._cache_rows), dtype=torch.bool)
            last = add_placeholder(program, mask_input(window), value, last)
            masks[window] = last
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
