"""Proof that outside attention and recurrences every number depends on one token alone.

The tokens of a pass may be branches of a tree or several sequences: whatever mixes them outside
`specc::tree_attention`, `specc::tree_conv`, `specc::tree_recurrence` and `specc::block_conv`
computes wrong numbers without failing. The proof follows the dimension of tokens through the graph,
operator by operator; what no rule covers is refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from specc.artifact.graph_io import target_name
from specc.errors import UnsupportedGraphError, UnsupportedRotaryError
from specc.kernels.operator import (
    AlongLast,
    Elementwise,
    Lookup,
    NamedRows,
    OfHeads,
    OfRows,
    Product,
    SortedRows,
    TokenRule,
)
from specc.kernels.ops import operator_of
from specc.passes.program import HIDDEN, STATES, Program, bind_args, module_path, refusal
from specc.passes.proof import token_routing as routing
from specc.passes.proof.token_routing import (
    Counts,
    State,
    Tokens,
    is_in_order,
    is_whole,
    outputs_of,
)
from specc.passes.proof.token_sizes import TokenSizes
from specc.passes.proof.token_states import why_not_its_own

# what a node can be besides plain (None), Tokens or Counts
_SIZE = "the number of tokens"
_OPAQUE = "an input of attention"
_ROWS = "logit_rows"


def verify_tokenwise(program: Program, phase: str) -> None:
    """Check that a finished program mixes tokens in attention only; linear in its nodes.

    Raises:
        UnsupportedGraphError: an operator mixes tokens, or is not known to keep them apart.
        UnsupportedRotaryError: frequencies that depend on the longest position of a pass.
    """
    _Proof(program, phase).run()


class _Proof:
    """Assigns each node a state, in the order of execution; every state is an invariant.

    `Tokens`: index i along `dim` depends on one token only, that of place i // scale in `order`.
    None: the value depends on no token.
    """

    def __init__(self, program: Program, phase: str) -> None:
        self._program, self._phase = program, phase
        self._states: dict[fx.Node, Any] = {}
        self._sizes = TokenSizes(program, phase)

    def run(self) -> None:
        for node in self._program.graph.nodes:
            if node.op == "placeholder":
                self._states[node] = self._input(node)
            elif node.op == "call_function":
                self._states[node] = self._call(node)
            elif node.op == "output":
                self._output(node)

    def _input(self, node: fx.Node) -> State:
        if node.target in self._program.weights or node.target in self._program.constants:
            return None
        if node.target in ("tokens", "positions"):
            return Tokens(0, 1, 1, None, is_position=node.target == "positions")
        if node.target == HIDDEN or node.target in self._program.row_inputs:
            size = self._sizes.of(node, node.meta["val"])
            if size is None or size.scale != 1 or size.is_rows:
                raise self._refuse(node, "it has no row for each token")
            return Tokens(size.dim, node.meta["val"].dim(), 1, None)
        return _ROWS if node.target == "logit_rows" else _OPAQUE

    def _output(self, node: fx.Node) -> None:
        logits, handed_on = self._program.logits, self._program.handed_on
        state = self._states[logits]
        if handed_on is not None and not is_in_order(self._states[handed_on]):
            raise self._refuse(handed_on, "what is handed on has no row for each token")
        if self._program.ends_hidden:
            if not is_in_order(state):
                raise self._refuse(logits, "what is handed on has no row for each token")
            return
        if not isinstance(state, Tokens) or (state.dim, state.order) != (0, _ROWS):
            raise self._refuse(logits, "the output has no row for each of logit_rows")

    def _call(self, node: fx.Node) -> Any:
        states = [self._states[item] for item in node.all_input_nodes]
        if node.target is operator.getitem:
            return states[0][node.args[1]]
        if node.meta["val"] is not None and not any(
            isinstance(v, Tensor) for v in outputs_of(node)
        ):
            return _SIZE
        if not isinstance(node.target, torch._ops.OpOverload):
            raise self._refuse(node, f"{target_name(node.target)} computes a tensor")
        if (own := operator_of(node.target)) is not None:
            return self._own(node, own.name, own.tokens, states)
        name = routing.name_of(node)
        routed = routing.route(node, name, self._states)
        if routed is not routing.UNKNOWN:
            return self._routed(node, routed)
        self._refuse_uses(node, name, states)
        if rule := self._rule(node, name):
            return rule(node, name)
        return self._without_rule(node, states)

    def _own(self, node: fx.Node, name: str, rule: TokenRule, states: list[State]) -> Any:
        """Of an operator of specc, by its table."""
        match rule:
            case OfHeads():
                return self._attention(node, rule)
            case OfRows():
                return self._rows(node, rule)
            case NamedRows():
                return self._named_rows(node, bind_args(node)[rule.names])
            case SortedRows():
                routed = routing.route_sorted(node, rule, self._states)
                if routed is not routing.UNKNOWN:
                    return self._routed(node, routed)
        self._refuse_uses(node, name, states)
        match rule:
            case Product():
                return self._contract(node, rule)
            case AlongLast():
                return self._norm(node, name)
            case Lookup():
                bound = bind_args(node)
                return self._look_up(node, bound[rule.table], bound[rule.ids])
            case Elementwise():
                return self._pointwise(node, name)
        return self._without_rule(node, states)

    def _routed(self, node: fx.Node, state: Any) -> Any:
        sizes = [self._sizes.of(node, value) for value in outputs_of(node)]
        if isinstance(state, Tokens) and sizes[0] is not None:
            return replace(state, scale=sizes[0].scale)
        return state

    def _without_rule(self, node: fx.Node, states: list[State]) -> Any:
        if not any(isinstance(state, Tokens) for state in states):
            return self._result(node, None)
        raise self._refuse(node, f"{target_name(node.target)} is not known to keep tokens apart")

    def _rule(self, node: fx.Node, name: str) -> Callable[[fx.Node, str], Any] | None:
        tags = node.target.tags  # type: ignore[union-attr]
        rules: tuple[tuple[bool, Callable[[fx.Node, str], Any]], ...] = (
            (name in routing.CONVERSIONS, self._conversion),
            (name in routing.VIEWS, self._view),
            (name in routing.MOVES, self._move),
            (name in routing.ALONG and node.target._overloadname != "other", self._along),
            (name in routing.NORMS, self._norm),
            (name in routing.FACTORS, self._product),
            (name == "expand", self._expand),
            (name in ("pad", "constant_pad_nd"), self._pad),
            (name == "embedding", self._embedding),
            (name == "index", self._index),
            # with one argument it is the places of what is not zero
            (name == "where" and node.target._overloadname != "default", self._pointwise),
            (name in routing.POINTWISE or torch.Tag.pointwise in tags, self._pointwise),
        )
        return next((rule for applies, rule in rules if applies), None)

    def _refuse_uses(self, node: fx.Node, name: str, states: list[State]) -> None:
        """Refuse numbers that say something about the pass as a whole."""
        target = target_name(node.target)
        for item, state in zip(node.all_input_nodes, states, strict=True):
            if state == _SIZE and name not in routing.SIZED and not is_whole(node, name):
                raise self._refuse(node, f"{target} computes with the number of tokens in the pass")
            if state == _OPAQUE or (state == _ROWS and name != "index_select"):
                raise self._refuse(node, f"{target} reads {item.name}, which only attention may")
            if isinstance(state, Counts) and name not in routing.CONVERSIONS:
                raise self._refuse(node, f"{target} computes with counts of tokens in the pass")
            if isinstance(state, list):
                raise self._refuse(node, f"{target} reads several tensors at once")
            if isinstance(state, Tokens) and state.is_place and name not in routing.SAME:
                raise self._refuse(
                    node,
                    f"{target} computes with the places of tokens in the pass (arange, sort),"
                    " while tokens of a tree share positions: position_ids are right",
                )

    # rules: (node, operator) -> state

    def _conversion(self, node: fx.Node, name: str) -> Any:
        state = self._states[node.args[0]]
        is_exact = node.meta["val"].dtype.itemsize >= 4  # for any number of tokens and experts
        if isinstance(state, Counts) and is_exact:
            return state
        if isinstance(state, Counts) or (isinstance(state, Tokens) and state.is_place > is_exact):
            raise self._refuse(node, f"{target_name(node.target)} cuts off places or counts")
        result = self._result(node, state)
        if state is None or not (is_exact or state.role == routing.CHOICES):
            return result
        return replace(result, role=state.role, detail=state.detail)

    def _move(self, node: fx.Node, name: str) -> Any:
        return self._kept(node, self._states[node.args[0]])

    def _view(self, node: fx.Node, name: str) -> Any:
        source, before = node.args[0], self._states[node.args[0]]
        size = self._sizes.of(node, node.meta["val"])
        if not isinstance(before, Tokens) or size is None:
            return self._kept(node, before)
        shapes = source.meta["val"].shape[: before.dim], node.meta["val"].shape[: size.dim]
        is_sorted = isinstance(before.order, fx.Node)
        if math.prod(shapes[0]) != math.prod(shapes[1]) or (
            is_sorted and before.scale != size.scale
        ):
            raise self._mixes(node)
        return self._kept(node, replace(before, scale=size.scale))

    def _expand(self, node: fx.Node, name: str) -> Any:
        state, size = self._states[node.args[0]], self._sizes.of(node, node.meta["val"])
        if state is None and size is not None:  # one value for all tokens
            order = _ROWS if size.is_rows else None
            return Tokens(size.dim, node.meta["val"].dim(), size.scale, order)
        return self._kept(node, state)

    def _pointwise(self, node: fx.Node, name: str) -> Any:
        return self._result(node, self._merge(node))

    def _along(self, node: fx.Node, name: str) -> Any:
        bound, state = bind_args(node), self._merge(node)
        if name == "index_select":
            return self._select(node, bound, state)
        if state is None:
            return self._result(node, None)
        dims = next((bound[key] for key in ("dim", "dims", "dimension") if key in bound), None)
        dims = (dims,) if isinstance(dims, int) else tuple(dims or range(state.ndim))
        if state.dim in {dim % state.ndim for dim in dims} and not is_whole(node, name):
            if state.is_position and name in routing.REDUCTIONS:
                raise UnsupportedRotaryError(
                    f"layer {module_path(node) or node.name}: {target_name(node.target)} over the"
                    " positions of the pass",
                    "rotary frequencies that depend on each token's own position only",
                    "choose a rotary scaling without dependence on length (linear, llama3, yarn)",
                )
            raise self._mixes(node)
        if name in ("gather", "scatter"):
            operands = [item for item in node.all_input_nodes if self._states[item] is None]
            if operands:
                raise self._mixes(node)
        return self._result(node, state)

    def _select(self, node: fx.Node, bound: dict[str, Any], state: Tokens | None) -> Any:
        source, index = self._states[bound["self"]], self._states[bound["index"]]
        if index == _ROWS:
            is_plain = isinstance(source, Tokens) and (source.scale, source.order) == (1, None)
            if not is_plain or bound["dim"] % source.ndim != source.dim:
                raise self._refuse(node, "logit_rows select something other than tokens")
            return replace(source, order=_ROWS, role="", is_position=False)
        if isinstance(source, Tokens) and (
            index is not None or bound["dim"] % source.ndim == source.dim
        ):
            raise self._mixes(node)
        return self._result(node, state)

    def _norm(self, node: fx.Node, name: str) -> Any:
        bound, state = bind_args(node), self._merge(node)
        if state is not None and state.dim >= state.ndim - len(bound.get("normalized_shape", "D")):
            raise self._mixes(node)
        return self._result(node, state)

    def _product(self, node: fx.Node, name: str) -> Any:
        return self._contract(node, routing.FACTORS[name])

    def _contract(self, node: fx.Node, rule: Product) -> Any:
        """Contract over static dims; tokens in both factors only as a common batch dimension."""
        bound = bind_args(node)
        first, second = bound[rule.first], bound[rule.second]
        a, b = self._states[first], self._states[second]
        # dims that are summed over, from the right
        summed = -2 if rule.is_plain and second.meta["val"].dim() > 1 else -1
        for state, dim in ((a, -1), (b, summed)):
            if isinstance(state, Tokens) and state.right == dim:
                raise self._mixes(node)
        if a is not None and b is not None and a.right > -3:
            raise self._mixes(node)
        bias = bound.get(rule.bias)
        if bias is not None and self._states[bias] is not None:
            raise self._mixes(node)
        like = self._merge(node) if a is not None and b is not None else a or b
        return self._result(node, like)

    def _pad(self, node: fx.Node, name: str) -> Any:
        """Padding and cropping along tokens may keep their number, and shift them."""
        state, pads = self._merge(node), list(node.args[1])  # type: ignore[arg-type]
        if state is not None and any(pads[-2 * state.right - 2 : -2 * state.right]):
            raise self._mixes(node)
        return self._result(node, state)

    def _embedding(self, node: fx.Node, name: str) -> Any:
        return self._look_up(node, *node.args[:2])

    def _look_up(self, node: fx.Node, table: Any, ids: Any) -> Any:
        if self._states[table] is not None:
            raise self._mixes(node)
        return self._result(node, self._states[ids])

    def _index(self, node: fx.Node, name: str) -> Any:
        """Of tokens, constant places along another dimension; tables may be read by token.

        Expert routing has its own rules.
        """
        source, indices = self._states[node.args[0]], node.args[1]
        if source is not None:
            used = [(i, item) for i, item in enumerate(indices) if item is not None]
            is_plain = len(used) == 1 and self._states[used[0][1]] is None
            if not is_plain or used[0][0] == source.dim or used[0][1].meta["val"].dim() != 1:
                raise self._mixes(node)
            return self._result(node, source)
        return self._result(node, self._merge(node))

    # states

    def _merge(self, node: fx.Node) -> Tokens | None:
        """The one way in which the arguments count tokens, aligned from the right."""
        found = [s for n in node.all_input_nodes if isinstance(s := self._states[n], Tokens)]
        if not found:
            return None
        first = found[0]
        if any(
            (s.right, s.scale, s.order) != (first.right, first.scale, first.order) for s in found
        ):
            raise self._mixes(node)
        return replace(first, role="", is_position=all(s.is_position for s in found))

    def _kept(self, node: fx.Node, state: State) -> Any:
        """The result of what moves entries, but no token relative to another."""
        result = self._result(node, state)
        if not isinstance(state, Tokens) or state.role == routing.CHOICES:
            return result  # experts may have changed places
        return replace(result, role=state.role, detail=state.detail)

    def _result(self, node: fx.Node, like: State) -> Any:
        """States of a node's outputs: tokens as in `like`, where the shapes have them."""
        states: list[State] = []
        for value in outputs_of(node):
            size = self._sizes.of(node, value)
            if not isinstance(value, Tensor):
                states.append(None)
            elif isinstance(like, Tokens):
                is_rows = like.order == _ROWS
                if size is None or (size.scale, size.is_rows) != (like.scale, is_rows):
                    raise self._mixes(node)
                states.append(replace(like, dim=size.dim, ndim=value.dim(), role="", detail=None))
            elif size is not None:
                raise self._refuse(
                    node, f"{target_name(node.target)} makes a value for each place in the pass"
                )
            else:
                states.append(None)
        return states if isinstance(node.meta["val"], list | tuple) else states[0]

    def _attention(self, node: fx.Node, rule: OfHeads) -> Any:
        bound = bind_args(node)
        for names, dim, ndim, what in (
            (rule.heads, 1, 3, "[heads, tokens, head_dim]"),
            (rule.tables, 0, 2, "[tokens, columns]"),
            (rule.of_tokens, 0, None, "[tokens, …]"),
        ):
            for item in (bound[name] for name in names if bound[name] is not None):
                state = self._states[item]
                is_there = is_in_order(state) and state.dim == dim
                if not is_there or ndim not in (None, state.ndim):
                    raise self._refuse(node, f"{item.name} is not {what}")
        for item in (bound[name] for name in rule.parameters):
            if item is not None and self._states[item] is not None:
                raise self._mixes(node)
        if STATES in bound and (reason := why_not_its_own(self._program, node)):
            raise self._refuse(node, f"{target_name(node.target)}: {reason}")
        if node.meta["val"] is None:
            return None
        first = bound[(rule.heads or rule.tables or rule.of_tokens)[0]]
        return replace(self._result(node, self._states[first]), is_position=False)

    def _rows(self, node: fx.Node, rule: OfRows) -> Any:
        """Rows of tokens that are multiplied; parameters have no tokens."""
        bound = bind_args(node)
        states = {
            name: self._states[item] for name, item in bound.items() if isinstance(item, fx.Node)
        }
        first = states[rule.rows[0]]
        for name in rule.rows:
            state = states[name]
            if not is_in_order(state):
                raise self._refuse(node, f"{bound[name].name} is not a row for each token")
            # of a table only whole rows are read, which tokens name
            is_within = state.right == -1 and not rule.are_ids
            if is_within or state.right != first.right:
                raise self._mixes(node)
        for name in rule.tables:
            state = states[name]
            if not is_in_order(state) or (state.dim, state.ndim) != (0, 2):
                raise self._refuse(node, f"{bound[name].name} is not [tokens, columns]")
        for name in rule.parameters:
            if states.get(name) is not None:
                raise self._mixes(node)
        first = replace(first, role="", is_position=False)
        if rule.chosen is not None:
            if states[rule.chosen] != _ROWS:
                raise self._refuse(node, f"{bound[rule.chosen].name} is not logit_rows")
            first = replace(first, order=_ROWS)
        return self._result(node, first)

    def _named_rows(self, node: fx.Node, names: Any) -> Any:
        """Rows of a slab that each token names; the slab is a cache, which tokens do not own."""
        state = self._states[names]
        if not is_in_order(state) or (state.dim, state.ndim) != (0, 2):
            raise self._refuse(node, f"{names.name} is not [tokens, rows]")
        if any(self._states[x] != _OPAQUE for x in node.all_input_nodes if x is not names):
            raise self._mixes(node)
        return self._result(node, state)

    def _mixes(self, node: fx.Node) -> UnsupportedGraphError:
        return self._refuse(node, f"{target_name(node.target)} mixes tokens outside attention")

    def _refuse(self, node: fx.Node, reason: str) -> UnsupportedGraphError:
        return refusal(node, self._phase, reason)
