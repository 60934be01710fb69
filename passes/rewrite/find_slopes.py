"""What a mask adds to scores besides hiding keys: slope · distance (ALiBi), or an error."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from specc.passes.program import Slopes
from specc.passes.rewrite.mask_evaluator import (
    DECIDES,
    FILLS,
    LINEAR_OPERATORS,
    SHAPE_OPERATORS,
    MaskEvaluator,
    name_of,
    numbers_of,
)
from specc.passes.rewrite.slope_values import HIDDEN, by_head, misfit

_WIDTH = 48
# values that exist at once: a quarter of a gigabyte
_MOST_VALUES = 1 << 26
_WIDTHS = (2048, 1024, 512, 256, 128, 64)
# besides those of masks: what keeps sums of places, times constants, what they are
_SCALES = frozenset(("mul", "div", "repeat", "repeat_interleave"))
_UNIFORM = frozenset(
    ("ones", "zeros", "full", "new_ones", "new_zeros", "new_full", "ones_like", "zeros_like")
)


def find_slopes(evaluate: MaskEvaluator, num_heads: int, scale: float) -> Slopes | None:
    """Slopes of what a mask adds, or None where it only hides keys.

    The mask is evaluated with nothing rounded to 16 bits, from which slopes are read, and as it
    is: that must be what `tree_attention` would add, up to the rounding of the mask's dtype.

    Args:
        evaluate: of the mask; is told what is found.
        num_heads: H.
        scale: of the attention's scores.
    Raises:
        UnsupportedAttentionError: it adds something else.
    """
    found = evaluate.values(_WIDTH)
    if found.dtype == torch.bool or not ((found != 0) & (found > HIDDEN)).any():
        return None
    width = widest(evaluate, num_heads)
    slopes = _slopes(evaluate, num_heads, width)
    values = evaluate.values(width)
    plain = Slopes(slopes)
    rounded = Slopes((slopes / scale).bfloat16().float(), rounds=True)
    errors = [misfit(values, item, scale) for item in (plain, rounded)]
    if min(errors) > 1:
        raise evaluate.error(
            "a bias added to the scores that is no slope times the distance of a key"
            " (relative positions)"
        )
    _require_scales(evaluate)
    evaluate.slopes, evaluate.scale = rounded if errors[1] < errors[0] else plain, scale
    return evaluate.slopes


def widest(evaluate: MaskEvaluator, num_heads: int) -> int:
    """Tokens up to which a mask with a bias is evaluated.

    A table of biases ends somewhere, and no sequence of the model is longer.
    """
    for width in _WIDTHS:
        if num_heads * width * width > _MOST_VALUES:
            continue
        try:
            evaluate.values(width)
        except (RuntimeError, IndexError):
            continue
        return width
    raise evaluate.error(f"a bias of scores for fewer than {_WIDTHS[-1]} tokens")


def _slopes(evaluate: MaskEvaluator, num_heads: int, width: int) -> Tensor:
    """[H] float32: what is added from key to key, read where rounding matters least."""
    last = by_head(evaluate.values(width, is_exact=True), num_heads)[:, -1].double()
    first = int((last[0] > HIDDEN).int().argmax())
    last = last[:, first:]
    if (last <= HIDDEN).any() or last.shape[1] < 2:
        raise evaluate.error("a bias added to the scores, and a mask that is no window")
    # either two neighbours, or the ends
    steps = last[:, 1:] - last[:, :-1]
    ends = (last[:, -1:] - last[:, :1]) / (last.shape[1] - 1)
    rounding = last.abs()[:, :-1] + last.abs()[:, 1:]
    rounding_of_ends = (last.abs()[:, -1:] + last.abs()[:, :1]) / (last.shape[1] - 1)
    best = torch.cat([rounding, rounding_of_ends], 1).argmin(1, keepdim=True)
    return torch.cat([steps, ends], 1).gather(1, best)[:, 0].float()


def _require_scales(evaluate: MaskEvaluator) -> None:
    """Refuse operators after which a bias could bend beyond what is evaluated.

    A bias may be sums of places, times constants: it is that everywhere. What decides where an
    edge is goes through the rule of all masks (`MaskEvaluator.require_linear`).
    """
    placed, decides = _placed(evaluate), evaluate.deciding()
    for node in evaluate.calls():
        if node in decides or node not in placed:
            continue
        name = name_of(node)
        is_fill = name in FILLS and bool(numbers_of(node))
        is_known = name in SHAPE_OPERATORS | LINEAR_OPERATORS | _SCALES or is_fill
        factors = [item for item in node.all_input_nodes if item in placed]
        is_product = name in ("mul", "div") and len(factors) > 1
        is_quotient = name == "div" and node.args[0] not in placed
        if not is_known or name in DECIDES or is_product or is_quotient:
            raise evaluate.error(f"a bias of scores that is computed with {name}")


def _placed(evaluate: MaskEvaluator) -> set[fx.Node]:
    """Nodes of a mask whose values differ from place to place."""
    found: set[fx.Node] = set()
    for node in evaluate.nodes:
        if node.op == "placeholder":
            if node.target == "positions":
                found.add(node)
            continue
        name, value = name_of(node), node.meta.get("val")
        if name in _UNIFORM or not isinstance(value, Tensor):
            continue
        is_counted = any(not isinstance(size, int) for size in value.shape)
        reads = any(item in found for item in node.all_input_nodes)
        starts = name in ("arange", "cumsum", "slice") and is_counted
        if reads or starts:
            found.add(node)
    return found
