"""Recover what an attention mask means: causal, a sliding window, or an error.

The rewrite to tree attention deletes the mask, so its meaning is established first, by running
the mask's own nodes on concrete positions. Nothing is assumed from the model's name or config.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from specc.errors import UnsupportedAttentionError
from specc.passes.base import Pass, PassResult
from specc.passes.facts import DENSE_ATTENTION, is_flat_call_graph, masks_are_classified
from specc.passes.program import Program, bind_args, module_path, upstream

aten = torch.ops.aten

# widths and first positions at which every mask is evaluated; the widest comes first
_PROBES = ((2048, 0), (48, 0), (48, 100), (301, 7))
# a mask whose constants add up to this is evaluated beyond all of them
_WIDEST = 8192
# a constant too large for that is replaced by these in turn
_STAND_INS = (700, 1100)
# from here on a number stands for "to the end" or minus infinity
_UNBOUNDED = 2**31
_BLOCKED = -1e4

# what moves values without changing them: its numbers are dimensions and sizes
# fmt: off
_SHAPE_OPERATORS = frozenset(
    (
        "unsqueeze", "expand", "expand_as", "view", "reshape", "_unsafe_view", "squeeze",
        "transpose", "permute", "t", "sym_size", "clone", "contiguous", "detach", "alias",
        "lift_fresh_copy", "copy", "to", "_to_copy", "type_as", "diff", "cumsum",
    )
)
# with these alone, every edge of a mask is a sum of its constants, so that an evaluation beyond
# that sum sees them all; products, quotients, remainders and powers would hide edges farther out
_LINEAR_OPERATORS = frozenset(
    (
        "arange", "le", "lt", "ge", "gt", "eq", "ne", "__and__", "__or__", "__xor__",
        "bitwise_and", "bitwise_or", "bitwise_not", "logical_and", "logical_or", "logical_not",
        "logical_xor", "add", "sub", "rsub", "neg", "abs", "clamp", "clamp_min", "clamp_max",
        "minimum", "maximum", "slice", "select", "index", "ones", "zeros", "full",
        "scalar_tensor", "new_ones", "new_zeros", "new_full", "ones_like", "zeros_like",
        "full_like", "where", "masked_fill", "tril", "triu", "any", "all", "stack", "cat",
    )
)
_FILLS = frozenset(
    (
        "full", "full_like", "new_full", "scalar_tensor", "where", "masked_fill", "mul", "rsub",
    )
)
_SIZES_ONLY = frozenset(
    (
        "sym_size", "new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like",
    )
)
# fmt: on


class ClassifyMasks(Pass):
    """Give every attention node a window; 0 is causal without one."""

    requires = (is_flat_call_graph,)
    ensures = (masks_are_classified,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        known: dict[fx.Node | None, int] = {}
        nodes = list(program.calls(*DENSE_ATTENTION))
        if not nodes:
            raise UnsupportedAttentionError(*describe_foreign_attention(program))
        for node in nodes:
            bound = bind_args(node)
            mask = bound["attn_mask"]
            sizes = [bound[key].meta["val"].shape[-2] for key in ("query", "key")]
            if str(sizes[0]) != str(sizes[1]):
                raise _error(node, f"{sizes[1]} keys for {sizes[0]} tokens")
            if bound.get("dropout_p"):
                raise _error(node, f"dropout {bound['dropout_p']} in attention", "model.eval()")
            if mask is None:
                if not bound.get("is_causal", True):
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

    The mask is evaluated at several widths and positions, which must all show one window, and
    beyond the sum of its constants, where no edge can hide.

    Raises:
        UnsupportedAttentionError: names the layer and what the mask does.
    """
    evaluate = MaskEvaluator(attention, mask)
    small = _window(attention, evaluate(*_PROBES[1]))
    window = _window(attention, evaluate(*_PROBES[0]))
    if small and small != window:
        raise _error(attention, "a mask that is neither causal nor one sliding window, far out")
    for width, first in _PROBES[1:]:
        if not torch.equal(evaluate(width, first), _expected(width, window)):
            raise _error(
                attention, "a mask that depends on absolute positions or on the number of tokens"
            )
    evaluate.require_linear()
    constants = evaluate.constants()
    reach = math.ceil(sum(constants)) + 16
    if reach <= _PROBES[0][0]:
        return window
    if reach > _WIDEST:
        return _window_by_stand_ins(evaluate, constants)
    far = _window(attention, evaluate(reach))
    if window and far != window:
        raise _error(attention, "a mask that is neither causal nor one sliding window, far out")
    return far


def _window_by_stand_ins(evaluate: MaskEvaluator, constants: list[float]) -> int:
    """Window of a mask with one constant too large to evaluate: it must move the window 1 : 1."""
    attention, large = evaluate.attention, max(constants)
    if constants.count(large) > 1 or sum(constants) - large > min(_STAND_INS) / 2:
        raise _error(attention, f"a mask with several constants as large as {max(constants):.0f}")
    width = _PROBES[0][0]
    offsets = set()
    for stand_in in _STAND_INS:
        window = _window(attention, evaluate(width, substitute=(large, stand_in)))
        offsets.add(window - stand_in if window else None)
    offset = offsets.pop()
    if offsets or offset is None:
        raise _error(attention, f"a mask in which {large:.0f} is not the size of one window")
    return int(large) + offset


