"""A device that stands for the GPU, and its kernels interpreted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specc.runtime.backends.captured import backend as captured_backend
from tests.runtime.backends.captured.simulated_device import SimulatedDevice


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """Stands for the GPU of this machine."""
    simulated = SimulatedDevice()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(captured_backend, "cuda_device", lambda: simulated)
    return simulated


@pytest.fixture
def triton_kernels() -> Iterator[None]:
    """The kernels, interpreted, in place of the oracles."""
    from specc.kernels.cuda.register import register, unregister

    register("CPU")
    yield
    unregister("CPU")
