"""Replace the grouped matmul of transformers' mixtures: the runtime has no transformers."""

from __future__ import annotations

import torch
from torch import fx

from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.facts import is_off_meta_device
from specc.passes.program import Program, bind_args, emit_call, replace

aten = torch.ops.aten


def has_no_foreign_ops(program: Program) -> bool:
    """No operator of transformers is left."""
    return not any(_namespace(node) == "transformers" for node in program.graph.nodes)


class ReplaceGroupedMM(Pass):
    """`transformers.grouped_mm_fallback(x, w, ends)` → `specc.grouped_mm(x, w, ends)`.

    So is `aten._grouped_mm`, which transformers prefers for bfloat16, and which not every device
    and shape has a kernel for.

    The tokens of each expert are counted with `histc` on integers in a meta trace, which no CPU
    kernel implements: they are counted by comparison.
    """

    requires = (is_off_meta_device,)
    ensures = (has_no_foreign_ops,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        graph = program.graph
        for node in list(graph.nodes):
            if _namespace(node) == "transformers" and "grouped_mm" in str(node.target):
                with graph.inserting_before(node):
                    replace(node, emit_call(graph, ops.grouped_mm, *node.args[:3]))
                result.rewrites += 1
            elif node.target is aten._grouped_mm.default:
                if (reason := _replace_aten_grouped_mm(node)) is None:
                    result.rewrites += 1
                else:
                    result.decline(node.name, reason)
            elif node.op == "call_function" and node.target is aten.histc.default:
                if (reason := _replace_integer_histc(node)) is None:
                    result.rewrites += 1
                else:
                    result.decline(node.name, reason)
        graph.eliminate_dead_code()
        return result


def _replace_aten_grouped_mm(node: fx.Node) -> str | None:
    """Rows of x by experts of w; returns why not, if not."""
    bound = bind_args(node)
    x, weight = bound["self"], bound["mat2"]
    dims = (x.meta["val"].dim(), weight.meta["val"].dim())
    if dims != (2, 3) or bound["offs"] is None:
        return f"grouped matrices of {dims[0]} and {dims[1]} dimensions"
    if bound["bias"] is not None or bound["out_dtype"] not in (None, x.meta["val"].dtype):
        return "a bias, or a result of another dtype"
    with node.graph.inserting_before(node):
        replace(node, emit_call(node.graph, ops.grouped_mm, x, weight, bound["offs"]))
    return None


def _replace_integer_histc(node: fx.Node) -> str | None:
    """Count integers 0 … bins - 1 by comparison; returns why not, if not."""
    bound = bind_args(node)
    ids, bins = bound["self"], bound["bins"]
    if (bound["min"], bound["max"]) != (0, bins - 1):
        return (
            f"histc over {bound['min']} … {bound['max']} with {bins} bins does not count integers"
        )
    if not _holds_integers(ids):
        return f"histc of {ids.meta['val'].dtype} counts what lies between integers too"
    graph = node.graph
    with graph.inserting_before(node):
        experts = emit_call(graph, aten.arange.default, bins, device=torch.device("cpu"))
        # the arange has no fake input: give it one of the graph's own mode
        with ids.meta["val"].fake_mode:
            experts.meta["val"] = torch.empty(
                bins, dtype=torch.int64, device=ids.meta["val"].device
            )
        if ids.meta["val"].dim() != 1:
            ids = emit_call(graph, aten.reshape.default, ids, [-1])
        column = emit_call(graph, aten.unsqueeze.default, ids, 1)
        same = emit_call(graph, aten.eq.Tensor, column, experts)
        counts = emit_call(graph, aten.sum.dim_IntList, same, [0])
        counts = emit_call(graph, aten.to.dtype, counts, node.meta["val"].dtype)
    replace(node, counts)
    return None


def _holds_integers(node: fx.Node) -> bool:
    """Whether the values are integers, at most converted to another dtype."""
    while node.target in (aten.to.dtype, aten._to_copy.default, aten.clone.default):
        node = node.args[0]
    dtype = node.meta["val"].dtype
    return not (dtype.is_floating_point or dtype.is_complex)


def _namespace(node: fx.Node) -> str:
    return getattr(node.target, "namespace", "") if node.op == "call_function" else ""
