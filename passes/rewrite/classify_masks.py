"""Recover what an attention mask means: causal, a sliding window, chunks, or an error.

The rewrite to tree attention deletes the mask, so its meaning is established first, by running
the mask's own nodes on concrete positions. Nothing is assumed from the model's name or config.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from specc.errors import UnsupportedAttentionError
from specc.passes.base import Pass, PassResult
from specc.passes.facts import (
    DENSE_ATTENTION,
    DENSE_RECURRENCE,
    is_flat_call_graph,
    masks_are_classified,
)
from specc.passes.program import Program, Slopes, bind_args, module_path
from specc.passes.rewrite.find_chunks import find_chunk
from specc.passes.rewrite.find_slopes import find_slopes, widest
from specc.passes.rewrite.mask_evaluator import MaskEvaluator, mask_error

aten = torch.ops.aten

# widths and first positions at which every mask is evaluated; the widest comes first
_PROBES = ((2048, 0), (48, 0), (48, 100), (301, 7))
# a mask whose constants add up to this is evaluated beyond all of them
_WIDEST = 8192
# a constant too large for that is replaced by these in turn
_STAND_INS = (700, 1100)


class ClassifyMasks(Pass):
    """Give every attention node a window, 0 is causal without one; chunks and slopes, if any."""

    requires = (is_flat_call_graph,)
    ensures = (masks_are_classified,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        known: dict[tuple, tuple[int, Slopes | None]] = {}
        chunks: dict[fx.Node, int] = {}
        nodes = list(program.calls(*DENSE_ATTENTION))
        if not nodes and not program.calls(*DENSE_RECURRENCE):
            raise UnsupportedAttentionError(*describe_foreign_attention(program))
        for node in nodes:
            result.rewrites += 1
            bound = bind_args(node)
            mask = bound["attn_mask"]
            sizes = [bound[key].meta["val"].shape[-2] for key in ("query", "key")]
            if str(sizes[0]) != str(sizes[1]):
                raise mask_error(node, f"{sizes[1]} keys for {sizes[0]} tokens")
            if bound.get("dropout_p"):
                raise mask_error(node, f"dropout {bound['dropout_p']} in attention", "model.eval()")
            if mask is None:
                if not bound.get("is_causal", True):
                    raise mask_error(
                        node, "bidirectional attention: no mask and is_causal is False"
                    )
                program.windows[node.name] = 0
                continue
            if mask not in chunks:
                chunks[mask] = find_chunk(MaskEvaluator(node, mask))
            most = program.most_positions
            if chunks[mask] and most is not None and most <= chunks[mask]:
                # no sequence reaches the second chunk
                program.windows[node.name] = 0
            elif chunks[mask]:
                program.windows[node.name] = 0
                program.chunks[node.name] = chunks[mask]
            else:
                # what products with positions are rounded before depends on the scale
                heads, scale = int(bound["query"].meta["val"].shape[1]), scale_of(node)
                if (mask, heads, scale) not in known:
                    known[mask, heads, scale] = meaning_of(node, mask, heads, scale)
                window, slopes = known[mask, heads, scale]
                program.windows[node.name] = window
                if slopes is not None:
                    program.slopes[node.name] = slopes
        return result


def scale_of(attention: fx.Node) -> float:
    """Factor of an attention's scores."""
    bound = bind_args(attention)
    if bound["scale"] is not None:
        return float(bound["scale"])
    return float(bound["query"].meta["val"].shape[-1]) ** -0.5


def meaning_of(
    attention: fx.Node, mask: fx.Node, num_heads: int, scale: float
) -> tuple[int, Slopes | None]:
    """Window and slopes of a mask node.

    Args:
        num_heads: of the attention.
        scale: of its scores.
    Raises:
        UnsupportedAttentionError: see `classify` and `find_slopes`.
    """
    evaluate = MaskEvaluator(attention, mask)
    slopes = find_slopes(evaluate, num_heads, scale)
    if slopes is None:
        return classify(attention, mask), None
    most = widest(evaluate, num_heads)
    probes = [(min(width, most), first) for width, first in _PROBES]
    return _window_of(evaluate, probes, most), slopes


def classify(attention: fx.Node, mask: fx.Node) -> int:
    """Window of a mask node that adds nothing to scores; 0 is causal.

    The mask is evaluated at several widths and positions, which must all show one window, and
    beyond the sum of its constants, where no edge can hide.

    Raises:
        UnsupportedAttentionError: names the layer and what the mask does.
    """
    return _window_of(MaskEvaluator(attention, mask), _PROBES, _WIDEST)


def _window_of(
    evaluate: MaskEvaluator, probes: Sequence[tuple[int, int]], widest_of_all: int
) -> int:
    attention = evaluate.attention
    small = _window(attention, evaluate(*probes[1]))
    window = _window(attention, evaluate(*probes[0]))
    if small and small != window:
        raise mask_error(attention, "a mask that is neither causal nor one sliding window, far out")
    for width, first in probes[1:]:
        if not torch.equal(evaluate(width, first), _expected(width, window)):
            raise mask_error(
                attention, "a mask that depends on absolute positions or on the number of tokens"
            )
    evaluate.require_linear()
    constants = evaluate.constants()
    reach = math.ceil(sum(constants)) + 16
    if reach <= probes[0][0]:
        return window
    if reach > widest_of_all and evaluate.slopes is not None:
        reason = f"a bias added to the scores, and numbers of tokens beyond {widest_of_all}"
        raise mask_error(attention, reason)
    if reach > widest_of_all:
        return _window_by_stand_ins(evaluate, constants)
    far = _window(attention, evaluate(reach))
    if window and far != window:
        raise mask_error(attention, "a mask that is neither causal nor one sliding window, far out")
    return far


def _window_by_stand_ins(evaluate: MaskEvaluator, constants: list[float]) -> int:
    """Window of a mask with one constant too large to evaluate: it must move the window 1 : 1."""
    attention, large = evaluate.attention, max(constants)
    if constants.count(large) > 1 or sum(constants) - large > min(_STAND_INS) / 2:
        raise mask_error(
            attention, f"a mask with several constants as large as {max(constants):.0f}"
        )
    width = _PROBES[0][0]
    offsets = set()
    for stand_in in _STAND_INS:
        window = _window(attention, evaluate(width, substitute=(large, stand_in)))
        offsets.add(window - stand_in if window else None)
    offset = offsets.pop()
    if offsets or offset is None:
        raise mask_error(attention, f"a mask in which {large:.0f} is not the size of one window")
    return int(large) + offset


def _window(attention: fx.Node, allowed: Tensor) -> int:
    window = int(allowed[-1].sum())
    causal = _expected(allowed.shape[0], 0)
    if torch.equal(allowed, causal):
        return 0
    if torch.equal(allowed, _expected(allowed.shape[0], window)):
        return window
    if (allowed & ~causal).any():
        raise mask_error(attention, "bidirectional attention: a token sees later ones")
    raise mask_error(attention, "a mask that is neither causal nor one sliding window")


def _expected(width: int, window: int) -> Tensor:
    """[width, width] bool of a causal mask, with a window unless that is 0."""
    row, column = torch.arange(width)[:, None], torch.arange(width)[None]
    return (column <= row) & (column > row - window) if window else column <= row


def describe_foreign_attention(program: Program) -> tuple[str, str, str]:
    """Found / needed / do for a graph without attention nodes: names the first softmax."""
    softmaxes = list(program.calls(aten.softmax.int, aten._softmax.default))
    needed = "attention as torch.nn.functional.scaled_dot_product_attention"
    do = "choose a model of a supported architecture (see docs/guide/models.md)"
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
