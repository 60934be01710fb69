"""Name reads of a table's rows alike, however a model writes them: as `aten.embedding`."""

from __future__ import annotations

import torch
from torch import fx

from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.facts import is_flat_call_graph
from specc.passes.program import Program, bind_args, emit_call, replace

aten = torch.ops.aten
_INTEGERS = (torch.int32, torch.int64)


class ReadTables(Pass):
    """`table[ids]`, or a gather that takes whole rows → `aten.embedding(table, ids)`.

    Tables are parameters and constants [P, D], such as sines and cosines of all positions. A gather
    takes whole rows where the table is the same for each sequence, and each token's index the same
    for all columns. Other passes know lookups by this one name: which dimension counts tokens, how
    many positions there are, what ranks may cut.
    """

    requires = (is_flat_call_graph,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(aten.index.Tensor, aten.gather.default):
            indexed = node.target is aten.index.Tensor
            if indexed and not _takes_rows(node):
                continue  # masks, for example: nothing that reads rows
            with result.attempt(node.name):
                table, ids = _indexed(node) if indexed else _gathered(node)
                is_known = table.target in (program.weights.keys() | program.constants.keys())
                if not is_known or table.meta["val"].dim() != 2:
                    raise NoMatch("what it reads is no table")
                if ids.meta["val"].dtype not in _INTEGERS:
                    raise NoMatch("its places are no integers")
                with program.graph.inserting_before(node):
                    rows = emit_call(program.graph, aten.embedding.default, table, ids)
                rows.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
                replace(node, rows)
        if result.rewrites:
            program.graph.eliminate_dead_code()
        return result


def _takes_rows(node: fx.Node) -> bool:
    """Whether an index is `values[ids]`, with no index of another dimension."""
    indices = bind_args(node)["indices"]
    return len(indices) == 1 and indices[0] is not None


def _indexed(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Table and places of `table[ids]`."""
    bound = bind_args(node)
    return bound["self"], bound["indices"][0]


def _gathered(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Table [P, D] and places [B, T] of a gather from [B, P, D] by [B, T, D]."""
    bound = bind_args(node)
    source, index = bound["self"], bound["index"]
    if source.meta["val"].dim() != 3 or bound["dim"] % 3 != 1:
        raise NoMatch("it gathers along another dimension than rows")
    table = _spread(source, 0)
    if table.target is aten.unsqueeze.default and table.args[1] in (0, -3):
        table = table.args[0]
    places = _spread(index, 2)
    if places.target is not aten.unsqueeze.default or places.args[1] not in (2, -1):
        raise NoMatch("its places differ between columns")
    if str(index.meta["val"].shape[2]) != str(source.meta["val"].shape[2]):
        raise NoMatch("it takes some of the columns")
    return table, places.args[0]


def _spread(node: fx.Node, dim: int) -> fx.Node:
    """What was repeated along one dimension of three, where it has one entry or is not there.

    Raises:
        NoMatch: it was repeated along another one.
    """
    while node.target in (aten.repeat.default, aten.expand.default):
        source, value = node.args[0], node.meta["val"]
        own = [str(size) for size in source.meta["val"].shape]
        own = ["1"] * (value.dim() - len(own)) + own
        wide = [str(size) for size in value.shape]
        if own[dim] != "1" or any(
            a != b for i, (a, b) in enumerate(zip(own, wide, strict=True)) if i != dim
        ):
            raise NoMatch("rows or columns are repeated")
        node = source
    return node
