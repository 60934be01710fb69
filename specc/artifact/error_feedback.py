"""How a weight is rounded where it is known what it multiplies: errors go to later columns.

With rows x of a projection y = W x, rounding W to Q costs Σ |(W - Q) x|² = Σ e H eᵀ over rows e of
W - Q, where H = Σ x xᵀ. Columns are rounded one after the other; what is lost at one is made up
for, as far as H says that it can be, by those that are not rounded yet.

Source: GPTQ, arXiv:2210.17323, algorithm 1; groups whose scales are chosen before, so that columns
can be rounded in the order of their weight in H, as of GPTQModel's `static_groups`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specc.artifact.integers import Integers
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.rounding import nearest_levels, scales_of

# columns whose errors are put into the others together
_COLUMNS_AT_ONCE = 128
# of the mean of H's diagonal, what is added to it
_DAMPING = 0.01


def round_with_feedback(weight: Tensor, products: Tensor, layout: QuantizedLayout) -> Integers:
    """Round a weight [N, K] to integers.

    Args:
        weight: finite.
        products: [K, K] float32, Σ x xᵀ over rows x that it multiplies.
        layout: int8 or int4.
    """
    outputs, columns = weight.shape
    width = layout.group or columns
    weight = weight.float().clone()
    diagonal = products.diagonal()
    # what was never seen may have any weight, and keeps its own
    order = diagonal.argsort(descending=True, stable=True)
    scales, zeros = _scales(weight, diagonal, width, layout)
    reach = _reach(products[order][:, order])
    ordered = weight[:, order]
    levels = torch.empty(outputs, columns, dtype=torch.uint8)
    for first in range(0, columns, _COLUMNS_AT_ONCE):
        last = min(first + _COLUMNS_AT_ONCE, columns)
        block, near = ordered[:, first:last], reach[first:last, first:last]
        errors = torch.empty_like(block)
        for place in range(last - first):
            column = int(order[first + place])
            scale = scales[:, column // width]
            zero = None if zeros is None else zeros[:, column // width]
            value = block[:, place]
            level = nearest_levels(value[:, None], scale, zero, layout)[:, 0]
            levels[:, column] = level
            middle = layout.middle if zero is None else zero
            error = (value - (level.float() - middle) * scale) / near[place, place]
            block[:, place:] -= error[:, None] * near[place, place:]
            errors[:, place] = error
        ordered[:, last:] -= errors @ reach[first:last, last:]
    return Integers(levels, scales, zeros)


def _scales(
    weight: Tensor, diagonal: Tensor, width: int, layout: QuantizedLayout
) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points [N, G] of the groups before anything is rounded."""
    outputs, columns = weight.shape
    more = -columns % width
    values = torch.nn.functional.pad(weight, (0, more)).reshape(-1, width)
    scales, zeros = scales_of(values, layout)
    shape = outputs, -(-columns // width)
    return scales.view(shape), None if zeros is None else zeros.view(shape)


def _reach(products: Tensor) -> Tensor:
    """The upper Cholesky factor [K, K] of the inverse of H, after damping.

    More damping where H is too near to a singular matrix for float32.
    """
    mean = products.diagonal().mean()
    damping = _DAMPING * (mean if mean > 0 else 1.0)
    own = products.clone()
    while True:
        own.diagonal().copy_(products.diagonal() + damping)
        lower, is_wrong = torch.linalg.cholesky_ex(own)
        if not is_wrong:
            found, is_wrong = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not is_wrong:
                return found
        damping *= 10
