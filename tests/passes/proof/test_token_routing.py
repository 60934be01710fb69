"""Mixtures of experts reorder tokens and put them back: what is accepted of that, what is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specc.errors import UnsupportedGraphError
from specc.kernels import ops
from tests.passes.modules import Tiny, compiled


class Mixture(Tiny):
    """Two of four experts a token, in the steps of transformers; tests override single steps."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.Parameter(torch.randn(4, 16, 16))

    def before(self, x):
        return x

    def sort(self, ids):
        return ids.sort()

    def tokens_of(self, permutation):
        return permutation // 2

    def count(self, ids, permutation):
        return (ids[:, None] == torch.arange(4)).sum(0)

    def ends(self, counts):
        return counts.to(torch.int32).cumsum(0, dtype=torch.int32)

    def inverse(self, permutation, ids):
        inverse = torch.empty_like(permutation)
        inverse[permutation] = torch.arange(permutation.shape[0])
        return inverse

    def back(self, rows, permutation, ids):
        return rows[self.inverse(permutation, ids)]

    def after(self, x, positions):
        x = self.before(x)[0]
        weights, choices = self.gate(x).softmax(-1).topk(2)
        chosen = choices.reshape(-1)
        ids, permutation = self.sort(chosen)
        ends = self.ends(self.count(ids, permutation))
        rows = ops.grouped_mm(x[self.tokens_of(permutation)], self.experts, ends)
        rows = rows * weights.reshape(-1)[permutation][:, None]
        rows = self.back(rows, permutation, chosen)
        return rows.view(-1, 2, 16).sum(1)[None]


class InverseBySorting(Mixture):
    def inverse(self, permutation, ids):
        return permutation.argsort()


class CountsOfFloats(Mixture):
    def count(self, ids, permutation):
        return torch.histc(ids.float(), bins=4, min=0, max=3)


@pytest.mark.parametrize("kind", [Mixture, InverseBySorting, CountsOfFloats])
def test_mixtures_are_accepted(kind):
    compiled(kind())


class MixesBefore(Mixture):
    def before(self, x):
        return x + x.mean(1, keepdim=True)


class SortsRowsBefore(Mixture):
    def before(self, x):
        return x.sort(1).values


class StaysSorted(Mixture):
    """Rows of experts are read as if they were in the order of the pass."""

    def back(self, rows, permutation, ids):
        return rows


class AddsSorted(Mixture):
    def back(self, rows, permutation, ids):
        return super().back(rows, permutation, ids) + rows


class GoesOn(Mixture):
    """Applies the permutation instead of its inverse."""

    def inverse(self, permutation, ids):
        return permutation


class OtherSort(Mixture):
    def inverse(self, permutation, ids):
        return super().inverse((3 - ids).sort().indices, ids)


class BackwardInverse(Mixture):
    def inverse(self, permutation, ids):
        return permutation.argsort(descending=True)


class PartlyWritten(Mixture):
    def inverse(self, permutation, ids):
        inverse = torch.empty_like(permutation)
        inverse[permutation // 2] = torch.arange(permutation.shape[0])
        return inverse


class Descending(Mixture):
    """Counts go up, rows go down."""

    def sort(self, ids):
        return ids.sort(descending=True)


class OtherTokens(Mixture):
    def tokens_of(self, permutation):
        return permutation // 4


class NextTokens(Mixture):
    def tokens_of(self, permutation):
        return (permutation + 1) // 2


class CountsOfOther(Mixture):
    def count(self, ids, permutation):
        return super().count((3 - ids).sort().values, permutation)


class CountsOfPlaces(Mixture):
    def count(self, ids, permutation):
        return super().count(permutation, permutation)


class CountsAsEnds(Mixture):
    def ends(self, counts):
        return counts.to(torch.int32)


class TurnedCounts(Mixture):
    def count(self, ids, permutation):
        return super().count(ids, permutation).flip(0)


class OverflowingCounts(Mixture):
    def ends(self, counts):
        return counts.to(torch.int8).cumsum(0, dtype=torch.int32)


class NarrowPlaces(Mixture):
    def tokens_of(self, permutation):
        return permutation.to(torch.int8).to(torch.int64) // 2


class SwappedChoices(Mixture):
    def count(self, ids, permutation):
        same = (ids[:, None] == torch.arange(4)).view(-1, 2, 2).mT.reshape(-1, 4)
        return same.sum(0)


class LoadAsFeature(Mixture):
    """Tokens learn how many others chose their expert."""

    def back(self, rows, permutation, ids):
        load = self.count(ids.sort().values, permutation).float()
        return super().back(rows, permutation, ids) + load[ids][:, None]


@pytest.mark.parametrize(
    "kind",
    [
        MixesBefore, SortsRowsBefore, StaysSorted, AddsSorted, GoesOn, OtherSort,
        BackwardInverse, PartlyWritten, Descending, OtherTokens, NextTokens, CountsOfOther,
        CountsOfPlaces, CountsAsEnds, TurnedCounts, SwappedChoices, LoadAsFeature,
        OverflowingCounts, NarrowPlaces,
    ],
)  # fmt: skip
def test_broken_routing_is_refused(kind):
    with pytest.raises(UnsupportedGraphError) as caught:
        compiled(kind())
    assert "after fuse: " in caught.value.found, caught.value.found


class Experts(Tiny):
    """One expert of four a token, by one operator; tests override what it reads."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.gate_up = nn.Parameter(torch.randn(4, 24, 16))
        self.down = nn.Parameter(torch.randn(4, 16, 12))

    def after(self, x, positions):
        weights, ids = self.gate(x[0]).softmax(-1).topk(1)
        operands = self.choose(x[0], ids, weights)
        return ops.experts(*operands, self.gate_up, self.down, "silu")[None]

    def choose(self, x, ids, weights):
        return x, ids, weights


class SortedRows(Experts):
    def choose(self, x, ids, weights):
        return x[ids.reshape(-1).sort().indices // 1], ids, weights


class SortedIds(Experts):
    def choose(self, x, ids, weights):
        return x, ids.reshape(-1).sort().values[:, None], weights


class SortedWeights(Experts):
    def choose(self, x, ids, weights):
        return x, ids, weights.reshape(-1)[ids.reshape(-1).sort().indices][:, None]


class PlacesAsIds(Experts):
    def choose(self, x, ids, weights):
        return x, torch.arange(x.shape[0])[:, None], weights


def test_experts_are_accepted():
    program, _ = compiled(Experts())
    assert len(program.calls(ops.experts)) == 1


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (SortedRows, "is not a row for each token"),
        (SortedIds, "is not [tokens, columns]"),
        (SortedWeights, "is not [tokens, columns]"),
        (PlacesAsIds, "is not [tokens, columns]"),
    ],
)
def test_experts_of_other_tokens_are_refused(kind, found):
    with pytest.raises(UnsupportedGraphError) as caught:
        compiled(kind())
    assert "after fuse: " in caught.value.found
    assert found in caught.value.found
