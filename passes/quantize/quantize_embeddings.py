"""Let embeddings read integers: `specc.embedding_q` in place of `aten.embedding`."""

from __future__ import annotations

import torch
from torch import fx

from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.weight_layout import BLOCK
from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.program import Program, bind_args, emit_call, replace, upstream
from specc.passes.quantize.quantized_inputs import QuantizedInputs, kept_of, whole_shape

aten = torch.ops.aten


class QuantizeEmbeddings(Pass):
    """`aten.embedding(w, tokens)` → `specc.embedding_q` of a quantized w.

    Where a projection multiplies by the weight's integers, as a head does that is tied to the
    embedding, rows are read from these: there is one weight. Otherwise integers of the checkpoint
    are kept, and numbers are rounded to the layout of heads. Tables that are not looked up by
    tokens, as learned positions, keep their weights.

    Args:
        layout: of weights that neither a projection nor the checkpoint has integers of; None
            leaves them as they are.
        is_read: rows are looked up in integers; else all weights are left as they are.
    """

    def __init__(self, layout: QuantizedLayout | None, is_read: bool = True) -> None:
        self._layout, self._is_read = layout, is_read

    def run(self, program: Program) -> PassResult:
        result, inputs = PassResult(), QuantizedInputs(program)
        for node in program.calls(aten.embedding.default):
            table = bind_args(node)["weight"]
            reason = (
                _why_not(program, node, table)
                if self._is_read
                else "the engine looks rows up in floats alone"
            )
            if reason is not None:
                result.decline(node.name, reason)
                continue
            weight = program.weights[table.target]
            kept = kept_of(program, weight)
            # of a projection that multiplies by it, the one that there is
            layout = inputs.layout_of(weight) or (self._layout if kept is None else kept.layout)
            if layout is None:
                result.decline(node.name, "the checkpoint has no integers of its weight")
                continue
            _replace(node, inputs.add(table, layout), layout)
            inputs.drop(table)
            result.rewrites += 1
        return result


def layouts_of_lookups(program: Program) -> list[str]:
    """Names of the layouts that rows are looked up in, each once."""
    found = {str(bind_args(node)["layout"]): None for node in program.calls(ops.embedding_q)}
    return list(found)


def _why_not(program: Program, node: fx.Node, table: fx.Node) -> str | None:
    """Why a table keeps its weight; None where it does not."""
    weight = program.weights.get(table.target)
    if weight is None or len(weight.shape) != 2:
        return "its table is no matrix among the weights"
    if weight.is_turned:
        return "its table is stored as columns"
    ids: fx.Node = bind_args(node)["indices"]
    if program.placeholder("tokens") not in upstream(ids):
        return "it is not looked up by tokens"
    if ids.meta["val"].dtype != torch.int64:
        return f"it is looked up by {ids.meta['val'].dtype}"
    kept = kept_of(program, weight)
    if kept is not None and (kept.order or kept.is_turned):
        return "the checkpoint's integers are not in rows as they are looked up"
    outputs = whole_shape(program, weight)[0]
    return f"{outputs} rows, fewer than a block has" if outputs < BLOCK else None


def _replace(node: fx.Node, blocks: fx.Node, layout: QuantizedLayout) -> None:
    graph, bound = node.graph, bind_args(node)
    table, ids, value = bound["weight"].meta["val"], bound["indices"], node.meta["val"]
    with graph.inserting_before(node):
        flat = emit_call(graph, aten.reshape.default, ids, [-1])
        rows = emit_call(graph, ops.embedding_q, blocks, flat, *table.shape, layout.name)
        if value.dtype != torch.float32:
            rows = emit_call(graph, aten.to.dtype, rows, value.dtype)
        leading = [size if isinstance(size, int) else -1 for size in ids.meta["val"].shape]
        rows = emit_call(graph, aten.reshape.default, rows, [*leading, table.shape[1]])
    replace(node, rows)
