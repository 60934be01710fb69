"""Products with a transposed weight become projections; others stay what they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from specc.passes.rewrite.normalize import Normalize
from specc.passes.rewrite.recover_linear import RecoverLinear
from tests.passes.modules import Tiny, assert_same_numbers, traced

aten = torch.ops.aten
WAYS = {
    "T": lambda w: w.T,
    "t": lambda w: w.t(),
    "mT": lambda w: w.mT,
    "transpose": lambda w: w.transpose(-1, 0),
    "permute": lambda w: w.permute(1, 0),
}
NOT = {
    "square": lambda w: w,
    "transposed-to-itself": lambda w: w.transpose(1, -1),
    "permuted-to-itself": lambda w: w.permute(0, 1),
    "computed": lambda w: (2 * w).T,
}


class Product(Tiny):
    """A product of a square weight, so that its transposition can be forgotten."""

    def __init__(self, way, is_flat: bool = False) -> None:
        super().__init__()
        self.way, self.is_flat = way, is_flat
        self.square = nn.Parameter(torch.randn(self.width, self.width))

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.is_flat:
            return torch.mm(x[0], self.way(self.square))[None]
        return x @ self.way(self.square)


def normalized(model: nn.Module):
    program, _ = traced(model)
    Normalize().run(program)
    return program


def count_linear(program) -> int:
    return len(list(program.calls(aten.linear.default)))


@pytest.mark.parametrize("is_flat", [False, True], ids=["matmul", "mm"])
@pytest.mark.parametrize("way", WAYS)
def test_projections_are_found(way: str, is_flat: bool) -> None:
    model = Product(WAYS[way], is_flat).eval()
    program = normalized(model)
    before = count_linear(program)
    assert RecoverLinear().run(program).rewrites == 1
    assert count_linear(program) == before + 1
    assert not list(program.calls(aten.matmul.default, aten.mm.default))
    assert_same_numbers(program, model)


@pytest.mark.parametrize("way", NOT)
def test_other_products_stay(way: str) -> None:
    model = Product(NOT[way]).eval()
    program = normalized(model)
    assert RecoverLinear().run(program).rewrites == 0
    assert_same_numbers(program, model)
