"""Requests by endpoint: those that are being answered, and what the others were answered with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# these need no pass of the model
_NOT_GENERATING = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
# paths that are no endpoint, and those with an id: as vLLM calls them
_OTHER = "none"


@dataclass
class ServerLoad:
    """For one event loop; requests are those that post something.

    Args:
        open: endpoint → requests that are being answered, streams to their end.
        ended: (endpoint, `2xx` or another class of status) → the others.
    """

    open: Counter[str] = field(default_factory=Counter)
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def num_generating(self) -> int:
        """Open requests that generate something."""
        return self.open.total() - sum(self.open[path] for path in _NOT_GENERATING)

    def to_json(self) -> list[dict[str, Any]]:
        """A row for each endpoint that was asked for anything, those with most requests first."""
        rows: list[dict[str, Any]] = []
        for path, count in self.open.items():
            ended = {
                status: n for (asked, status), n in sorted(self.ended.items()) if asked == path
            }
            rows.append({"path": path, "open": count, "ended": ended})
        return sorted(rows, key=lambda row: (-sum(row["ended"].values()), row["path"]))

    def families(self, family: Callable[..., Any], label: Sequence[str]) -> Iterator[Metric]:
        """Figures of what was answered; see `admin_families`."""
        requests = family(
            CounterMetricFamily, "http_requests", "Answered.", "handler", "method", "status"
        )
        for (path, status), count in self.ended.items():
            requests.add_metric([*label, path, "POST", status], count)
        yield requests


class CountsRequests:
    """Counts requests from their headers to the end of their answers.

    Args:
        paths: of the endpoints; no other path that a client asks for is told.
    """

    def __init__(self, app: ASGIApp, load: ServerLoad, paths: frozenset[str]) -> None:
        self._app = app
        self._load = load
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else _OTHER
        # what ends without an answer
        status = "5xx"

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = f"{message['status'] // 100}xx"
            await send(message)

        self._load.open[path] += 1
        try:
            await self._app(scope, receive, send_on)
        finally:
            self._load.open[path] -= 1
            self._load.ended[path, status] += 1
