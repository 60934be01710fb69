"""A device that stands for the GPU, and its kernels interpreted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.backends.captured.simulated_device import SimulatedDevice, stand_in


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """Stands for the GPU of this machine."""
    return stand_in(monkeypatch)


@pytest.fixture
def triton_kernels() -> Iterator[None]:
    """The kernels, interpreted, in place of the oracles."""
    from specc.kernels.cuda.register import register, unregister
    from tests.kernels.cuda.interpreted_calls import patch_calls

    patch_calls()
    register("CPU")
    yield
    unregister("CPU")
