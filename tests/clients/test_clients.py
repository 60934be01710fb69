"""Clients that nobody here wrote, against a server: the table of `docs/guide/clients.md`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.actor import acting
from tests.clients.catalog import CLIENTS, KNOWN, Client, run_client
from tests.specc.server.serving import Server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with acting() as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, str]]:
    """Of each client, which is run once."""
    return {}


CASES = [
    pytest.param(client, feature, id=f"{client.name}-{feature}")
    for client in CLIENTS
    for feature in client.features
]


@pytest.mark.parametrize(("client", "feature"), CASES)
def test_a_client(
    server: Server,
    results: dict[str, dict[str, str]],
    client: Client,
    feature: str,
) -> None:
    """A package that cannot be had fails by its name, too: nothing is passed over in silence."""
    if client.name not in results:
        results[client.name] = run_client(client, server.base)
        server.wait_until_idle()
    found = results[client.name][feature]
    if reason := KNOWN.get((client.name, feature)):
        assert found, f"it works again: take it off the list of what is known ({reason})"
        pytest.xfail(reason)
    assert not found, found
