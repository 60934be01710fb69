"""Inputs of a program that hold weights as integers, and how a rank's part of one is cut."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, fx

from specc.artifact.decoders.kept_integers import KeptIntegers
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.weight_layout import turned
from specc.errors import ConfigError
from specc.kernels import ops
from specc.passes.program import Program, Weight, add_placeholder, bind_args, emit_call
from specc.sharding.shard_plan import (
    FIRST_ROW,
    OWN_ROWS,
    Collective,
    Cut,
    Interval,
    RankConstant,
    ShardPlan,
    WeightCut,
    pieces_of,
)

aten = torch.ops.aten
# names of constants, which hold the columns of a weight in their order
COLUMN_ORDER = "column_order"
# what reads its rows in an operand of another name than `input`
_ROWS = {ops.grouped_mm: "x"}


def kept_of(program: Program, weight: Weight) -> KeptIntegers | None:
    """What is kept of the checkpoint; None where not all of its parts have the same.

    Of ggml's blocks that ranks would part, the same numbers in groups of fewer columns, if at all.
    """
    found = {program.integers.get(name) for name in weight.parameters}
    kept = found.pop() if len(found) == 1 else None
    plan = program.shard
    cut = None if plan is None else plan.by_key.get(weight.key)
    while kept is not None and plan is not None and cut is not None and kept.layout.format:
        dim = -1 if weight.is_turned == kept.is_turned else -2
        if _parted(cut.cuts[dim], cut.shape[dim], kept.layout.apart, plan.num_ranks) is None:
            break
        wide = kept.layout.widened
        kept = None if wide is None else dataclasses.replace(kept, layout=wide)
    return kept


def whole_shape(program: Program, weight: Weight) -> tuple[int, ...]:
    """Shape of a weight before it was cut for ranks."""
    cuts = program.shard.by_key if program.shard is not None else {}
    return cuts[weight.key].shape if weight.key in cuts else weight.shape


class QuantizedInputs:
    """The quantized weights that a pass adds to a program, each once."""

    def __init__(self, program: Program) -> None:
        self._program = program
        # of earlier passes, too
        self._made: dict[Weight, fx.Node] = {
            program.weights[node.target]: node
            for node in program.graph.find_nodes(op="placeholder")
            if node.target in program.weights and program.weights[node.target].quantized is not None
        }

    def add(self, beside: fx.Node, layout: QuantizedLayout, is_turned: bool = False) -> fx.Node:
        """An input with the weight of another one, and the plan's entry of it.

        Args:
            beside: the input that it is made of; it stays.
            is_turned: that one has matrices [K, N].
        Raises:
            ConfigError: a rank would have a part of a group of columns.
        """
        program = self._program
        weight = program.weights[beside.target]
        shape = turned(weight.shape) if is_turned else weight.shape
        quantized = dataclasses.replace(
            weight, shape=shape, quantized=layout, is_turned=weight.is_turned != is_turned
        )
        if quantized not in self._made:
            if program.shard is not None:
                program.shard = _with_cut(program.shard, weight, quantized)
            value = beside.meta["val"].new_empty(quantized.stored_shape, dtype=torch.uint8)
            node = add_placeholder(program, f"{beside.target}_q{layout.bits}", value, beside)
            program.weights[node.target] = quantized
            self._made[quantized] = node
        return self._made[quantized]

    def layout_of(self, weight: Weight) -> QuantizedLayout | None:
        """Of the integers that the program has of these parameters, in rows; None of none."""
        for made in self._made:
            if made.parameters == weight.parameters and made.is_turned == weight.is_turned:
                return made.quantized
        return None

    def drop(self, node: fx.Node) -> None:
        """Forget an input that nobody reads any more."""
        if node.users:
            return
        program = self._program
        weight = program.weights.pop(node.target)
        program.graph.erase_node(node)
        keys = {item.key for item in program.weights.values()}
        if program.shard is not None and weight.key not in keys:
            kept = (cut for cut in program.shard.weights if cut.key != weight.key)
            program.shard = dataclasses.replace(program.shard, weights=tuple(kept))


def name_sums(program: Program) -> None:
    """Let the plan's sums be those of the graph, and name the products that they are of now."""
    plan = program.shard
    if plan is None:
        return
    known = {item.node: item for item in plan.collectives}
    sums: list[Collective] = []
    for node in reversed(program.calls(ops.all_reduce)):
        after = node.args[0].name  # type: ignore[union-attr]
        # a sum that is new stands before that of its product, in the same layer
        layer = known[node.name].layer if node.name in known else sums[-1].layer
        sums.append(Collective.of_sum(node.name, after, layer, node.meta["val"]))
    program.shard = dataclasses.replace(plan, collectives=tuple(reversed(sums)))


