"""Shapes that no model of the tests has: what is cut, what stays whole, and the same logits."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from specc.kernels import ops
from specc.passes.shard.dimension_rules import relations_of
from specc.sharding.shard_plan import ShardPlan
from tests.passes.modules import VOCAB, Tiny, random_tokens
from tests.passes.shard.lockstep import Both, assert_alike, prompt_inputs


class Wide(Tiny):
    """`Tiny`, and layers a [16 → 24], b [24 → other] and c [other → 16] after attention."""

    other = 20

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 24), nn.Linear(24, self.other)
        self.c = nn.Linear(self.other, 16)


class TwoProducts(Wide):
    """The weight between two inner dimensions can be cut along one of them."""

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.c(self.b(self.a(x).relu()).relu())


class InnerResidual(Wide):
    """A product from a dimension to itself cannot be cut at all."""

    other = 24

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        y = self.a(x).relu()
        return x + self.c(y + self.b(y).relu())


class HalfNormed(Wide):
    """A norm keeps a part of an inner dimension whole, so the sum over all of it is."""

    other = 24

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        y = self.a(x).relu()
        return x + self.c(y) * F.layer_norm(y[..., :8], (8,)).mean(-1, keepdim=True)


class ChunksOfSum(Wide):
    """A sum is not linear in what its chunks go into."""

    other = 32

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        gate, up = self.b(self.a(x).relu()).chunk(2, -1)
        return x + gate.sigmoid() * up


class FloorOfSum(Wide):
    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        floor = torch.div(self.b(self.a(x).relu()), 0.25, rounding_mode="floor")
        return x + self.c(floor.relu())


class GateOfSum(Wide):
    """A part of a sum of one column meets a value that is cut."""

    other = 24

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(24, 1)

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        y = self.a(x).relu()
        return x + self.c(self.gate(y) * y)


class FromTheEnd(Wide):
    other = 12

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        y = self.a(x).relu()
        return x + self.c(y[..., :-12] * y[..., -12:])


class UnlikeParts(Wide):
    """A slice ends inside what a view makes one index: neither side can be cut."""

    other = 24

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        y = self.a(x).relu()
        heads = y.view(1, -1, 6, 4)
        heads = heads * heads.softmax(-1)
        return x + self.c(heads.reshape(1, -1, 24)) * y[..., :6].sum(-1, keepdim=True)


class Unflattened(Wide):
    other = 24

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        y = self.a(x).relu().unflatten(-1, (6, 4))
        return x + self.c((y * y.softmax(-1)).flatten(2))


class InnerPart(Wide):
    """Rows of three runs of 8: what scales an index of every run is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.d = nn.Parameter(torch.randn(8)), nn.Linear(8, 16)

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.d((self.a(x).view(1, -1, 3, 8) * self.scale).sum(2))


class SlicedHead(Tiny):
    """The head is the first rows of the table: rows of a rank would not follow each other."""

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embedding.weight[:8])


class JoinedHead(Tiny):
    """Columns that are joined from two parts are not those of a rank."""

    def project(self, x: Tensor) -> Tensor:
        logits = self.head(x)
        return torch.cat((logits[..., :6], logits[..., 6:] * 2), -1)


class ValuesToo(Tiny):
    """Two heads of values on four ranks would count twice in a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Linear(8, 16)

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.d(self.v(x))


class Biased(Wide):
    """`Wide`, whose last product is cut and has the bias that a subclass gives it."""

    other = 24

    def bias(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + F.linear(self.a(x).relu(), self.c.weight, self.bias(x))


class BiasReadTwice(Biased):
    """The bias also scales something: all ranks need its values."""

    def bias(self, x: Tensor) -> Tensor:
        return self.c.bias

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().after(x, positions) * self.c.bias.sigmoid()


class BiasOfTwoSums(Biased):
    """Both of its readers add it to a part of a sum: one rank does, twice."""

    def bias(self, x: Tensor) -> Tensor:
        return self.c.bias

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().after(super().after(x, positions), positions)


class BiasOfSumAndWhole(Biased):
    """One of its readers is no sum over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Linear(16, 16, bias=False)

    def bias(self, x: Tensor) -> Tensor:
        return self.c.bias

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        return F.linear(super().after(x, positions), self.d.weight, self.c.bias)


class ComputedBias(Biased):
    def bias(self, x: Tensor) -> Tensor:
        return self.c.bias * 3


class TransposedBias(Biased):
    """As GPT-2 multiplies."""

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        y = self.a(x).relu().view(-1, 24)
        z = torch.addmm(self.c.bias, y, self.c.weight.t())
        return x + z.view(1, -1, 16) * self.c.bias.sigmoid()