class MaskEvaluator:
    """Runs the nodes that a mask depends on, on concrete positions."""

    def __init__(self, attention: fx.Node, mask: fx.Node) -> None:
        self.attention = attention
        self.mask = mask
        self.nodes = sorted(upstream(mask))
        inputs = {node.target for node in self.nodes if node.op == "placeholder"}
        if foreign := inputs - {"positions", "tokens"}:
            raise _error(attention, f"a mask computed from {', '.join(sorted(map(str, foreign)))}")
        self._require_no_token_ids()
        place = {node: i for i, node in enumerate(self.nodes)}
        last = {used: place[node] for node in self.nodes for used in node.all_input_nodes}
        self._releases: dict[int, list[fx.Node]] = {}
        for node, at in last.items():
            self._releases.setdefault(at, []).append(node)

    def require_linear(self) -> None:
        """Refuse operators after which an edge could hide beyond the widest evaluation."""
        for node in self._calls():
            name = _name(node)
            factors = [item for item in _numbers(node) if not math.isfinite(item)]
            factors += [item for item in _numbers(node) if item <= _BLOCKED]
            is_fill = name == "mul" and bool(factors)
            if name not in _SHAPE_OPERATORS | _LINEAR_OPERATORS and not is_fill:
                raise _error(
                    self.attention,
                    "a mask that may be neither causal nor one sliding window: it is computed"
                    f" with {name}",
                )

    def constants(self) -> list[float]:
        """Magnitudes of the numbers that can place an edge, one entry an occurrence."""
        found: list[float] = []
        for node in self._calls():
            if (name := _name(node)) in _SHAPE_OPERATORS:
                continue
            for value in _numbers(node):
                is_fill = name in _FILLS and value <= _BLOCKED
                if 2 <= abs(value) < _UNBOUNDED and not is_fill:
                    found.append(abs(value))
        return found

    def __call__(
        self, width: int, first: int = 0, substitute: tuple[float, int] | None = None
    ) -> Tensor:
        """[width, width] bool: row may attend to column."""
        env: dict[fx.Node, Any] = {}

        def lookup(item: Any) -> Any:
            return env[item]

        def swap(item: Any) -> Any:
            if type(item) in (int, float) and substitute and abs(item) == substitute[0]:
                return type(item)(math.copysign(substitute[1], item))
            return item

        for place, node in enumerate(self.nodes):
            if node.op == "placeholder":
                start = first if node.target == "positions" else 0
                env[node] = torch.arange(start, start + width)
            else:
                # the numbers are swapped before values take the places of nodes
                args = torch.utils._pytree.tree_map(swap, (node.args, dict(node.kwargs)))
                args, kwargs = fx.map_arg(args, lookup)
                env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            for used in self._releases.get(place, ()):
                env.pop(used)
        return self._allowed(env[self.mask], width)

    def _calls(self) -> list[fx.Node]:
        return [node for node in self.nodes if node.op == "call_function"]

    def _require_no_token_ids(self) -> None:
        """The number of tokens may shape a mask; what they are may not."""
        reads: set[fx.Node] = set()
        for node in self.nodes:
            is_tokens = node.op == "placeholder" and node.target == "tokens"
            if is_tokens or (
                not reads.isdisjoint(node.all_input_nodes) and _name(node) not in _SIZES_ONLY
            ):
                reads.add(node)
        if self.mask in reads:
            raise _error(self.attention, "a mask computed from token ids")

    def _allowed(self, value: Tensor, width: int) -> Tensor:
        if value.dtype != torch.bool:
            open_ = value == 0
            if not (open_ | (value <= _BLOCKED)).all():
                raise _error(
                    self.attention, "a bias added to the scores (ALiBi or relative positions)"
                )
            value = open_
        if value.shape[-1] not in (1, width) or value.shape[-2] not in (1, width):
            raise _error(
                self.attention,
                f"a mask of {value.shape[-2]} rows and {value.shape[-1]} columns for {width}"
                " tokens: keys that belong to no token",
            )
        heads = value.expand(*value.shape[:-2], width, width).reshape(-1, width, width)
        if not (heads == heads[0]).all():
            raise _error(self.attention, "a mask that differs between heads")
        return heads[0]


def _window(attention: fx.Node, allowed: Tensor) -> int:
    window = int(allowed[-1].sum())
    causal = _expected(allowed.shape[0], 0)
    if torch.equal(allowed, causal):
        return 0
    if torch.equal(allowed, _expected(allowed.shape[0], window)):
        return window
    if (allowed & ~causal).any():
        raise _error(attention, "bidirectional attention: a token sees later ones")
    raise _error(attention, "a mask that is neither causal nor one sliding window")


def _expected(width: int, window: int) -> Tensor:
    """[width, width] bool of a causal mask, with a window unless that is 0."""
    row, column = torch.arange(width)[:, None], torch.arange(width)[None]
    return (column <= row) & (column > row - window) if window else column <= row


def _name(node: fx.Node) -> str:
    """`add` of `aten.add.Tensor` or of `operator.add`; in-place forms count as the plain ones."""
    schema = getattr(node.target, "_schema", None)
    name = schema.name.partition("::")[2] if schema else getattr(node.target, "__name__", "")
    return name if name.startswith("_") else name.removesuffix("_")


def _numbers(node: fx.Node) -> list[float]:
    leaves = torch.utils._pytree.tree_leaves((node.args, dict(node.kwargs)))
    return [leaf for leaf in leaves if type(leaf) in (int, float)]


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
