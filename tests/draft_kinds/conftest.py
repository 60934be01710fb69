"""Engines that tests of kinds compile."""

from __future__ import annotations

import pytest

from tests.lossless import Zoo, shared_zoo


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return shared_zoo(tmp_path_factory.getbasetemp())
