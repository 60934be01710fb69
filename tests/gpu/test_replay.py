"""Replays are held to the step without a graph, every one of them, and every bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specc.kernels.cuda import few_rows
from tests.gpu.replay import fill, replays_alike, require_graphs
from tests.gpu.results import Device

COUNT = 5


class FakeStep:
    """Adds one to row 1 of a cache, and says 7; `fault` is called before a replay's end."""

    plan = SimpleNamespace(name="chain")
    is_split = False
    launches_dependent = False

    def __init__(self, fault: Any = lambda number, slabs: None, result: Any = lambda number: 7):
        self._captured: dict[Any, Any] = {}
        self._fault, self._result = fault, result
        self.num_replays = 0

    def bucket_of(self, batch: int) -> int:
        return 2

    def capture(self, bucket: int) -> None:
        self._captured.setdefault((bucket, False), ["graph"])

    def advance(self, inputs: Any, slabs: Any) -> tuple[Any, ...]:
        # from what the caches hold: what an earlier run has left shows
        slabs["cache"][1] = slabs["cache"][2] + 1
        slabs["cache"][2] += 1
        if self._captured[2, False] is None:
            return [7], [[1]], [3], {}, "seconds"
        self.num_replays += 1
        self._fault(self.num_replays, slabs)
        return [self._result(self.num_replays)], [[1]], [3], {}, "other seconds"


def run(step: FakeStep, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    slabs = {"cache": torch.zeros(4, 3, dtype=dtype), "history": torch.zeros(2, 5).int()}
    fill(slabs, 50)
    inputs = SimpleNamespace(rows=[(1, 2)])
    return replays_alike(step, slabs, inputs, Device("simulated"), COUNT)


def test_replays_that_equal_the_step():
    step = FakeStep()
    found = run(step)
    assert step.num_replays == COUNT == found["replays"]
    assert found["tokens"] == 8
    # the graph is there again
    assert step._captured == {(2, False): ["graph"]}


@pytest.mark.parametrize("number", [1, 3, COUNT])
def test_one_replay_that_says_something_else(number):
    step = FakeStep(result=lambda at: 8 if at == number else 7)
    with pytest.raises(AssertionError, match=rf"replay {number} of {COUNT}: .*8"):
        run(step)


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float32, 1e-7), (torch.bfloat16, 1e-2)], ids=str
)
@pytest.mark.parametrize("number", [1, COUNT])
def test_one_replay_that_leaves_other_bits(number, dtype, value):
    def fault(at: int, slabs: Any) -> None:
        if at == number:
            slabs["cache"][3, 1] *= 1 + value

    with pytest.raises(AssertionError, match=rf"replay {number} of {COUNT}: 1 elements of cache"):
        run(FakeStep(fault), dtype)


def test_signs_of_zero_and_nan():
    """NaN equals itself; -0 is not what was there."""

    def spoil(value: float) -> Any:
        def fault(at: int, slabs: Any) -> None:
            slabs["cache"][0, 0] = value

        return fault

    step, slabs = FakeStep(), {"cache": torch.full((4, 3), float("nan"))}
    replays_alike(step, slabs, SimpleNamespace(rows=[1]), Device("simulated"), COUNT)
    slabs = {"cache": torch.zeros(4, 3)}
    with pytest.raises(AssertionError, match="1 elements of cache"):
        replays_alike(
            FakeStep(spoil(-0.0)), slabs, SimpleNamespace(rows=[1]), Device("simulated"), COUNT
        )


def test_a_capture_that_fell_back_fails():
    step = FakeStep()
    with pytest.raises(AssertionError, match="chain: nothing was captured"):
        require_graphs(step)
    step._captured[2, False] = None
    with pytest.raises(AssertionError, match="chain runs operator by operator for 2 sequences"):
        run(step)
    step._captured = {(2, False): ["graph"], (8, False): None}
    with pytest.raises(AssertionError, match="8 sequences"):
        run(step)


@pytest.mark.parametrize("is_dependent", [True, False])
def test_a_step_without_its_graph_has_the_same_products(is_dependent, monkeypatch):
    """Those of dependent launches may round otherwise than those of ordinary ones."""
    weight = torch.zeros(8, 8)
    tile = few_rows.TILES[torch.float32][0]
    product = few_rows.Product.of("add_norm_linear", 1, weight)
    monkeypatch.setattr(few_rows, "choices", {product: few_rows.Choice(None, tile)})
    seen = []

    class Step(FakeStep):
        launches_dependent = is_dependent

        def advance(self, *args: Any) -> tuple[Any, ...]:
            if self._captured[2, False] is None:
                seen.append(few_rows.tile_for("add_norm_linear", 1, weight))
            return super().advance(*args)

    run(Step())
    assert seen == [tile if is_dependent else None]
