"""Let arithmetic with the places of tokens in a padded pass read their positions."""

from __future__ import annotations

import re

import torch
from torch import fx

from specc.errors import UnsupportedGraphError
from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.facts import is_off_meta_device
from specc.passes.program import Program, emit_call, module_path
from specc.passes.rewrite.read_places import counted

aten = torch.ops.aten
# one value of places, and numbers
_ALONG = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.div.Tensor_mode,
    aten.floor.default, aten.log1p.default, aten.log.default, aten.sqrt.default,
    aten.pow.Tensor_Scalar, aten.clamp.default, aten.to.dtype, aten.neg.default,
    aten.reciprocal.default, aten.exp.default,
)  # fmt: skip
_VIEWS = (aten.view.default, aten.reshape.default, aten.unsqueeze.default)
# what may meet a value of [batch, …] where one of [1, …] was
_BROADCASTS = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.expand.default,
)  # fmt: skip


class ReadPaddedPlaces(Pass):
    """`arange(nodes)`, converted to floats → `positions` [batch, nodes].

    What `ReadPlaces` does where tokens are flat. There a row of numbers becomes another; here one
    row for all sequences becomes a row of each, from the first operator on to the view that makes
    it broadcast over the batch.

    Raises:
        UnsupportedGraphError: places are read as floats in another way. Nothing else would say that
            such a program takes a later part of a sequence for its beginning.
    """

    requires = (is_off_meta_device,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        nodes = program.placeholder("tokens").meta["val"].shape[1]
        for node in program.calls(aten.to.dtype):
            source = counted(node.args[0])
            if source is None or not node.meta["val"].dtype.is_floating_point:
                continue
            count = source.meta["val"].shape[0]
            if not _symbols(nodes) & _symbols(count):
                continue  # it counts something else than tokens
            try:
                if str(count) != str(nodes):
                    raise NoMatch("it counts tokens of all sequences, or some of one")
                _spread(program, node)
            except NoMatch as reason:
                where = module_path(node)
                raise UnsupportedGraphError(
                    f"{where + ': ' if where else ''}node {node.name}, which reads the places of"
                    f" tokens in a pass as floats: {reason}",
                    "arithmetic with places that is then broadcast over the batch",
                    "compile with --backend cpu or cuda, which take flat tokens",
                ) from None
            result.rewrites += 1
        program.graph.eliminate_dead_code()
        return result


def _symbols(size: int | torch.SymInt) -> set[str]:
    """Names, or the number, that a size is made of."""
    return set(re.findall(r"\w+", str(size)))


def _spread(program: Program, first: fx.Node) -> None:
    """Give `first` [N] and what is computed of it a row of each sequence.

    Raises:
        NoMatch: what is computed of it is not a row of the batch in the end.
    """
    positions = program.placeholder("positions")
    batch = str(positions.meta["val"].shape[0])
    made = {first.args[0]: positions}
    for node in list(program.graph.nodes):
        if not made.keys() & set(node.all_input_nodes) or (
            node is not first and first.args[0] in node.all_input_nodes
        ):
            continue  # other readers of the same count have their own turn
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise NoMatch(f"{node.name} reads it")
        if node.target in _BROADCASTS and value.dim() > 1 and str(value.shape[0]) == batch:
            for source in made.keys() & set(node.all_input_nodes):
                if source.meta["val"].dim() != value.dim():
                    raise NoMatch(f"{node.name} broadcasts it from the right")
                node.replace_input_with(source, made[source])
            continue
        with program.graph.inserting_before(node):
            made[node] = _of_batch(node, made)
        made[node].meta["nn_module_stack"] = node.meta.get("nn_module_stack")


def _of_batch(node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node:
    """Batched form [batch, …] of a value that is [N] or [1, …] because all sequences share it."""
    value = node.meta["val"]
    if node.target in _ALONG and (value.dim() == 1 or value.shape[0] == 1):
        (source, *_) = (item for item in node.all_input_nodes if item in made)
        if source.meta["val"].dim() != value.dim():
            raise NoMatch(f"{node.name} gives it further dimensions")
        args = fx.map_arg(node.args, lambda item: made.get(item, item))
        return emit_call(node.graph, node.target, *args, **node.kwargs)
    source = node.args[0]
    if node.target not in _VIEWS or value.dim() < 2 or value.shape[0] != 1:
        raise NoMatch(f"{node.name} ({node.target}) reads it")
    sizes = [str(size) for size in source.meta["val"].shape if size != 1]
    if [str(size) for size in value.shape if size != 1] != sizes:
        raise NoMatch(f"{node.name} cuts it")
    # [B, N], then a dimension of one before and after it for each that the view has
    row = made[source]
    for dim in range(row.meta["val"].dim() - 1, 0, -1):
        if row.meta["val"].shape[dim] == 1:
            row = emit_call(node.graph, aten.squeeze.dim, row, dim)
    for dim in range(1, value.dim()):
        if value.shape[dim] == 1:
            row = emit_call(node.graph, aten.unsqueeze.default, row, dim)
    return row
