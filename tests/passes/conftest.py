"""Traces of small modules in fewer seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch._dynamo.config


@pytest.fixture(autouse=True, scope="session")
def _no_cache_of_fakes() -> Iterator[None]:
    """Torch remembers shapes of operators; modules of a layer or two have no time to gain."""
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield
