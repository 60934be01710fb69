"""Project only the rows that are asked for to the vocabulary."""

from __future__ import annotations

import torch
from torch import fx

from specc.errors import NotCausalLMError
from specc.passes.base import Pass, PassResult
from specc.passes.facts import has_runtime_inputs, logits_are_selected
from specc.passes.program import Program, emit_call

aten = torch.ops.aten

# between the vocabulary projection and the output: element by element, one tensor input; a padded
# row, and one whose columns a constant chooses, are as good
_ELEMENTWISE = (
    aten.to.dtype,
    aten.tanh.default,
    aten.div.Tensor,
    aten.mul.Tensor,
    aten.div.Scalar,
    aten.mul.Scalar,
    aten.contiguous.default,
    aten.clone.default,
)


class SelectLogits(Pass):
    """Gather `logit_rows` before the vocabulary projection; the output becomes [R, V].

    Rows are counted over all tokens of a pass: those of [B, N] tokens are laid end to end first.
    Where several projections lie side by side, rows are gathered before each of them.
    """

    requires = (has_runtime_inputs,)
    ensures = (logits_are_selected,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        graph = program.graph
        (output,) = graph.find_nodes(op="output")
        logits, rows = program.logits, program.placeholder("logit_rows")
        if logits.meta["val"].dim() != 3:
            raise NotCausalLMError(
                f"an output of shape {tuple(logits.meta['val'].shape)}",
                "logits [1, tokens, vocabulary]",
                "pass a causal language model",
            )
        joined = logits.args[0] if _joins_columns(logits) else [logits]
        paths = [_path_of(part, program) for part in joined]
        others = [path[-1] for path in paths if not _is_projection(path[-1])]
        if not others:
            for *chain, projection in paths:
                _select_input(projection, rows)
                for node in reversed(chain):
                    _follow(node, node.args[0])
            if logits not in joined:
                _follow(logits, joined[0])
            result.rewrites += len(paths)
        else:
            reason = f"the output comes from {others[0].target}, not from a linear projection"
            result.decline(others[0].name, reason + ": all rows are projected, then selected")
            with graph.inserting_before(output):
                flat = _end_to_end(logits)
                logits = emit_call(graph, aten.index_select.default, flat, 1, rows)
        with graph.inserting_before(output):
            program.logits = emit_call(graph, aten.squeeze.dim, logits, 0)
        graph.eliminate_dead_code()
        return result


def _joins_columns(node: fx.Node) -> bool:
    if node.target is not aten.cat.default:
        return False
    dim = node.args[1] if len(node.args) > 1 else 0
    return dim in (-1, node.meta["val"].dim() - 1)


def _path_of(node: fx.Node, program: Program) -> list[fx.Node]:
    """A node, and back from it to the first that does more than go row by row."""
    path = [node]
    while _is_row_by_row(path[-1], program):
        path.append(path[-1].args[0])  # type: ignore[arg-type]
    return path


def _is_projection(node: fx.Node) -> bool:
    return node.target is aten.linear.default and len(node.users) == 1


def _follow(node: fx.Node, source: fx.Node) -> None:
    """Give a node the rows of what it is made of, and leave it its columns."""
    value, width = source.meta["val"], int(node.meta["val"].shape[-1])
    shape = (*value.shape[:-1], width)
    node.meta["val"] = value.new_empty(shape, dtype=node.meta["val"].dtype)


def _is_row_by_row(node: fx.Node, program: Program) -> bool:
    """Whether a node makes each row of logits of the same row of its first argument alone."""
    if node.target in _ELEMENTWISE:
        return len(node.all_input_nodes) == 1
    if node.target is aten.pad.default:
        return len(node.all_input_nodes) == 1 and len(node.args[1]) == 2  # type: ignore[arg-type]
    if node.target is not aten.index_select.default:
        return False
    source, dim, index = node.args
    last = source.meta["val"].dim() - 1  # type: ignore[union-attr]
    return dim in (-1, last) and index.target in program.constants  # type: ignore[union-attr]


def _select_input(projection: fx.Node, rows: fx.Node) -> None:
    graph, hidden = projection.graph, projection.args[0]
    # logits_to_keep=0 leaves a slice of everything
    while hidden.target is aten.slice.Tensor and _is_whole(hidden):
        hidden = hidden.args[0]
    with graph.inserting_before(projection):
        selected = emit_call(graph, aten.index_select.default, _end_to_end(hidden), 1, rows)
    projection.update_arg(0, selected)
    value = projection.meta["val"]
    projection.meta["val"] = value.new_empty(*selected.meta["val"].shape[:-1], value.shape[-1])


def _end_to_end(node: fx.Node) -> fx.Node:
    """[B, N, …] as [1, B · N, …]; a pass of flat tokens is that already."""
    batch, _, width = node.meta["val"].shape
    if isinstance(batch, int) and batch == 1:
        return node
    return emit_call(node.graph, aten.reshape.default, node, [1, -1, width])


def _is_whole(node: fx.Node) -> bool:
    start = node.args[2] if len(node.args) > 2 else None
    stop = node.args[3] if len(node.args) > 3 else None
    step = node.args[4] if len(node.args) > 4 else 1
    return start in (None, 0) and (stop is None or stop >= 2**31) and step == 1
