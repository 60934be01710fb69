"""What compiles here traces models that are alike once: tests of tracing are in tests/passes.

Graphs that engines run are looked at once, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rehearsed_once import rehearsed_once
from tests.traces import shared_traces


@pytest.fixture(autouse=True, scope="module")
def _traces() -> Iterator[None]:
    with shared_traces(), rehearsed_once():
        yield
