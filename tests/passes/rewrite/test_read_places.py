"""Arithmetic with places in a pass reads positions; what else counts tokens is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specc.errors import UnsupportedGraphError
from specc.passes.rewrite.read_places import ReadPlaces
from tests.passes.modules import (
    Tiny,
    assert_same_numbers,
    assert_same_numbers_flat,
    compiled,
    reasons,
    rewrites,
)


class Tempered(Tiny):
    """Scales queries by how far the sequence has come, as Llama 4 does."""

    def operands(self, x):
        q, k, v = super().operands(x)
        return q * self.scales(x).view(1, 1, -1, 1), k, v

    def scales(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]) + 0
        return torch.log1p(torch.floor((places.float() + 1.0) / 3)) * 0.5 + 1.0


def test_scales_of_places_are_those_of_positions():
    """The flat pass has several sequences, and a tree whose siblings share a position."""
    model = Tempered()
    program, pipeline = compiled(model)
    assert rewrites(pipeline, ReadPlaces.__name__) == 1
    assert_same_numbers(program, model)
    assert_same_numbers_flat(program, model)


class FromOne(Tempered):
    def scales(self, x):
        return 1.0 + (torch.arange(x.shape[1]) + 1).float()


class FromTheEnd(Tempered):
    def scales(self, x):
        return 1.0 + torch.arange(1, x.shape[1] + 1).float()


class InSteps(Tempered):
    def scales(self, x):
        return 1.0 + torch.arange(0, 2 * x.shape[1], 2).float()


class Doubled(Tempered):
    def scales(self, x):
        return 1.0 + torch.arange(2 * x.shape[1]).float()[: x.shape[1]]


class LookedUp(Tempered):
    """A table of places would bound the sequence, and nobody would say so."""

    def scales(self, x):
        return self.place(torch.arange(x.shape[1]))[:, 0]


class AsIntegers(Tempered):
    def scales(self, x):
        return torch.arange(x.shape[1]) + 1


@pytest.mark.parametrize("kind", [FromOne, FromTheEnd, InSteps, Doubled, LookedUp, AsIntegers])
def test_other_counts_are_refused(kind):
    with pytest.raises(UnsupportedGraphError):
        compiled(kind())


class OfColumns(Tiny):
    """Counts columns, which are no tokens."""

    def after(self, x, positions):
        return x * torch.arange(x.shape[2]).float()


def test_counts_of_columns_stay():
    model = OfColumns()
    program, pipeline = compiled(model)
    assert rewrites(pipeline, ReadPlaces.__name__) == 0
    assert "not over tokens" in " ".join(reasons(pipeline, ReadPlaces.__name__))
    assert_same_numbers(program, model)
