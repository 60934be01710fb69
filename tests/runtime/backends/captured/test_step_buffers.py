"""Inputs of steps lie where kernels that were compiled for aligned pointers may read them."""

from __future__ import annotations

import itertools

import pytest

from specc.runtime.backends.captured.step_buffers import StepBuffers
from tests.runtime.backends.captured.simulated_device import SimulatedDevice


@pytest.mark.parametrize("max_batch", range(1, 10))
@pytest.mark.parametrize("width", [1, 3, 16])
def test_inputs_are_aligned_and_share_nothing(max_batch, width):
    buffers = StepBuffers(SimulatedDevice(), max_batch, width, 5, 1, 3, 3)
    begin = min(view.data_ptr() for view in buffers.inputs.values())
    spans = []
    for name, view in buffers.inputs.items():
        assert (view.data_ptr() - begin) % 16 == 0, name
        assert view.is_contiguous(), name
        assert len(view) == max_batch, name
        spans.append((view.data_ptr(), view.data_ptr() + view.numel() * view.element_size()))
    spans.sort()
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