HEADS = {"o.weight", "q.weight", "k.weight", "v.weight"}
TABLES = {"embedding.weight", "place.weight"}


@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        pytest.param(Tiny, HEADS | TABLES | {"head.weight"}, marks=pytest.mark.slow),
        (TwoProducts, HEADS | TABLES | {"head.weight", "a.weight", "a.bias", "b.weight"}),
        (InnerResidual, HEADS | TABLES | {"head.weight"}),
        (HalfNormed, HEADS | TABLES | {"head.weight"}),
        (ChunksOfSum, HEADS | TABLES | {"head.weight", "a.weight", "a.bias", "b.weight"}),
        (FloorOfSum, HEADS | TABLES | {"head.weight", "a.weight", "a.bias", "b.weight"}),
        (
            GateOfSum,
            HEADS | TABLES | {"head.weight", "a.weight", "a.bias", "gate.weight", "c.weight"},
        ),
        (FromTheEnd, HEADS | TABLES | {"head.weight", "a.weight", "a.bias", "c.weight"}),
        (UnlikeParts, HEADS | TABLES | {"head.weight"}),
        pytest.param(
            Unflattened,
            HEADS | TABLES | {"head.weight", "a.weight", "a.bias", "c.weight"},
            marks=pytest.mark.slow,
        ),
        (SlicedHead, HEADS | {"place.weight"}),
        (JoinedHead, HEADS | TABLES),
        (InnerPart, HEADS | TABLES | {"head.weight"}),
    ],
)
def test_what_is_cut_and_what_stays_whole(kind: type[Tiny], cut: Collection[str]) -> None:
    assert cut_weights(checked_plan(kind, 2)) == cut


@pytest.mark.parametrize(
    ("kind", "is_first_only"),
    [
        (BiasReadTwice, False),
        pytest.param(BiasOfTwoSums, True, marks=pytest.mark.slow),
        pytest.param(BiasOfSumAndWhole, False, marks=pytest.mark.slow),
        (ComputedBias, False),
        pytest.param(TransposedBias, False, marks=pytest.mark.slow),
    ],
)
def test_a_bias_of_a_sum_counts_once(kind: type[Tiny], is_first_only: bool) -> None:
    plan = checked_plan(kind, 2)
    assert cut_weights(plan) >= {"a.weight", "a.bias", "c.weight"}
    assert plan.by_key["c.bias"].is_first_only == is_first_only


def test_heads_that_ranks_share_are_in_no_sum() -> None:
    assert cut_weights(checked_plan(Tiny, 4)) == HEADS | TABLES | {"head.weight"}
    assert cut_weights(checked_plan(ValuesToo, 4)) == TABLES | {"head.weight"}


def checked_plan(kind: type[Tiny], num_ranks: int) -> ShardPlan:
    """How a model is cut, once the logits are those of the whole model."""
    torch.manual_seed(3)
    model = kind().eval()
    found = Both.of(model, num_ranks)
    tokens = random_tokens(17).tolist()
    inputs = prompt_inputs([tokens[:9], tokens[9:]])
    with torch.inference_mode():
        wanted = found.whole(*inputs)
    assert wanted.shape[1] in (VOCAB, 8)
    assert_alike(found.logits(inputs), wanted)
    return found.plan


def cut_weights(plan: ShardPlan) -> set[str]:
    """Weights that ranks hold pieces of."""
    # the key of what is fused has the names of its parts
    return {name for item in plan.weights if item.is_cut for name in item.key.split("+")}


def test_what_is_written_stays_whole() -> None:
    """Rows of hidden states: an operator that returns nothing has no dimension of its own."""
    graph = fx.Graph()
    shapes = {"x": (7, 24), "slab": (3, 4, 24), "q_start": (2,), "slot": (7,), "table": (1, 3)}
    inputs = {name: graph.placeholder(name) for name in shapes}
    for name, shape in shapes.items():
        inputs[name].meta["val"] = torch.empty(shape)
    row = graph.call_function(torch.ops.aten.relu.default, (inputs["x"],))
    row.meta["val"] = torch.empty(7, 24)
    written = graph.call_function(ops.write_rows, (row, *list(inputs.values())[1:]))
    written.meta["val"] = None
    caches = dict.fromkeys(("x", "slab"), (0, "k"))
    program: Any = SimpleNamespace(graph=graph, weights={}, caches=caches, states={}, constants={})
    blocks = {element for element, _ in relations_of(program).blocks}
    assert {(row, 1), (inputs["slab"], 2)} <= blocks
    assert (inputs["x"], 1) not in blocks
