"""Rewrite dense attention into `specc::tree_attention` over caches that are program inputs."""

from __future__ import annotations

from dataclasses import replace as replace_fields

import torch
from torch import fx

from specc.errors import UnsupportedAttentionError
from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.facts import (
    DENSE_ATTENTION,
    attention_is_a_tree,
    has_no_dense_attention,
    is_off_meta_device,
    masks_are_classified,
)
from specc.passes.program import (
    GEOMETRY,
    AttentionLayer,
    Program,
    Slopes,
    add_placeholder,
    bind_args,
    emit_call,
    module_path,
    replace,
)
from specc.passes.rewrite.classify_masks import scale_of

aten = torch.ops.aten
_SLOPES = "slopes"
_RESHAPES = (
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.contiguous.default,
    aten.clone.default,
)


class RewriteTreeAttention(Pass):
    """`aten.scaled_dot_product_attention(q, k, v, mask)` → `specc.tree_attention(q, k, v, …)`.

    So does `specc.dense_attention`, with its sinks and its softcap. What a mask adds by distance
    becomes slopes, a constant.

    Repeated key and value heads are followed back to the HK heads that the model computes, so the
    cache holds those. The replaced node is erased by hand: it is tagged nondeterministic and
    would survive dead-code elimination, with all that makes the mask.
    """

    requires = (masks_are_classified, is_off_meta_device)
    ensures = (has_no_dense_attention, attention_is_a_tree)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        graph = program.graph
        geometry = program.placeholder(GEOMETRY)
        inputs = [
            program.placeholder(name)
            for name in ("q_start", "positions", "slot", "cache_len", "ancestors", "block_table")
        ]
        # before states, where there are some
        last = next(
            node
            for node in reversed(list(graph.find_nodes(op="placeholder")))
            if node.target not in program.states
        )
        for layer, node in enumerate(program.calls(*DENSE_ATTENTION)):
            q, k, v, scale = attention_operands(node)
            bound = bind_args(node)
            sinks, softcap = bound.get("sink_logits"), float(bound.get("softcap", 0.0))
            _check_operands(node, q, k, v)
            folded_k, folded_v = fold_repeat(k), fold_repeat(v)
            if folded_k is not None and folded_v is not None and _same_heads(folded_k, folded_v):
                k, v = folded_k, folded_v
            elif _was_repeated(k):
                result.decline(
                    node.name, "repeated heads are not a plain repeat_kv: cached as they are"
                )
            description = _describe(program, node, q, k, v)
            slopes = program.slopes.pop(node.name, None)
            description = replace_fields(
                description,
                softcap=softcap,
                has_sinks=sinks is not None,
                has_slopes=slopes is not None,
                chunk=program.chunks.pop(node.name, 0),
            )
            tilt = None if slopes is None else slopes_input(program, slopes, geometry)
            caches = []
            for part in ("k", "v"):
                columns = description.head_dim if part == "k" else description.columns_of_values
                value = _cache_value(geometry, description, k, columns)
                last = add_placeholder(program, f"{part}_cache_{layer}", value, last)
                program.caches[last.target] = (layer, part)
                caches.append(last)
            with graph.inserting_before(node):
                if sinks is not None and sinks.meta["val"].dtype != q.meta["val"].dtype:
                    sinks = emit_call(graph, aten.to.dtype, sinks, q.meta["val"].dtype)
                flat = [emit_call(graph, aten.squeeze.dim, item, 0) for item in (q, k, v)]
                attended = emit_call(
                    graph,
                    ops.tree_attention,
                    *flat,
                    *caches,
                    *inputs,
                    *(() if sinks is None and tilt is None else (sinks,)),
                    *(() if tilt is None else (tilt,)),
                    scale=scale,
                    window=description.window,
                    **({"softcap": softcap} if softcap else {}),
                    **({"chunk": description.chunk} if description.chunk else {}),
                    **({"rounds_bias": True} if slopes is not None and slopes.rounds else {}),
                )
                output = emit_call(graph, aten.unsqueeze.default, attended, 0)
            attended.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
            program.layers.append(description)
            program.windows.pop(node.name)
            replace(node, output)
            result.rewrites += 1
        graph.erase_node(geometry)
        graph.eliminate_dead_code()
        return result


def slopes_input(program: Program, slopes: Slopes, like: fx.Node) -> fx.Node:
    """The constant that holds slopes; layers with the same ones share it.

    Args:
        like: any value of the program.
    """
    for name, value in program.constants.items():
        if name.startswith(_SLOPES) and torch.equal(value, slopes.values):
            return program.placeholder(name)
    count = sum(name.startswith(_SLOPES) for name in program.constants)
    name = f"{_SLOPES}_{count}" if count else _SLOPES
    stored = program.weights.keys() | program.constants.keys()
    before = [x for x in program.graph.find_nodes(op="placeholder") if x.target in stored]
    value = like.meta["val"].new_empty(slopes.values.shape, dtype=torch.float32)
    program.constants[name] = slopes.values
    return add_placeholder(program, name, value, before[-1])


def fold_repeat(node: fx.Node) -> fx.Node | None:
    """The [1, HK, T, D] node that `repeat_kv` repeats, or None where the heads are not repeated so.

    Only the order of repeat_kv counts (head h reads key head h // G): unsqueeze after the head
    dimension, expand, reshape.
    """
    value = node.meta["val"]
    while node.target in _RESHAPES:
        node = node.args[0]
    if node.target is not aten.expand.default or node.meta["val"].dim() != 5:
        return None
    source = node.args[0]
    if source.target is not aten.unsqueeze.default or source.args[1] not in (2, -3):
        return None
    source = source.args[0]
    heads, group = node.meta["val"].shape[1:3]
    if value.shape[1] != heads * group or source.meta["val"].shape[1] != heads:
        return None
    return source


def attention_operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, float]:
    """Queries, keys, values and scale of dense attention."""
    bound = bind_args(node)
    return bound["query"], bound["key"], bound["value"], scale_of(node)


def _check_operands(node: fx.Node, q: fx.Node, k: fx.Node, v: fx.Node) -> None:
    """Refuse what a cache of one row for each token, key and value alike, does not hold."""
    shapes = [tuple(item.meta["val"].shape) for item in (q, k, v)]
    found = needed = ""
    if any(len(shape) != 4 or shape[0] != 1 for shape in shapes):
        found = f"queries, keys and values of shapes {', '.join(map(_text, shapes))}"
        needed = "[1, heads, tokens, head_dim]"
    elif not str(shapes[0][2]) == str(shapes[1][2]) == str(shapes[2][2]):
        found = f"keys of shape {_text(shapes[1])} for queries of shape {_text(shapes[0])}"
        needed = "one key and value for each token of the pass, no memory besides them"
    elif shapes[1][1] != shapes[2][1]:
        found = f"{shapes[1][1]} key heads and {shapes[2][1]} value heads"
        needed = "as many key heads as value heads"
    if found:
        raise UnsupportedAttentionError(
            f"layer {module_path(node) or node.name}: {found}",
            needed,
            "choose a model of a supported architecture (see docs/guide/models.md)",
        )


def _text(shape: tuple) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _same_heads(k: fx.Node, v: fx.Node) -> bool:
    return k.meta["val"].shape[1] == v.meta["val"].shape[1]


def _was_repeated(node: fx.Node) -> bool:
    while node.target in _RESHAPES:
        node = node.args[0]
    return node.target in (
        aten.expand.default,
        aten.repeat.default,
        aten.repeat_interleave.self_int,
    )


def _describe(
    program: Program, node: fx.Node, q: fx.Node, k: fx.Node, v: fx.Node
) -> AttentionLayer:
    name = module_path(node) or node.name
    num_heads, head_dim = int(q.meta["val"].shape[1]), int(q.meta["val"].shape[3])
    num_kv_heads, value_dim = int(k.meta["val"].shape[1]), int(v.meta["val"].shape[3])
    if num_heads % num_kv_heads:
        raise UnsupportedAttentionError(
            f"layer {name}: {num_heads} query heads and {num_kv_heads} key heads",
            "a multiple of the key heads",
            "check the model's configuration",
        )
    own = 0 if value_dim == head_dim else value_dim
    sees = program.windows[node.name]
    return AttentionLayer(name, num_heads, num_kv_heads, head_dim, sees, value_dim=own)


def _cache_value(
    geometry: fx.Node, layer: AttentionLayer, like: fx.Node, columns: int
) -> torch.Tensor:
    """Fake [blocks, block_size, HK, columns] with the symbolic sizes that `geometry` lends."""
    blocks, block_size = geometry.meta["val"].shape[:2]
    value = like.meta["val"]
    return value.new_empty(blocks, block_size, layer.num_kv_heads, columns)
