"""Requests as the routes know them: paths in one form, HEAD as GET, and an id."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
# the same, as Anthropic's clients read it
_ANTHROPIC_HEADER = "Request-Id"
MESSAGES = "/v1/messages"
# what may go back in a header, and into an answer
_ID = re.compile(r"[ -~]{1,256}")


def request_id_of(request: Request) -> str | None:
    """What the client calls its request, in a header, if it calls it anything."""
    return _sent_id(request.headers)


def is_anthropic(path: str) -> bool:
    """Whether requests to a path, and answers to them, have the form of Anthropic's API."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


class PlainRequests:
    """Hands requests on in one form.

    A path may end with slashes: redirecting it instead would lose bodies with some clients, and
    names of the server behind a proxy. HEAD is answered wherever GET is; the connection leaves out
    the body.

    Args:
        has_ids: every response has a header `X-Request-Id`, the client's own or another; else
            those to POST, errors included.
    """

    def __init__(self, app: ASGIApp, has_ids: bool) -> None:
        self._app = app
        self._has_ids = has_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        plain = {**scope, "path": scope["path"].rstrip("/") or "/"}
        if scope["method"] == "HEAD":
            plain["method"] = "GET"
        has_id = self._has_ids or scope["method"] == "POST" or is_anthropic(plain["path"])
        await self._app(plain, receive, self._with_id(scope, send) if has_id else send)

    def _with_id(self, scope: Scope, send: Send) -> Send:
        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault(HEADER, _sent_id(Headers(scope=scope)) or uuid.uuid4().hex)
                if is_anthropic(scope["path"]):
                    headers[_ANTHROPIC_HEADER] = headers[HEADER]
            await send(message)

        return send_with_id


def _sent_id(headers: Headers) -> str | None:
    found = headers.get(HEADER, "")
    return found if _ID.fullmatch(found) else None
