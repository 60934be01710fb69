"""Fuse the embedding of tokens with the first layer up to its attention."""

from __future__ import annotations

import operator

import torch
from torch import fx

from specc.kernels import ops
from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.program import Program, bind_args, emit_call, is_view, replace
from specc.passes.rewrite.columns import only_user
from specc.passes.rewrite.fuse_add_norm import require_parameters, rope_after
from specc.passes.rewrite.fuse_rope_write import attention_reads_caches

aten = torch.ops.aten
_TABLES = ("cos", "sin", "k_cache", "v_cache", "q_start", "slot", "block_table")


class FuseEmbedNorm(Pass):
    """`embedding` of tokens, `rms_norm`, a linear layer, `rope_write` → one operator.

    `specc.embed_norm_rope_write` is `specc.add_norm_rope_write` of a layer with none before it: its
    rows come from the embedding, and nothing is added to them.
    """

    requires = (attention_reads_caches,)
    ensures = (attention_reads_caches,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(ops.rms_norm):
            embedding = node.args[0]
            if embedding.target is not aten.embedding.default:  # type: ignore[union-attr]
                continue
            with result.attempt(node.name):
                _fuse(program, embedding, node)  # type: ignore[arg-type]
        program.graph.eliminate_dead_code()
        return result


def _fuse(program: Program, embedding: fx.Node, norm: fx.Node) -> None:
    bound = bind_args(norm)
    linear = only_user(norm)
    if linear is None or linear.target is not aten.linear.default or linear.args[0] is not norm:
        raise NoMatch("the norm is not read by one linear layer alone")
    rope = rope_after(linear)
    if rope is None:
        raise NoMatch("the product is not rotated and written to the caches as it is")
    table, tokens = embedding.args[:2]
    if _source(tokens) is not program.placeholder("tokens"):  # type: ignore[arg-type]
        raise NoMatch("the embedding is not that of the tokens")
    weight, bias = linear.args[1], linear.args[2] if len(linear.args) > 2 else None
    dtype = embedding.meta["val"].dtype
    require_parameters(program, dtype, bound["weight"], weight, bias)  # type: ignore[arg-type]
    require_parameters(program, dtype, bound["weight"], table, None)  # type: ignore[arg-type]
    if any(user < rope for user in embedding.users if user is not norm):
        raise NoMatch("the embedding is read before the product is done")
    graph = program.graph
    tables = (bind_args(rope)[name] for name in _TABLES)
    scale = (bound["weight"], bound["eps"], bound["unit_offset"])
    with graph.inserting_before(rope):
        both = emit_call(
            graph, ops.embed_norm_rope_write, tokens, table, *scale, weight, bias, *tables
        )
        found = emit_call(graph, operator.getitem, both, 0)
        stream = emit_call(graph, operator.getitem, both, 1)
    both.meta["nn_module_stack"] = rope.meta.get("nn_module_stack")
    replace(rope, found)
    for user in [user for user in embedding.users if user is not norm]:
        user.replace_input_with(embedding, stream)


def _source(node: fx.Node) -> fx.Node:
    """What a node is a view of."""
    while node.op == "call_function" and is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node
