"""Look cosines and sines of positions up instead of computing them in every pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from specc.kernels import ops
from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.program import Program, add_placeholder, emit_call, upstream

aten = torch.ops.aten
# operators that read rows of both tables
_READERS = (
    ops.rope_write, ops.norm_rope_write, ops.rope_write_latent, ops.add_norm_rope_write,
    ops.embed_norm_rope_write,
)  # fmt: skip


class TabulateRotary(Pass):
    """cos and sin that follow from `positions` and constants → rows of one constant table.

    A device spends some nine launches a pass on these few numbers; a lookup is one. The table has
    a row for each position that the engine serves: cosines, then sines, evaluated here once. It
    takes their place only where the numbers of every position are the same to the last bit,
    whichever other positions are in the pass.

    Args:
        num_positions: rows of passes are at positions 0 … num_positions - 1.
    """

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        readers: dict[tuple[fx.Node, fx.Node], list[fx.Node]] = {}
        for node in program.calls(*_READERS):
            names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
            cos, sin = (node.args[names.index(name)] for name in ("cos", "sin"))
            readers.setdefault((cos, sin), []).append(node)  # type: ignore[arg-type]
        first = [min(calls) for calls in readers.values()]
        for (cos, sin), calls in readers.items():
            with result.attempt(cos.name):
                table = self._table(program, cos, sin)
                name = f"rotary_{result.rewrites}"
                # all lookups come before the first layer, none between two of them
                halves = _look_up(program, table, name, cos.meta["val"].fake_mode, min(first))
                for call in calls:
                    for old, new in zip((cos, sin), halves, strict=True):
                        call.replace_input_with(old, new)
        program.graph.eliminate_dead_code()
        _drop_unused_constants(program)
        return result

    def _table(self, program: Program, cos: fx.Node, sin: fx.Node) -> Tensor:
        """[positions, 2 R]: cosines, then sines."""
        nodes = sorted(upstream(cos) | upstream(sin))
        for node in nodes:
            is_known = node.target == "positions" or node.target in program.constants
            if node.op == "placeholder" and not is_known:
                raise NoMatch(f"cosines and sines follow from {node.target}, too")
        if cos.meta["val"].dtype != sin.meta["val"].dtype:
            raise NoMatch("cosines and sines differ in dtype")
        count = self._num_positions
        table = _evaluate(program, nodes, torch.arange(count), cos, sin)
        # as many numbers as a pass may have, repeated ones too, in any order
        generator = torch.Generator().manual_seed(0)
        for size in (1, 2, 7, 64):
            picked = torch.randint(0, count, (size,), generator=generator)
            if not torch.equal(_evaluate(program, nodes, picked, cos, sin), table[picked]):
                raise NoMatch("a row depends on more than its own position")
        return table


def _evaluate(
    program: Program, nodes: list[fx.Node], positions: Tensor, cos: fx.Node, sin: fx.Node
) -> Tensor:
    """[Nt, 2 R] of these positions."""
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in nodes:
            if node.op == "placeholder":
                is_input = node.target == "positions"
                values[node] = positions if is_input else program.constants[node.target]  # type: ignore[index]
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return torch.cat([values[cos], values[sin]], dim=-1)


def _look_up(
    program: Program, table: Tensor, name: str, mode: Any, before: fx.Node
) -> list[fx.Node]:
    """Cosines and sines, rows of a table that becomes a constant of this name."""
    graph = program.graph
    inputs = graph.find_nodes(op="placeholder")
    first = next(node for node in inputs if node.target in program.runtime_inputs)
    positions = program.placeholder("positions")
    # where the trace has its tensors; torch 2.11 refuses a lookup across devices
    values = torch.empty_like(table, device=positions.meta["val"].device)
    fake = mode.from_tensor(values, static_shapes=True)
    placeholder = add_placeholder(program, name, fake, first.prev)
    program.constants[name] = table
    size = table.shape[1] // 2
    with graph.inserting_before(before):
        rows = emit_call(graph, aten.embedding.default, placeholder, positions)
        return [
            emit_call(graph, aten.slice.Tensor, rows, 1, start, start + size) for start in (0, size)
        ]


def _drop_unused_constants(program: Program) -> None:
    """Frequencies that nobody reads any more."""
    for node in list(program.graph.find_nodes(op="placeholder")):
        if node.target in program.constants and not node.users:
            del program.constants[node.target]
            program.graph.erase_node(node)
