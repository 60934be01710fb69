"""Where the Triton kernels run: a GPU, or Triton's interpreter on CPU tensors."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.cuda.interpreter import patch_bf16

    patch_bf16()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
