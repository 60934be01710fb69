"""Let a draft attend to keys and values that its target has written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from specc.errors import HeadError
from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.facts import attention_is_a_tree
from specc.passes.program import (
    AttentionLayer,
    Program,
    add_placeholder,
    bind_args,
    emit_call,
    last_placeholder,
    replace,
    upstream,
)

aten = torch.ops.aten
_PARTS = ("k", "v")


class ReadTargetCaches(Pass):
    """`specc.tree_attention` over rows that a module is given → `specc.attend` over caches of its
    target, which has written these rows.

    A module of layers with queries alone takes the keys and values of a layer of its target as
    inputs; here they give way to that layer's caches. Nothing is written. A token stands at the
    position of a sequence's root and sees the rows before it, whatever its depth is: all committed
    ones, which is what a causal token one position earlier would see.

    Args:
        target: its program, after its last pass.
        rows: input of keys → number of the target's layer whose they are; that of values has the
            same name but for its end, see `values_of`.
        name: of the draft, for errors.
    """

    requires = (attention_is_a_tree,)
    ensures = (attention_is_a_tree,)

    def __init__(self, target: Program, rows: Mapping[str, int], name: str) -> None:
        self._target, self._rows, self._name = target, rows, name

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        graph, calls = program.graph, program.calls(ops.tree_attention)
        q_start, positions, cache_len, table = map(
            program.placeholder, ("q_start", "positions", "cache_len", "block_table")
        )
        first = next(node for node in graph.nodes if node.op == "call_function")
        with graph.inserting_before(first):
            before = emit_call(graph, aten.sub.Tensor, positions, 1)
            slot = emit_call(graph, aten._to_copy.default, before, dtype=torch.int32)
        caches: dict[int, tuple[fx.Node, ...]] = {}
        for node, layer in zip(calls, program.layers, strict=True):
            bound = bind_args(node)
            number = self._layer_of(program, bound["k"])
            if number not in caches:
                self._check(layer, number)
                like = bound["k_cache"].meta["val"]
                caches[number] = tuple(self._cache(program, number, x, like) for x in _PARTS)
            options = {"scale": bound["scale"]}
            if layer.window:
                # counted from the last committed row, of which a window is the distance
                options["window"] = layer.window + 1
            with graph.inserting_before(node):
                attended = emit_call(
                    graph, ops.attend, bound["q"], *caches[number],
                    q_start, before, slot, cache_len, None, table, **options,
                )  # fmt: skip
            attended.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
            replace(node, attended)
            result.rewrites += 1
        graph.eliminate_dead_code()
        given = {*self._rows, *map(values_of, self._rows)}
        tokens = program.placeholder("tokens")
        for name in (*program.caches, *given):
            gone = program.placeholder(name)
            for user in list(gone.users):
                # a pass has as many tokens by any of its inputs
                assert user.target is aten.sym_size.int, f"{user} reads {name}"
                user.replace_input_with(gone, tokens)
            graph.erase_node(gone)
        program.caches.clear()
        program.layers.clear()
        program.row_inputs = tuple(x for x in program.row_inputs if x not in given)
        program.runtime_inputs = tuple(x for x in program.runtime_inputs if x not in given)
        return result

    def _layer_of(self, program: Program, keys: fx.Node) -> int:
        names = {node.target for node in upstream(keys) if node.op == "placeholder"}
        (name,) = names & self._rows.keys()
        return self._rows[name]

    def _check(self, layer: AttentionLayer, number: int) -> None:
        """Raises HeadError: its heads are not those of the target's layer."""
        target = self._target.layers[number]
        found = layer.num_kv_heads, layer.head_dim, layer.columns_of_values
        needed = target.num_kv_heads, target.head_dim, target.columns_of_values
        if found != needed or target.values_in_keys or target.chunk:
            raise HeadError(
                f"{self._name}: layer {layer.name} reads {found[0]} heads of {found[1]} columns;"
                f" layer {target.name} of the target has {needed[0]} of {needed[1]}"
                + (" in chunks" if target.chunk else "")
                + (", whose values are in their keys" if target.values_in_keys else ""),
                "the assistant of this target",
                "pass the assistant of this target, or --mla-cache expanded for latents",
            )

    def _cache(self, program: Program, number: int, part: str, like: torch.Tensor) -> fx.Node:
        target = self._target
        name = next(x for x, place in target.caches.items() if place == (number, part))
        of_target = target.placeholder(name).meta["val"]
        value = like.new_empty(
            (*like.shape[:2], *map(int, of_target.shape[2:])), dtype=of_target.dtype
        )
        made = add_placeholder(
            program, f"target_{part}_cache_{number}", value, last_placeholder(program.graph)
        )
        program.target_caches[made.target] = (number, part)
        return made


def values_of(keys: str) -> str:
    """The input of values that goes with one of keys."""
    return keys.removesuffix("keys") + "values"
