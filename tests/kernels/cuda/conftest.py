"""Where the Triton kernels run: a GPU, or Triton's interpreter on CPU tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.cuda.interpreted_calls import patch_calls
    from tests.kernels.cuda.interpreter import patch_bf16

    patch_bf16()
    patch_calls()


@pytest.fixture(autouse=True)
def watched_launches(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail where programs of a launch race; run them in a shuffled order (`races`)."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from tests.kernels.cuda.races import watched

    with watched(request.node.nodeid):
        yield


@pytest.fixture
def products_in_order(device: torch.device) -> Iterator[None]:
    """That of instructions, where none multiplies."""
    if device.type == "cuda":
        yield
        return
    from tests.kernels.cuda.interpreter import products_in_steps

    with products_in_steps():
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
