"""Evaluate the nodes of an attention mask on concrete positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from specc.errors import UnsupportedAttentionError
from specc.passes.program import Slopes, module_path, upstream
from specc.passes.rewrite.slope_values import HIDDEN, misfit

# from here on a number stands for "to the end" or minus infinity
UNBOUNDED = 2**31
BLOCKED = -1e4
_HALVES = (torch.bfloat16, torch.float16)

# what moves values without changing them: its numbers are dimensions and sizes
# fmt: off
SHAPE_OPERATORS = frozenset(
    (
        "unsqueeze", "expand", "expand_as", "view", "reshape", "_unsafe_view", "squeeze",
        "transpose", "permute", "t", "sym_size", "clone", "contiguous", "detach", "alias",
        "lift_fresh_copy", "copy", "to", "_to_copy", "type_as", "diff", "cumsum",
    )
)
# with these alone, every edge of a mask is a sum of its constants, so that an evaluation beyond
# that sum sees them all; products, quotients, remainders and powers would hide edges farther out
LINEAR_OPERATORS = frozenset(
    (
        "arange", "le", "lt", "ge", "gt", "eq", "ne", "__and__", "__or__", "__xor__",
        "bitwise_and", "bitwise_or", "bitwise_not", "logical_and", "logical_or", "logical_not",
        "logical_xor", "add", "sub", "rsub", "neg", "abs", "clamp", "clamp_min", "clamp_max",
        "minimum", "maximum", "slice", "select", "index", "ones", "zeros", "full",
        "scalar_tensor", "new_ones", "new_zeros", "new_full", "ones_like", "zeros_like",
        "full_like", "where", "masked_fill", "tril", "triu", "any", "all", "stack", "cat",
    )
)
FILLS = frozenset(
    (
        "full", "full_like", "new_full", "scalar_tensor", "where", "masked_fill", "mul", "rsub",
    )
)
# what decides by comparing
DECIDES = frozenset(
    (
        "abs", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "tril", "triu", "relu",
        "floor_divide", "remainder", "floor", "ceil", "round", "trunc", "sign",
    )
)
_SIZES_ONLY = frozenset(
    (
        "sym_size", "new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like",
    )
)
# fmt: on


class MaskEvaluator:
    """Runs the nodes that a mask depends on, on concrete positions."""

    def __init__(self, attention: fx.Node, mask: fx.Node) -> None:
        self.attention = attention
        self.mask = mask
        # what it adds to scores besides hiding keys, once that is known; and their scale
        self.slopes: Slopes | None = None
        self.scale = 1.0
        self.nodes = sorted(upstream(mask))
        inputs = {node.target for node in self.nodes if node.op == "placeholder"}
        if foreign := inputs - {"positions", "tokens"}:
            raise mask_error(
                attention, f"a mask computed from {', '.join(sorted(map(str, foreign)))}"
            )
        self._require_no_token_ids()
        place = {node: i for i, node in enumerate(self.nodes)}
        last = {used: place[node] for node in self.nodes for used in node.all_input_nodes}
        self._releases: dict[int, list[fx.Node]] = {}
        for node, at in last.items():
            self._releases.setdefault(at, []).append(node)

    def require_linear(self, besides: tuple[str, ...] = ()) -> None:
        """Refuse operators after which an edge could hide beyond the widest evaluation.

        Args:
            besides: operators that are known to hide none here.
        """
        decide = self.deciding()
        for node in self._edges():
            name = name_of(node)
            factors = [item for item in numbers_of(node) if not math.isfinite(item)]
            factors += [item for item in numbers_of(node) if item <= BLOCKED]
            is_fill = name == "mul" and bool(factors)
            if name not in (*besides, *SHAPE_OPERATORS, *LINEAR_OPERATORS) and not (
                is_fill or (node not in decide and _is_scaled(node))
            ):
                raise mask_error(
                    self.attention,
                    "a mask that may be neither causal nor one sliding window: it is computed"
                    f" with {name}",
                )

    def constants(self) -> list[float]:
        """Magnitudes of the numbers that can place an edge, one entry an occurrence."""
        found: list[float] = []
        for node in self._edges():
            if (name := name_of(node)) in SHAPE_OPERATORS:
                continue
            for value in numbers_of(node):
                is_fill = name in FILLS and value <= BLOCKED
                if 2 <= abs(value) < UNBOUNDED and not is_fill:
                    found.append(abs(value))
        return found

    def __call__(
        self, width: int, first: int = 0, substitute: tuple[float, int] | None = None
    ) -> Tensor:
        """[width, width] bool: row may attend to column."""
        return self._allowed(self.values(width, first, substitute), width, first)

    def values(
        self,
        width: int,
        first: int = 0,
        substitute: tuple[float, int] | None = None,
        is_exact: bool = False,
    ) -> Tensor:
        """[..., width, width], broadcast: what the mask's node holds.

        Args:
            width: tokens.
            first: position of the first one.
            substitute: a number of the graph, and what takes its place.
            is_exact: nothing is rounded to 16 bits.
        """
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
                value = node.target(*args, **kwargs)  # type: ignore[operator]
                is_half = is_exact and isinstance(value, Tensor) and value.dtype in _HALVES
                env[node] = _widened(node, args, value) if is_half else value
            for used in self._releases.get(place, ()):
                env.pop(used)
        return env[self.mask]

    def calls(self) -> list[fx.Node]:
        return [node for node in self.nodes if node.op == "call_function"]

    def error(self, reason: str) -> UnsupportedAttentionError:
        """What refuses the mask."""
        return mask_error(self.attention, reason)

    def deciding(self) -> set[fx.Node]:
        """Calls that compare, and all that they compare: edges follow from these."""
        found: set[fx.Node] = set()
        for node in self.calls():
            value = node.meta.get("val")
            is_bool = isinstance(value, Tensor) and value.dtype == torch.bool
            if is_bool or name_of(node) in DECIDES:
                found |= upstream(node)
        return {node for node in found if node.op == "call_function"}

    def _edges(self) -> list[fx.Node]:
        """Calls that an edge may follow from; slopes have none."""
        if self.slopes is None:
            return self.calls()
        decide = self.deciding()
        return [node for node in self.calls() if node in decide]

    def _require_no_token_ids(self) -> None:
        """The number of tokens may shape a mask; what they are may not."""
        reads: set[fx.Node] = set()
        for node in self.nodes:
            is_tokens = node.op == "placeholder" and node.target == "tokens"
            if is_tokens or (
                not reads.isdisjoint(node.all_input_nodes) and name_of(node) not in _SIZES_ONLY
            ):
                reads.add(node)
        if self.mask in reads:
            raise mask_error(self.attention, "a mask computed from token ids")

    def _allowed(self, value: Tensor, width: int, first: int) -> Tensor:
        if self.slopes is not None:
            # of a sequence that begins at 0, places in the pass are positions
            starts = {0, first}
            if min(misfit(value, self.slopes, self.scale, start) for start in starts) > 1:
                raise self.error("a bias added to the scores that is not the same everywhere")
            value = value > HIDDEN
        if value.dtype != torch.bool:
            open_ = value == 0
            if not (open_ | (value <= BLOCKED)).all():
                raise mask_error(
                    self.attention, "a bias added to the scores (ALiBi or relative positions)"
                )
            value = open_
        if value.shape[-1] not in (1, width) or value.shape[-2] not in (1, width):
            raise mask_error(
                self.attention,
                f"a mask of {value.shape[-2]} rows and {value.shape[-1]} columns for {width}"
                " tokens: keys that belong to no token",
            )
        heads = value.expand(*value.shape[:-2], width, width).reshape(-1, width, width)
        if not (heads == heads[0]).all():
            raise mask_error(self.attention, "a mask that differs between heads")
        return heads[0]


def name_of(node: fx.Node) -> str:
    """`add` of `aten.add.Tensor` or of `operator.add`; in-place forms count as the plain ones."""
    schema = getattr(node.target, "_schema", None)
    name = schema.name.partition("::")[2] if schema else getattr(node.target, "__name__", "")
    return name if name.startswith("_") else name.removesuffix("_")


def _widened(node: fx.Node, args: tuple, value: Tensor) -> Tensor:
    """The value of a call whose result has 16 bits, from what its arguments were before."""
    if name_of(node) in ("to", "_to_copy"):
        return args[0].float()
    return value.float()


def _is_scaled(node: fx.Node) -> bool:
    """Whether a call multiplies by a positive number: what is 0 and what is hidden stay that."""
    numbers = numbers_of(node)
    is_product = name_of(node) in ("mul", "div") and len(numbers) == len(node.all_input_nodes) == 1
    is_first = bool(node.args) and isinstance(node.args[0], fx.Node)
    return is_product and is_first and 0 < numbers[0] < math.inf


def numbers_of(node: fx.Node) -> list[float]:
    leaves = torch.utils._pytree.tree_leaves((node.args, dict(node.kwargs)))
    return [leaf for leaf in leaves if type(leaf) in (int, float)]


def mask_error(node: fx.Node, reason: str, do: str = "") -> UnsupportedAttentionError:
    return UnsupportedAttentionError(
        f"layer {module_path(node) or node.name}: {reason}",
        "causal attention, optionally with one sliding window or chunks",
        do or "choose a model of a supported architecture (see docs/guide/models.md)",
    )
