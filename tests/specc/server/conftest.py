"""A server for each file of tests that names no other one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    # tests of parsers need none
    from tests.specc.server.serving import serve

    with serve() as running:
        yield running


@pytest.fixture
def nothing_is_left(server: Any) -> Iterator[None]:
    yield
    server.wait_until_idle()


@pytest.fixture(scope="module")
def rig() -> Iterator[tuple[Any, Any]]:
    """A server whose model thinks and calls tools, and what it says."""
    from tests.specc.server.scripted import AGENT, serve_scripted

    with serve_scripted(**AGENT) as made:
        yield made
