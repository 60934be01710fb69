"""Products with a weight become projections, transposed or not; others stay what they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from specc.passes.rewrite.normalize import Normalize
from specc.passes.rewrite.recover_linear import RecoverLinear
from tests.passes.modules import Tiny, assert_same_numbers, traced

aten = torch.ops.aten
PRODUCTS = (aten.matmul.default, aten.mm.default, aten.addmm.default)
WAYS = {
    "T": lambda w: w.T,
    "t": lambda w: w.t(),
    "mT": lambda w: w.mT,
    "transpose": lambda w: w.transpose(-1, 0),
    "permute": lambda w: w.permute(1, 0),
    # the weight itself is [K, N]
    "turned": lambda w: w,
}
NOT = {
    "transposed-to-itself": lambda w: w.transpose(1, -1),
    "permuted-to-itself": lambda w: w.permute(0, 1),
    "computed": lambda w: (2 * w).T,
    "computed-turned": lambda w: 2 * w,
}
FORMS = {
    "matmul": lambda x, b, w: x @ w,
    "mm": lambda x, b, w: torch.mm(x[0], w)[None],
    "addmm": lambda x, b, w: torch.addmm(b, x[0], w)[None],
}


class Product(Tiny):
    """A product of a square weight, so that its transposition can be forgotten."""

    def __init__(self, way, form=FORMS["matmul"]) -> None:
        super().__init__()
        self.way, self.form = way, form
        self.square = nn.Parameter(torch.randn(self.width, self.width))
        self.bias = nn.Parameter(torch.randn(self.width))

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.form(x, self.bias, self.way(self.square))


def normalized(model: nn.Module):
    program, _ = traced(model)
    Normalize().run(program)
    return program


def count_linear(program) -> int:
    return len(list(program.calls(aten.linear.default)))


def turned_keys(program) -> set[str]:
    return {weight.key for weight in program.weights.values() if weight.is_turned}


@pytest.mark.default(
    "T-matmul",
    "T-addmm",
    "t-mm",
    "mT-mm",
    "transpose-matmul",
    "transpose-addmm",
    "permute-addmm",
    "turned-matmul",
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS)
def test_projections_are_found(way: str, form: str) -> None:
    model = Product(WAYS[way], FORMS[form]).eval()
    program = normalized(model)
    before = count_linear(program)
    assert RecoverLinear().run(program).rewrites == 1
    assert count_linear(program) == before + 1
    assert not list(program.calls(*PRODUCTS))
    assert turned_keys(program) == ({"square"} if way == "turned" else set())
    assert_same_numbers(program, model)


@pytest.mark.default(
    "transposed-to-itself-matmul",
    "transposed-to-itself-addmm",
    "permuted-to-itself-matmul",
    "computed-matmul",
    "computed-addmm",
)
@pytest.mark.parametrize("form", ["matmul", "addmm"])
@pytest.mark.parametrize("way", NOT)
def test_other_products_stay(way: str, form: str) -> None:
    model = Product(NOT[way], FORMS[form]).eval()
    program = normalized(model)
    assert RecoverLinear().run(program).rewrites == 0
    assert turned_keys(program) == set()
    assert_same_numbers(program, model)


class Oblong(Tiny):
    """Two products by one weight [K, N], K and N unequal, the first with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(self.width, 24))
        self.bias = nn.Parameter(torch.randn(24))
        self.back = nn.Linear(24, self.width)

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.back(torch.addmm(self.bias, x[0], self.wide)[None] + x @ self.wide)


def test_a_weight_of_several_products_is_turned_once() -> None:
    model = Oblong().eval()
    program = normalized(model)
    assert RecoverLinear().run(program).rewrites == 2
    (weight,) = (weight for weight in program.weights.values() if weight.is_turned)
    assert (weight.key, weight.shape) == ("wide", (24, model.width))
    assert_same_numbers(program, model)


OTHERWISE = {
    # what is added is no bias of a projection
    "scaled": (lambda x, b, w: torch.addmm(b, x[0], w, alpha=2)[None], "scaled by 2"),
    "faint": (lambda x, b, w: torch.addmm(b, x[0], w, beta=3)[None], "its addend by 3"),
    "rows": (lambda x, b, w: torch.addmm(x[0], x[0], w)[None], "added to ["),
    "one": (lambda x, b, w: torch.addmm(b[:1], x[0], w)[None], "added to [1]"),
    # the weight is read as it is, too
    "summed": (lambda x, b, w: x @ w + w.sum(), "in another way"),
    "both-ways": (lambda x, b, w: x @ w + x @ w.T, "in another way"),
    "left": (lambda x, b, w: x @ w + (w @ x.mT).mT, "in another way"),
    "squared": (lambda x, b, w: x @ w + (w @ w).sum(), "in another way"),
    "added": (lambda x, b, w: x @ w + torch.addmm(w, x[0].T @ x[0], w).sum(), "in another way"),
}


@pytest.mark.default("scaled", "rows", "summed", "both-ways", "squared")
@pytest.mark.parametrize("form", OTHERWISE)
def test_a_weight_that_is_read_otherwise_stays(form: str) -> None:
    compute, reason = OTHERWISE[form]
    model = Product(lambda w: w, compute).eval()
    program = normalized(model)
    result = RecoverLinear().run(program)
    assert any(reason in item.reason for item in result.declined)
    assert turned_keys(program) == set()
    assert_same_numbers(program, model)


class Stack(Tiny):
    """A product by a stack of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(1, self.width, self.width))

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        return x @ self.wide


class Vector(Tiny):
    """A product by a vector, which is no projection to one output: it has one dimension less."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(self.width))

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + (x @ self.wide)[..., None]


@pytest.mark.parametrize(("model", "dims"), [(Stack, 3), (Vector, 1)])
def test_a_weight_that_is_no_matrix_stays(model: type[Tiny], dims: int) -> None:
    made = model().eval()
    program = normalized(made)
    result = RecoverLinear().run(program)
    assert [item.reason for item in result.declined] == [f"a weight of {dims} dimensions"]
    assert turned_keys(program) == set()
    assert_same_numbers(program, made)


@pytest.mark.parametrize("form", ["scaled", "faint", "rows", "one"])
def test_a_transposed_weight_with_another_addend_stays(form: str) -> None:
    compute, reason = OTHERWISE[form]
    model = Product(lambda w: w.T, compute).eval()
    program = normalized(model)
    result = RecoverLinear().run(program)
    assert result.rewrites == 0
    assert reason in result.declined[0].reason
    assert_same_numbers(program, model)
