"""Results that come while other passes are in flight, and steps that wait for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.errors import RankError
from specc.runtime.backends.step_io import Drafted, StepInputs, StepResult
from specc.runtime.ranks.led_step import LedStep
from specc.runtime.ranks.links import StageResults
from specc.speculation.plans import SpecPlan


def test_each_pass_has_its_own_result() -> None:
    """However many are in flight; nobody has to come for them, and shapes are those of each."""
    values: queue.Queue[int] = queue.Queue()
    taken: list[tuple[int, ...]] = []

    def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        value = values.get(timeout=20)
        taken.append(shape)
        return torch.full(shape, value, dtype=dtype)

    results = StageResults(take)
    pending = [results.expect((rows, 3), torch.float32) for rows in range(1, 5)]
    assert not any(one.done() for one in pending)
    for value in range(4):
        values.put(value)
    # the last one is asked for first, and one by nobody
    assert pending[3].result(20).tolist() == [[3.0] * 3] * 4
    assert pending[0].result(20).tolist() == [[0.0] * 3]
    assert pending[2].result(20).tolist() == [[2.0] * 3] * 3
    assert taken == [(rows, 3) for rows in range(1, 5)]
    results.close()


def test_a_lost_rank_fails_all_that_are_in_flight() -> None:
    def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        raise RankError("rank 1 is gone", "all ranks", "start again")

    results = StageResults(take)
    pending = [results.expect((1,), torch.int64) for _ in range(3)]
    for one in pending:
        with pytest.raises(RankError, match="rank 1 is gone"):
            one.result(20)
    results.close()
    assert _ends("specc-results")


def test_the_thread_ends_with_the_groups() -> None:
    results = StageResults(lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    results.expect((1,), torch.int64).result(20)
    results.close()
    assert _ends("specc-results")


def _ends(name: str) -> bool:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(20)
    return all(thread.name != name for thread in threading.enumerate())


class KeepingStep:
    """A step that keeps what it drafted last, as native runners do."""

    plan = SpecPlan.from_widths((1,))

    def __init__(self, made: list[KeepingStep]) -> None:
        self.before_accept: Any = None
        self._made = made
        self._kept = ""
        made.append(self)

    def draft(self, inputs: StepInputs, slabs: Mapping[str, Tensor]) -> Drafted:
        self._kept = str(inputs.extra["name"])

        def accept(values: Mapping[str, Tensor], reads: Sequence[str]) -> StepResult:
            path = torch.tensor([[0, -1]], dtype=torch.int32)
            return StepResult([0], [[1]], [1], {}, {self._kept: 0.0}, {"path": path})

        return Drafted({}, accept)

    def another(self) -> KeepingStep:
        return KeepingStep(self._made)


def test_each_batch_in_flight_has_a_step_of_its_own() -> None:
    """As many as are drafted at once, and no more; those that nobody accepts come back, too."""
    made: list[KeepingStep] = []
    target = SimpleNamespace(leader=SimpleNamespace(check=lambda: None), num_stages=2)
    step = LedStep(KeepingStep(made), target, None, torch.zeros(1, 1))  # type: ignore[arg-type]
    rows, table = [(1, 0)], torch.zeros(1, 1, dtype=torch.int32)

    def draft(name: str) -> Drafted:
        extra: Any = {"name": name}
        return step.draft(StepInputs(rows, table, table, table, extra), {})

    for _ in range(3):
        first, second = draft("first"), draft("second")
        assert list(first.accept({}, ()).stage_s) == ["first"]
        third = draft("third")
        assert list(second.accept({}, ()).stage_s) == ["second"]
        assert list(third.accept({}, ()).stage_s) == ["third"]
        del first, second, third
    given_up = draft("nobody accepts it")
    del given_up
    assert len(made) == 3
