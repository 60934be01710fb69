"""The simulated device: what it refuses, and what a replay reads."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.backends.captured.simulated_device import SimulatedDevice


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