def order_columns(program: Program, node: fx.Node, blocks: fx.Node, columns: Tensor) -> None:
    """Let a product read its rows in the order in which the weight's columns are stored.

    Where ranks have some of the weight's outputs, and all of its columns, each reads whole rows in
    this order. Where they have some of its columns, each has whole groups of them, which follow
    each other in this order, and other columns of the rows: they exchange these before the product,
    see `_of_own_groups`. A product then is of the same groups as without ranks, and of the same
    integers.

    Args:
        columns: [K] int64.
    Raises:
        ConfigError: see `_of_own_groups`.
    """
    weight = program.weights[blocks.target]
    cut = program.shard.by_key[weight.key] if program.shard is not None else None
    name = next((k for k, v in program.constants.items() if _is_order(v, columns)), None)
    if name is None:
        # the same name on ranks, which have other constants, too
        name = f"{COLUMN_ORDER}_{sum(x.startswith(COLUMN_ORDER) for x in program.constants)}"
        _add_constant(program, name, columns, blocks)
    x = bind_args(node)[_ROWS.get(node.target, "input")]
    order = program.placeholder(name)
    with program.graph.inserting_before(node):
        if cut is not None and any(part.parts > 1 for part in cut.cuts[-1]):
            ordered = _of_own_groups(program, x, order, cut)
        else:
            ordered = emit_call(program.graph, aten.index_select.default, x, -1, order)
    node.replace_input_with(x, ordered)


def _of_own_groups(program: Program, x: fx.Node, order: fx.Node, cut: WeightCut) -> fx.Node:
    """[..., K / ranks] of [..., K / ranks]: a rank's columns in the order of all groups.

    Each puts what it has of x where it is in that order, and zeros elsewhere. The sum over ranks,
    which adds nothing but zeros to a value, is whole rows, of which each takes those of its groups.

    Raises:
        ConfigError: ranks have other columns than the n-th part of them each.
    """
    plan, graph = program.shard, program.graph
    assert plan is not None
    total, own = cut.shape[-1], cut.local_shape[-1]
    if cut.cuts[-1] != (Interval(0, total, plan.num_ranks),):
        raise ConfigError(
            f"{'+'.join(cut.parameters)}, whose columns are in the order of their groups"
            f" (act-order, desc_act), and {plan.num_ranks} ranks that have several parts of them",
            "one part of the columns for each rank",
            "leave out --tensor-parallel-size and --draft-ranks, or pass a checkpoint without"
            " act-order",
        )
    first = _rank_constant(program, RankConstant(f"first_of_{total}", FIRST_ROW, own, total), order)
    mine = _rank_constant(program, RankConstant(f"own_of_{total}", OWN_ROWS, own, total), order)
    place = emit_call(graph, aten.sub.Tensor, order, first)
    column = emit_call(graph, aten.clamp.default, place, 0, own - 1)
    is_elsewhere = emit_call(graph, aten.ne.Tensor, place, column)
    spread = emit_call(graph, aten.index_select.default, x, -1, column)
    # not a product with 0, which makes NaN of what is infinite
    masked = emit_call(graph, aten.masked_fill.Scalar, spread, is_elsewhere, 0.0)
    rows = emit_call(graph, ops.all_reduce, masked)
    return emit_call(graph, aten.index_select.default, rows, -1, mine)


def _rank_constant(program: Program, constant: RankConstant, beside: fx.Node) -> fx.Node:
    """An input with this rank's value; the same one for the same columns."""
    plan = program.shard
    assert plan is not None
    if constant not in plan.constants:
        program.shard = dataclasses.replace(plan, constants=(*plan.constants, constant))
        _add_constant(program, constant.name, constant.value(0), beside)
    return program.placeholder(constant.name)


def _add_constant(program: Program, name: str, value: Tensor, like: fx.Node) -> None:
    inputs = program.graph.find_nodes(op="placeholder")
    first = next(item for item in inputs if item.target in program.runtime_inputs)
    fake = like.meta["val"].new_zeros(value.shape, dtype=value.dtype)
    add_placeholder(program, name, fake, first.prev)
    program.constants[name] = value


def _is_order(value: Tensor, columns: Tensor) -> bool:
    return value.dtype == torch.int64 and torch.equal(value, columns)


def _with_cut(plan: ShardPlan, weight: Weight, quantized: Weight) -> ShardPlan:
    """The plan with a cut of the quantized weight after that of the weight it is made of."""
    layout = quantized.quantized
    assert layout is not None
    weights: list[WeightCut] = []
    for cut in plan.weights:
        weights.append(cut)
        if cut.key == weight.key:
            shape, cuts = cut.shape, cut.cuts
            if quantized.is_turned != weight.is_turned:
                shape, cuts = turned(shape), turned(cuts)
            own = dataclasses.replace(
                cut, key=quantized.key, dtype="uint8", shape=shape, cuts=cuts, layout=layout.name
            )
            _check_groups(own, layout, plan.num_ranks)
            weights.append(own)
    return dataclasses.replace(plan, weights=tuple(weights))


def _check_groups(cut: WeightCut, layout: QuantizedLayout, num_ranks: int) -> None:
    """Raises ConfigError: a rank would have a part of a group of columns, and its scale."""
    found = _parted(cut.cuts[-1], cut.shape[-1], layout.apart, num_ranks)
    if found is not None:
        rank, start, stop = found
        raise ConfigError(
            f"{cut.key}, {layout.apart} columns of which share a scale, and {num_ranks}"
            f" ranks: rank {rank} would have columns {start} … {stop - 1}",
            f"whole groups of {layout.apart} columns on each rank",
            "choose a smaller --quantize-group, --quantize int8, or fewer ranks",
        )


def _parted(columns: Cut, total: int, apart: int, num_ranks: int) -> tuple[int, int, int] | None:
    """The first rank that would have a part of what is not to be cut, and its columns."""
    for rank in range(num_ranks if apart else 0):
        for start, stop in pieces_of(columns, rank):
            if start % apart or (stop % apart and stop != total):
                return rank, start, stop
    return None
