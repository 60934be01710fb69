"""Rounding with feedback: beside what each step would do by itself, and what outputs lose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specc.artifact.error_feedback import round_with_feedback
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.rounding import round_weight

LAYOUTS = [QuantizedLayout.named(name) for name in ("int4-g32", "int4-g64-zeros", "int8")]
EVERY = {"argvalues": LAYOUTS, "ids": lambda item: item.name}
COLUMNS = 160


def case(outputs: int = 40) -> tuple[Tensor, Tensor]:
    """A weight, and rows that it multiplies, whose columns depend on each other."""
    torch.manual_seed(0)
    mixing = torch.randn(COLUMNS, COLUMNS) * torch.rand(COLUMNS).square()
    return torch.randn(outputs, COLUMNS), torch.randn(600, COLUMNS) @ mixing


def naive(weight: Tensor, products: Tensor, layout: QuantizedLayout) -> Tensor:
    """Column by column in float64: each time, what is left becomes what is best for H anew."""
    scales, zeros = round_weight(weight, layout).scales, round_weight(weight, layout).zeros
    width = layout.group or weight.shape[1]
    h = products.double()
    order = h.diagonal().argsort(descending=True, stable=True).tolist()
    h = h + 0.01 * h.diagonal().mean() * torch.eye(len(h))
    original, found = weight.double(), torch.zeros_like(weight)
    done: list[int] = []
    for place, column in enumerate(order):
        left = order[place:]
        value = original[:, left]
        if done:
            lost = original[:, done] - found[:, done].double()
            value = value + lost @ torch.linalg.solve(h[left][:, left], h[left][:, done]).T
        scale = scales[:, column // width].double()
        zero = layout.middle if zeros is None else zeros[:, column // width]
        level = ((value[:, 0] / scale).round() + zero).clamp(0, (1 << layout.bits) - 1)
        found[:, column] = ((level - zero) * scale).float()
        done.append(column)
    return found


@pytest.mark.parametrize("layout", **EVERY)
def test_each_column_makes_up_for_those_before(layout) -> None:
    weight, rows = case()
    products = rows.T @ rows
    found = round_with_feedback(weight, products, layout).values(layout)
    want = naive(weight, products, layout)
    # float32 puts a few values on the other side of a middle, which later ones answer to
    assert ((found - want).abs() < 1e-5).float().mean() > 0.97
    cost = [float(((weight - item) @ rows.T).square().sum()) for item in (found, want)]
    assert cost[0] == pytest.approx(cost[1], rel=0.03)


@pytest.mark.parametrize("layout", **EVERY)
def test_outputs_lose_less_than_half(layout) -> None:
    """Of rows that were not seen."""
    weight, rows = case()
    seen, others = rows[:500], rows[500:]
    plain = round_weight(weight, layout).values(layout)
    own = round_with_feedback(weight, seen.T @ seen, layout).values(layout)
    losses = [((weight - item) @ others.T).square().sum() for item in (own, plain)]
    assert losses[0] < 0.6 * losses[1]


def test_columns_that_nothing_ties_together_are_rounded_alone() -> None:
    weight, _ = case()
    for layout in LAYOUTS:
        plain = round_weight(weight, layout)
        found = round_with_feedback(weight, torch.eye(COLUMNS), layout)
        assert torch.equal(found.levels, plain.levels)
        assert torch.equal(found.scales, plain.scales)


def test_rows_that_say_little_or_nothing() -> None:
    """Fewer rows than columns, columns that are always 0, and no rows at all."""
    weight, rows = case()
    rows[:, 5:9] = 0
    for own in (rows[:3], rows[:0]):
        found = round_with_feedback(weight, own.T @ own, LAYOUTS[1]).values(LAYOUTS[1])
        assert bool(found.isfinite().all())
        assert (found - weight).abs().max() < 2.5
    plain = round_weight(weight, LAYOUTS[1])
    assert torch.equal(
        round_with_feedback(weight, rows[:0].T @ rows[:0], LAYOUTS[1]).levels, plain.levels
    )
