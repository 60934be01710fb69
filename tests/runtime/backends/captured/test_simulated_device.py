"""The simulated device: what it refuses, what a capture leaves, and what a replay reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.runtime.backends.captured.simulated_device import LateDevice, SimulatedDevice


@pytest.mark.parametrize(
    ("operator", "make"),
    [
        ("_local_scalar_dense", lambda x: x.sum().item()),
        ("nonzero", lambda x: x.nonzero()),
        ("index", lambda x: x[x > 0]),
    ],
)
def test_the_simulated_device_refuses_what_cuda_refuses(operator, make) -> None:
    with pytest.raises(RuntimeError, match=operator):
        SimulatedDevice().capture(lambda: make(torch.ones(3)))


def test_the_simulated_device_reads_where_it_was_captured() -> None:
    """A buffer that Python replaces afterwards is not seen; its content is."""
    box = {"x": torch.ones(3)}
    out = torch.zeros(3)
    old = box["x"]
    graph = SimulatedDevice().capture(lambda: out.copy_(box["x"] * 2))
    box["x"] = torch.full((3,), 5.0)
    graph.replay()
    assert out.tolist() == [2.0] * 3
    old.fill_(7)
    graph.replay()
    assert out.tolist() == [14.0] * 3


def test_what_a_capture_makes_is_there_after_a_replay() -> None:
    """Integers are in no range before, and other numbers are none."""
    made: list[Tensor] = []
    x = torch.arange(3)

    def run() -> None:
        made[:] = [x + 1, x / 2, (x + 2)[1:]]

    graph = SimulatedDevice().capture(run)
    most = torch.iinfo(torch.int64).max
    assert made[0].tolist() == [most] * 3
    assert bool(made[1].isnan().all())
    assert made[2].tolist() == [most] * 2
    graph.replay()
    assert [each.tolist() for each in made] == [[1, 2, 3], [0.0, 0.5, 1.0], [3, 4]]


def test_a_capture_writes_nothing() -> None:
    """What is run once before the capture is; of the capture itself nothing is left."""
    x, count = torch.zeros(4), torch.zeros(1, dtype=torch.int64)

    def run() -> None:
        x[1:3].add_(1)
        torch.add(x[:1], 5.0, out=x[3:])
        count.add_(1)

    device = SimulatedDevice()
    graph = device.capture(run)
    assert (x.tolist(), int(count)) == ([0.0, 1.0, 1.0, 5.0], 1)
    device.runs_first = False
    x.zero_()
    device.capture(run)
    assert (x.tolist(), int(count)) == ([0.0] * 4, 1)
    graph.replay()
    assert (x.tolist(), int(count)) == ([0.0, 1.0, 1.0, 5.0], 2)


def test_a_capture_that_fails_has_written_nothing() -> None:
    x, device = torch.zeros(2), SimulatedDevice()
    device.runs_first = False
    with pytest.raises(RuntimeError, match="_local_scalar_dense"):
        device.capture(lambda: x.add_(1).sum().item())
    assert x.tolist() == [0.0, 0.0]
    assert not device.tapes


@pytest.mark.parametrize("device", [SimulatedDevice(), LateDevice()], ids=["at once", "late"])
def test_a_graph_keeps_nothing_of_outside_alive(device) -> None:
    out, given = torch.zeros(3), [torch.ones(6)]
    graph = device.capture(lambda: out.copy_(given[0][::2] + 1))
    # another tensor of the same memory will do
    given[0] = given[0][3:]
    graph.replay()
    device.record_event().synchronize()
    assert out.tolist() == [2.0] * 3
    given.clear()
    with pytest.raises(AssertionError, match=r"nobody holds any more: torch.float32 \[6\] of aten"):
        graph.replay()


def test_memory_of_outside_is_held_until_what_is_queued_is_done() -> None:
    """Whoever gets it next writes there later, on the same stream."""
    device, out, given = LateDevice(), torch.zeros(3), [torch.ones(3)]
    graph = device.capture(lambda: out.copy_(given[0] + 1))
    graph.replay()
    given.clear()
    device.run_all()
    assert out.tolist() == [2.0] * 3


def test_what_another_graph_has_made_has_to_be_held() -> None:
    """Its memory is the other graph's, and others of the pool take it once nobody holds it."""
    device, out, x, made = SimulatedDevice(), torch.zeros(3), torch.ones(3), []
    first = device.capture(lambda: made.append(x + 1))
    del made[0]
    first.replay()
    second = device.capture(lambda: out.copy_(made[0] * 2))
    second.replay()
    assert out.tolist() == [4.0] * 3
    made.clear()
    first.replay()
    with pytest.raises(AssertionError, match="nobody holds any more"):
        second.replay()


def test_what_a_graph_makes_for_itself_stays_its_own() -> None:
    out, x = torch.zeros(3), torch.ones(3)
    graph = SimulatedDevice().capture(lambda: out.copy_((x + 1).mul_(2).view(3)[:] - 1))
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert out.tolist() == [2 * value + 1] * 3
