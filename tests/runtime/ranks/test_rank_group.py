"""What leader and followers ask of their group."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from specc.errors import FaultError
from specc.runtime.ranks.open_group import open_group
from specc.runtime.ranks.rank_group import Copies, Gathering, whole_logits


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


def test_a_rank_that_cannot_come_ends_the_wait_for_it() -> None:
    """Rank 0 hears of it from the thread that watches; gloo would wait for its time limit."""
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
