"""How many requests are being served at the moment, for what shares them out among servers."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

# these need no pass of the model
_NOT_COUNTED = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")


@dataclass
class ServerLoad:
    """For one event loop."""

    num_open: int = 0


class CountsRequests:
    """Counts requests that generate something, from their headers to the end of their answers."""

    def __init__(self, app: ASGIApp, load: ServerLoad) -> None:
        self._app = app
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        if not is_post or scope["path"] in _NOT_COUNTED:
            await self._app(scope, receive, send)
            return
        self._load.num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._load.num_open -= 1
