"""Cut a model's graph for tensor parallelism: one text for all ranks."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher

from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.facts import attention_is_cached
from specc.passes.program import Program, add_placeholder, bind_args, emit_call, last_placeholder
from specc.passes.proof.token_routing import name_of
from specc.passes.rewrite.tree_recurrence import state_layer, state_sizes
from specc.passes.shard.biases import PartBiases, add_after
from specc.passes.shard.cut_choice import CutChoice
from specc.passes.shard.dimension_rules import parts_of, relations_of, slice_of
from specc.passes.shard.keep_heads import keep_heads
from specc.passes.shard.norms_over_heads import split_means
from specc.passes.shard.place_reduces import check_sums, place_reduces
from specc.passes.shard.relations import is_tensor
from specc.sharding.shard_plan import (
    FIRST_ROW,
    OWN_ROWS,
    PADDING,
    Collective,
    RankConstant,
    ShardPlan,
    WeightCut,
    local_offset,
    local_size,
)

aten = torch.ops.aten
_OF_LAYERS = (ops.tree_attention, ops.masked_attention, ops.tree_conv, ops.tree_recurrence)


class Shard(Pass):
    """The graph of a whole model → that of one of several ranks, and the plan of the cut.

    Heads, inner features and vocabulary are cut; sums over ranks stand where parts have to become
    sums. All ranks run the same graph: their weights differ, and the inputs that the plan calls
    constants. `program.shard` is the plan; the output is a rank's columns of the logits.

    Args:
        num_ranks: of the group.
    Raises:
        ConfigError: the model cannot be divided so.
    """

    requires = (attention_is_cached,)

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def run(self, program: Program) -> PassResult:
        if program.state_layers:
            keep_heads(program)
            split_means(program)
        _forget_names(program)
        cut = _Cut(program, self._num_ranks)
        if cut.shared_biases:
            # what is added after a sum is one more value, that sums stand before
            add_after(program, cut.shared_biases)
            cut = _Cut(program, self._num_ranks)
        cut.rewrite()
        program.shard = cut.plan()
        program.graph.lint()
        return PassResult(rewrites=len(program.shard.collectives))


class _Cut:
    """One program on its way from whole to cut."""

    def __init__(self, program: Program, num_ranks: int) -> None:
        self._program, self._num_ranks = program, num_ranks
        self._relations = relations_of(program)
        self._choice = CutChoice(program, self._relations, num_ranks)
        self._whole_shapes = {name: w.shape for name, w in program.weights.items()}
        nodes = list(program.graph.nodes)
        # as predicted, before anything changes
        self._shapes = {node: self._local_shape(node) for node in nodes if is_tensor(node)}
        self._size_replay_rows()
        self._check_dims(nodes)
        self._parts = {node for node in nodes if self._is_part(node)}
        self._reduces = place_reduces(
            program.graph, self._is_part, lambda node: bool(self._choice.cut_dims(node))
        )
        self._literals = {node: self._new_literals(node) for node in nodes}
        self._lookups = [node for node in self._relations.looked_up if self._is_part(node)]
        self._weight_cuts = {
            node.target: tuple(self._cuts(node))
            for node in nodes
            if node.op == "placeholder" and node.target in program.weights
        }
        self._biases = PartBiases(program, self._relations.contracted, self._is_part)
        self._constants: list[RankConstant] = []
        (output,) = (node for node in nodes if node.op == "output")
        self._logits: fx.Node = output.args[0]
        self._vocab_size = int(self._logits.meta["val"].shape[-1])

    @property
    def shared_biases(self) -> list[fx.Node]:
        """Products that leave parts of sums, and whose bias all ranks need."""
        return self._biases.shared

    # --- before the cut

    def _is_part(self, node: fx.Node) -> bool:
        """Whether a rank computes a part of this node's sum."""
        dims = (self._relations.contracted.get(node), self._relations.looked_up.get(node))
        return any(self._choice.is_cut(element) for element in dims)

    def _check_dims(self, nodes: list[fx.Node]) -> None:
        """A value is cut along one dimension, and parts of a sum along none."""
        for node in nodes:
            if is_tensor(node) and len(self._choice.cut_dims(node)) > 1 - self._is_part(node):
                dims = self._choice.cut_dims(node)
                raise AssertionError(f"{node.name} is cut along {dims}: too many dimensions")

    def _cuts(self, node: fx.Node) -> list[Any]:
        return [self._choice.cut((node, dim)) for dim in range(node.meta["val"].dim())]

    def _local_shape(self, node: fx.Node) -> tuple[Any, ...]:
        """Predicted; sizes of tokens are symbols, and stay."""
        return tuple(
            self._choice.local_size(node, dim) if isinstance(size, int) else str(size)
            for dim, size in enumerate(node.meta["val"].shape)
        )

    def _size_replay_rows(self) -> None:
        """A row of a recurrence is what a rank has of its operands, one after the other."""
        for node in self._program.calls(ops.tree_recurrence):
            given = bind_args(node)
            parts = [given[name] for name in ("k", "v", "g", "beta") if given[name] is not None]
            columns = sum(math.prod(self._shapes[part][1:]) for part in parts)
            rows = given["rows"]
            self._shapes[rows] = (*self._shapes[rows][:-1], columns)

    def _new_literals(self, node: fx.Node) -> dict[int, Any]:
        """Position of an argument → what it is after the cut."""
        if node.op != "call_function" or not hasattr(node.target, "_schema"):
            return {}
        name = name_of(node)
        if name in ("view", "reshape", "_unsafe_view", "expand"):
            return {1: self._sizes(node, node.args[1], node.meta["val"].dim() - len(node.args[1]))}
        if name == "unflatten":
            given = bind_args(node)
            first = given["dim"] % given["self"].meta["val"].dim()
            return {2: self._sizes(node, given["sizes"], first)}
        if name == "slice":
            return self._slice_bounds(node)
        if name in ("split", "split_with_sizes"):
            return {1: self._part_sizes(node, name)}
        return {}

    def _sizes(self, node: fx.Node, whole: Sequence[Any], first: int) -> list[Any]:
        """Sizes of a result's dimensions from the `first` on."""
        sizes = list(whole)
        for place, size in enumerate(sizes):
            if isinstance(size, int) and size > 1:
                sizes[place] = self._choice.local_size(node, first + place)
        return sizes

    def _slice_bounds(self, node: fx.Node) -> dict[int, Any]:
        given = bind_args(node)
        source, dim = given["self"], given["dim"]
        element = self._relations.element(source, dim)
        bounds = slice_of(node) if self._choice.is_cut(element) else None
        if element is None or bounds is None:
            return {}
        first = local_offset(self._choice.cut(element), bounds[0])
        # rows that pad the end are part of a slice that goes there
        return {2: first, 3: first + self._choice.local_size(node, dim)}

    def _part_sizes(self, node: fx.Node, name: str) -> Any:
        source, dim, bounds = parts_of(node)
        element = self._relations.element(source, dim)
        if element is None or not self._choice.is_cut(element):
            return node.args[1]
        cut = self._choice.cut(element)
        sizes = [local_offset(cut, stop) - local_offset(cut, start) for start, stop in bounds]
        return sizes if name == "split_with_sizes" else sizes[0]

    # --- the cut

    def rewrite(self) -> None:
        for node, literals in self._literals.items():
            for place, value in literals.items():
                if len(node.args) > place:
                    node.update_arg(place, value)
        self._cut_inputs()
        self._infer()
        self._cut_states()
        self._take_own_rows()
        for node in self._lookups:
            self._mask_lookup(node)
        self._insert_reduces()
        check_sums(self._program.graph, self._parts, ops.all_reduce)
        self._mask_padding()
        self._program.graph_module.recompile()

    def _cut_inputs(self) -> None:
        program = self._program
        for node in program.graph.find_nodes(op="placeholder"):
            is_cut = node.target in program.constants and self._choice.cut_dims(node)
            if is_cut or node.target in program.weights | program.caches | program.states:
                shape = self._shapes[node]
                value = node.meta["val"]
                sizes = [
                    local if isinstance(size, int) else size
                    for local, size in zip(shape, value.shape, strict=True)
                ]
                node.meta["val"] = value.new_empty(sizes)
            if node.target in program.weights:
                weight = program.weights[node.target]
                program.weights[node.target] = dataclasses.replace(weight, shape=shape)
        attended = [x for x in self._relations.heads if x.target is not ops.tree_recurrence]
        for place, node in enumerate(attended):
            queries, keys = self._relations.heads[node]
            program.layers[place] = dataclasses.replace(
                program.layers[place],
                num_heads=self._choice.local_size(*queries),
                num_kv_heads=self._choice.local_size(*keys),
            )

    def _cut_states(self) -> None:
        """What layers keep of a sequence follows from their operands, which are a rank's."""
        program = self._program
        calls = program.calls(ops.tree_conv, ops.tree_recurrence)
        for place, node in enumerate(calls):
            layer = state_layer(node, program.state_layers[place].name)
            program.state_layers[place] = layer
            for part in ("state", "rows"):
                found = self._shapes[bind_args(node)[part]]
                if found != (wanted := state_sizes(layer, part, *found[:2])):
                    raise AssertionError(f"{part} of {layer.name} is {found}, not {wanted}")

    def _infer(self) -> None:
        """Compute every value's shape anew, and see that it is what the classes predicted."""
        for node in self._program.graph.nodes:
            if node.op != "call_function":
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda item: item.meta["val"])
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            modes = [item.fake_mode for item in leaves if _is_fake(item)]
            if modes:
                with modes[0], enable_python_dispatcher():
                    node.meta["val"] = node.target(*args, **kwargs)
            elif node.target is operator.getitem:
                node.meta["val"] = node.target(*args)
            if is_tensor(node):
                found = tuple(s if isinstance(s, int) else str(s) for s in node.meta["val"].shape)
                if found != self._shapes[node]:
                    raise AssertionError(
                        f"{node.name} has shape {found} after the cut, not {self._shapes[node]}"
                    )

    def _take_own_rows(self) -> None:
        """Constants stay whole on every rank; of one that is cut, a rank reads its rows."""
        graph = self._program.graph
        for node in graph.find_nodes(op="placeholder"):
            if node.target not in self._program.constants or not self._choice.cut_dims(node):
                continue
            whole = self._program.constants[node.target]
            (dim,) = self._choice.cut_dims(node)
            cut, total = self._choice.cut((node, dim)), whole.shape[dim]
            if whole.numel() != total or cut[-1].stop != total:
                raise AssertionError(f"constant {node.target} is cut by {cut}")
            node.meta["val"] = node.meta["val"].new_empty(whole.shape)
            name, follow = f"rows_of_{node.target}", len(cut) == 1 and cut[0].copies == 1
            kind = RankConstant(
                name, OWN_ROWS, local_size(cut), total, cut=() if follow else tuple(cut)
            )
            rows = self._constant(kind, node)
            with graph.inserting_before(min(node.users)):
                own = emit_call(graph, aten.index_select.default, node, dim, rows)
            node.replace_all_uses_with(own, lambda user, own=own: user is not own)

    def _mask_lookup(self, node: fx.Node) -> None:
        """Rows that another rank holds count as zeros here."""
        graph, table, ids = self._program.graph, node.args[0], node.args[1]
        rows = int(table.meta["val"].shape[0])
        total = self._whole_shapes[table.target][0]
        first = self._constant(
            RankConstant(f"first_row_of_{table.target}", FIRST_ROW, rows, total), table
        )
        with graph.inserting_before(node):
            local = emit_call(graph, aten.sub.Tensor, ids, first)
            row = emit_call(graph, aten.clamp.default, local, 0, rows - 1)
            is_here = emit_call(graph, aten.eq.Tensor, local, row)
            mask = emit_call(graph, aten.unsqueeze.default, is_here, -1)
        node.update_arg(1, row)
        with graph.inserting_after(node):
            masked = graph.call_function(aten.mul.Tensor, (node, mask))
        masked.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(masked, lambda user: user is not masked)
        self._reduces = [masked if item is node else item for item in self._reduces]
        self._logits = masked if self._logits is node else self._logits

    def _insert_reduces(self) -> None:
        graph = self._program.graph
        for node in self._reduces:
            with graph.inserting_after(node):
                total = graph.call_function(ops.all_reduce, (node,))
            total.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(total, lambda user, total=total: user is not total)

    def _mask_padding(self) -> None:
        """Columns of logits that no token has must never win."""
        graph = self._program.graph
        (output,) = graph.find_nodes(op="output")
        logits = output.args[0]
        columns = int(logits.meta["val"].shape[-1])
        if columns == self._vocab_size or columns * self._num_ranks == self._vocab_size:
            return
        dtype = str(logits.meta["val"].dtype).removeprefix("torch.")
        constant = RankConstant("logit_padding", PADDING, columns, self._vocab_size, dtype)
        padding = self._constant(constant, logits)
        with graph.inserting_before(output):
            masked = emit_call(graph, aten.add.Tensor, logits, padding)
        output.args = (masked,)

    def _constant(self, constant: RankConstant, like: fx.Node) -> fx.Node:
        """An input with this rank's value; the same one for the same table."""
        if constant in self._constants:
            return self._program.placeholder(constant.name)
        self._constants.append(constant)
        value = constant.value(0)
        weights = [
            node
            for node in self._program.graph.find_nodes(op="placeholder")
            if node.target in self._program.weights or node.target in self._program.constants
        ]
        after = weights[-1] if weights else last_placeholder(self._program.graph)
        fake = like.meta["val"].new_empty(value.shape, dtype=value.dtype)
        self._program.constants[constant.name] = value
        return add_placeholder(self._program, constant.name, fake, after)

    # --- after the cut

    def plan(self) -> ShardPlan:
        program = self._program
        weights: dict[str, WeightCut] = {}
        for name, weight in program.weights.items():
            cut = WeightCut(
                weight.key,
                str(weight.dtype).removeprefix("torch."),
                self._whole_shapes[name],
                self._weight_cuts[name],
                name in self._biases.first_only,
            )
            if weights.setdefault(weight.key, cut) != cut:
                raise AssertionError(f"{weight.key} is cut in two ways")
            _check_cover(cut, self._num_ranks)
        (output,) = program.graph.find_nodes(op="output")
        return ShardPlan(
            self._num_ranks,
            tuple(weights.values()),
            tuple(self._collectives()),
            tuple(self._constants),
            self._vocab_size,
            int(output.args[0].meta["val"].shape[-1]),
        )

    def _collectives(self) -> list[Collective]:
        found, layer = [], 0
        for node in self._program.graph.nodes:
            if node.target in _OF_LAYERS:
                layer += 1
            if node.target is not ops.all_reduce:
                continue
            value, after = node.meta["val"], node.args[0].name
            found.append(Collective.of_sum(node.name, after, layer, value))
        return found


def _forget_names(program: Program) -> None:
    """Let names of new nodes follow from the graph alone, not from nodes that it had before.

    The cut of a graph that was read from a file is then the same text.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    program.graph_module.graph = graph


def _check_cover(cut: WeightCut, num_ranks: int) -> None:
    """Every index of every dimension is on exactly `copies` ranks; whole ones on all."""
    for intervals, size in zip(cut.cuts, cut.shape, strict=True):
        stops = [0, *(interval.stop for interval in intervals)]
        if [i.start for i in intervals] != stops[:-1] or stops[-1] < size:
            raise AssertionError(f"{cut.key}: {intervals} do not cover {size}")
        for part in intervals:
            if part.parts == 1:
                continue
            pieces = [part.piece(rank) for rank in range(num_ranks)]
            wanted = [
                (part.start + i * part.local_size, part.start + (i + 1) * part.local_size)
                for i in range(part.parts)
                for _ in range(part.copies)
            ]
            if pieces != wanted or wanted[-1][1] != part.stop:
                raise AssertionError(f"{cut.key}: pieces {pieces} of {part}")


def _is_fake(value: Any) -> bool:
    return isinstance(value, Tensor) and hasattr(value, "fake_mode")
