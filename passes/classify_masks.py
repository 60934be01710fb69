"""Recover what an attention mask means: causal, a sliding window, or an error.

The rewrite to tree attention deletes the mask, so its meaning is established first, by running
the mask's own nodes on concrete positions. Nothing is assumed from the model's name or config.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from specc.errors import UnsupportedAttentionError
from specc.passes.base import Pass, PassResult
from specc.passes.facts import is_flat_call_graph, masks_are_classified
from specc.passes.program import Program, bind_args, module_path, upstream

aten = torch.ops.aten

_SMALL = 48
_LARGE = 2048
# a constant in the mask beyond _LARGE is tested in a copy of the mask that has this one instead
_STAND_IN = 24


class ClassifyMasks(Pass):
    """Give every scaled_dot_product_attention node a window; 0 is causal without one."""

    requires = (is_flat_call_graph,)
    ensures = (masks_are_classified,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        known: dict[fx.Node | None, int] = {}
        nodes = list(program.calls(aten.scaled_dot_product_attention.default))
        if not nodes:
            raise UnsupportedAttentionError(*describe_foreign_attention(program))
        for node in nodes:
            bound = bind_args(node)
            mask = bound["attn_mask"]
            if bound["dropout_p"]:
                raise _error(node, f"dropout {bound['dropout_p']} in attention", "model.eval()")
            if mask is None:
                if not bound["is_causal"]:
                    raise _error(node, "bidirectional attention: no mask and is_causal is False")
                program.windows[node.name] = 0
            else:
                if mask not in known:
                    known[mask] = classify(node, mask)
                program.windows[node.name] = known[mask]
            result.rewrites += 1
        return result


def classify(attention: fx.Node, mask: fx.Node) -> int:
    """Window of a mask node; 0 is causal.

    Raises:
        UnsupportedAttentionError: names the layer and what the mask does.
    """
    evaluate = MaskEvaluator(attention, mask)
    window = _window(attention, evaluate(_SMALL), "")
    if _window(attention, evaluate(_SMALL, first=100), " at later positions") != window:
        raise _error(attention, "a mask that depends on absolute positions")
    if window:
        return window
    constants = sorted(evaluate.constants())
    if any(_SMALL <= constant <= _LARGE for constant in constants):
        width = min(_LARGE, max(c for c in constants if c <= _LARGE)) + 8
        if window := _window(attention, evaluate(width), ""):
            return window
    for constant in (c for c in constants if c > _LARGE):
        moved = _window(attention, evaluate(_SMALL, substitute=(constant, _STAND_IN)), "")
        if moved:
            return constant + moved - _STAND_IN
    return 0


class MaskEvaluator:
    """Runs the nodes that a mask depends on, on concrete positions."""

    def __init__(self, attention: fx.Node, mask: fx.Node) -> None:
        self.attention = attention
        self.mask = mask
        self.nodes = sorted(upstream(mask))
        inputs = {node.target for node in self.nodes if node.op == "placeholder"}
        if foreign := inputs - {"positions", "tokens"}:
            raise _error(attention, f"a mask computed from {', '.join(sorted(map(str, foreign)))}")

    def constants(self) -> set[int]:
        """Integers above the small width in the mask's nodes: candidates for a window."""
        found: set[int] = set()
        for node in self.nodes:
            for leaf in torch.utils._pytree.tree_leaves((node.args, node.kwargs)):
                # 2**31 and more are "to the end" in slices
                if type(leaf) is int and _SMALL <= abs(leaf) < 2**31:
                    found.add(abs(leaf))
        return found

    def __call__(
        self, width: int, first: int = 0, substitute: tuple[int, int] | None = None
    ) -> Tensor:
        """[width, width] bool: row may attend to column."""
        env: dict[fx.Node, Any] = {}

        def lookup(item: Any) -> Any:
            return env[item]

        def swap(item: Any) -> Any:
            if substitute and type(item) is int and abs(item) == substitute[0]:
                return substitute[1] if item > 0 else -substitute[1]
            return item

        for node in self.nodes:
            if node.op == "placeholder":
                if node.target == "positions":
                    env[node] = torch.arange(first, first + width)
                else:
                    env[node] = torch.ones(width, dtype=torch.int64)
                continue
            args = torch.utils._pytree.tree_map(swap, fx.map_arg(node.args, lookup))
            env[node] = node.target(*args, **fx.map_arg(node.kwargs, lookup))  # type: ignore[operator]
        return self._allowed(env[self.mask], width)

    def _allowed(self, value: Tensor, width: int) -> Tensor:
        if value.dtype != torch.bool:
            open_ = value == 0
            blocked = value <= -1e4
            if not (open_ | blocked).all():
                raise _error(
                    self.attention, "a bias added to the scores (ALiBi or relative positions)"
                )
            value = open_
        heads = value.expand(*value.shape[:-2], width, width).reshape(-1, width, width)
        if not (heads == heads[0]).all():
            raise _error(self.attention, "a mask that differs between heads")
        return heads[0]


def _window(attention: fx.Node, allowed: Tensor, where: str) -> int:
    width = allowed.shape[0]
    row, column = torch.arange(width)[:, None], torch.arange(width)[None]
    causal = column <= row
    if torch.equal(allowed, causal):
        return 0
    window = int(allowed[-1].sum())
    if torch.equal(allowed, causal & (column > row - window)):
        return window
    if (allowed & ~causal).any():
        raise _error(attention, f"bidirectional attention: a token sees later ones{where}")
    raise _error(attention, f"a mask that is neither causal nor one sliding window{where}")


def describe_foreign_attention(program: Program) -> tuple[str, str, str]:
    """Found / needed / do for a graph without attention nodes: names the first softmax."""
    softmaxes = list(program.calls(aten.softmax.int, aten._softmax.default))
    needed = "attention as torch.nn.functional.scaled_dot_product_attention"
    do = "choose a model of a supported architecture (see README, What is supported)"
    if not softmaxes:
        return "the model has no attention layer", needed, do
    node = softmaxes[0]
    nearby = _nearby(node, 12)
    targets = {item.target for item in nearby}
    if aten.tanh.default in targets:
        reason = "scores pass through tanh (softcap)"
    elif targets & {aten.baddbmm.default}:
        reason = "a bias is added to the scores (ALiBi)"
    else:
        reason = "softmax outside scaled_dot_product_attention"
    return f"layer {module_path(node) or node.name}: {reason}", needed, do


def _nearby(node: fx.Node, levels: int) -> set[fx.Node]:
    seen, frontier = {node}, {node}
    for _ in range(levels):
        frontier = {item for inner in frontier for item in inner.all_input_nodes} - seen
        seen |= frontier
    return seen


def _error(node: fx.Node, reason: str, do: str = "") -> UnsupportedAttentionError:
    return UnsupportedAttentionError(
        f"layer {module_path(node) or node.name}: {reason}",
        "causal attention, optionally with one sliding window",
        do or "choose a model of a supported architecture (see README, What is supported)",
    )
