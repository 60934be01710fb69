"""Votes on the blocks of a request: what they add up to, when they are due, and what follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specc.drafters.views import View
from specc.runtime.core import EngineCore
from specc.runtime.drafters.block_choice import BlockChoice
from specc.runtime.engine import Engine
from specc.sampling.params import SamplingParams

VIEW = View(8, 3, 6)


def made_of(*votes: list[float], num_voters: int = 40, length: int = 44) -> BlockChoice:
    choice = BlockChoice()
    for one in votes:
        choice.add(torch.tensor(one), num_voters, length)
    return choice


def test_votes() -> None:
    """Each time they count alike, however many queries they are of; half of what was before."""
    assert BlockChoice().mass is None
    choice = made_of([6.0, 2.0])
    assert choice.mass is not None
    assert choice.mass.tolist() == [0.75, 0.25]
    choice.add(torch.tensor([0.0, 32.0]), 32, 50)
    assert choice.mass.tolist() == [0.375, 1.125]
    choice.add(torch.tensor([1.0, 1.0]), 2, 60)
    assert choice.mass.tolist() == [0.6875, 1.0625]
    assert choice.num_voters == 74


@pytest.mark.parametrize("votes", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_votes_that_are_none(votes: list[float]) -> None:
    choice = made_of([6.0, 2.0], votes)
    assert choice.mass is not None
    assert choice.mass.tolist() == [0.75, 0.25]


def test_when_votes_are_due() -> None:
    """After a window of rows, at most 256 and at least 32; after 32 while few have voted."""
    assert BlockChoice().is_due(0, [VIEW])
    for windows, num_voters, rows in (
        ((100,), 40, 100), ((8,), 40, 32), ((4000,), 40, 256), ((100,), 31, 32),
        ((120, 64), 40, 64), ((4000,), 1, 32),
    ):  # fmt: skip
        choice = made_of([1.0], num_voters=num_voters, length=500)
        views = [View(window, 4, 16) for window in windows]
        # a view that chooses nothing has no say
        views.append(View(33))
        assert not choice.is_due(500 + rows - 1, views)
        assert choice.is_due(500 + rows, views)


def test_columns() -> None:
    choice = made_of([9.0, 1, 5, 2, 5, 0, 3, 0, 4, 5, 8, 7])
    assert choice.columns(VIEW, 44, 4) == [2, 4]
    assert choice.columns(VIEW, 47, 4) == [2, 4]
    # a block leaves the window; another view; votes
    assert choice.columns(VIEW, 48, 4) == [4, 9]
    assert choice.columns(View(4, 0, 4), 48, 4) == [0]
    choice.add(torch.tensor([0.0, 7.0] + [0.0] * 10), 1, 48)
    assert choice.columns(VIEW, 48, 4) == [1, 9]
    choice.clear()
    assert choice.columns(VIEW, 48, 4) == [8, 9]


def test_preemption(make_engine: Callable[..., Engine]) -> None:
    """The rows are gone, and so is what was said of them."""
    core = EngineCore(make_engine(plans=[()]), "off")
    request = core.requests.make([1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
    request.block_choice.add(torch.ones(4), 1, 3)
    request.preempt()
    assert request.block_choice.mass is None
    assert request.block_choice.num_voters == 0
