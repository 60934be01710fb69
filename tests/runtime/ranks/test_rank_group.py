"""What leader and followers ask of their group."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from specc.errors import FaultError
from specc.runtime.ranks.open_group import open_group
from specc.runtime.ranks.rank_group import Copies, Gathering, own_votes, whole_logits, whole_votes


class Gathered(Copies):
    """Two ranks with the same columns."""

    def gather(self, logits: Tensor) -> Tensor:
        return torch.cat((logits, logits), 1) if self.rank == 0 else logits[:, :0]


def test_columns_that_pad_are_cut_off() -> None:
    logits = torch.arange(12.0).view(3, 4)
    found = whole_logits(Gathered(0, 2), logits, 7)
    assert torch.equal(found, torch.cat((logits, logits[:, :3]), 1))
    assert found.is_contiguous()
    assert whole_logits(Gathered(1, 2), logits, 7).shape == (3, 0)


def test_logits_that_are_whole_stay() -> None:
    logits = torch.arange(12.0).view(3, 4)
    assert whole_logits(Gathered(0, 2), logits, 4) is logits


class Added(Copies):
    """Two ranks, of which the other one has given these values."""

    def __init__(self, other: Tensor) -> None:
        super().__init__(0, 2)
        self._other = other

    def add(self, values: Tensor) -> Tensor:
        return values + self._other


def test_votes_of_tiles_are_counted_once() -> None:
    """What rank 0 has of an earlier tile is there already: others begin at 0."""
    mass = torch.tensor([[3.0, 1.0], [-1.0, -1.0], [0.0, 0.0]])
    other = own_votes(mass)
    assert torch.equal(other, torch.tensor([[0.0, 0.0], [-1.0, -1.0], [0.0, 0.0]]))
    # a tile, on both
    mass[0, 1] += 2
    other[0, 0] += 4
    mass[2] += 1
    other[2] += 1
    inputs = (*[None] * 8, mass)
    whole_votes(Added(other), inputs)
    assert torch.equal(mass, torch.tensor([[7.0, 3.0], [-1.0, -1.0], [2.0, 2.0]]))
    whole_votes(Added(other), inputs[:8])


def test_a_rank_that_cannot_come_ends_the_wait_for_it() -> None:
    """Rank 0 hears of it from the thread that watches; the meeting would wait for its limit."""
    is_over = threading.Event()
    waiting = Gathering("tcp://127.0.0.1:9", 2, is_over.wait)

    def check() -> None:
        raise FaultError("rank 1 has failed", "", "")

    try:
        with pytest.raises(FaultError, match="rank 1 has failed"):
            waiting.meet(30, check)
    finally:
        is_over.set()
    assert waiting.meet(30, check) is True


def test_a_group_of_another_kind_is_told() -> None:
    with pytest.raises(FaultError, match="a group 'pigeons'"):
        open_group("pigeons", 1, 2, 1.0)
