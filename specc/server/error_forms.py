"""Errors in the form of the API that a request is for, whatever has refused it."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from specc.server.errors import JSON, ApiError
from specc.server.plain_requests import HEADER, is_anthropic, request_id_of

# status → type of an error, as Anthropic's clients know them
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_OVERLOADED = 529


def error_response(error: ApiError) -> JSON:
    """The answer to a request that cannot be served."""
    return _ErrorResponse(error)


def anthropic_error(error: ApiError, request_id: str) -> tuple[int, dict[str, Any]]:
    """Status and body of an error, as Anthropic's API has them."""
    status = _OVERLOADED if error.kind == "overloaded_error" else error.status
    usual = "api_error" if status >= 500 else "invalid_request_error"
    message = error.to_json()["error"]["message"]
    if error.code == "context_length_exceeded":
        # agents tell it from others by these words, and send less
        message = f"prompt is too long: {message}"
    told = {"type": _ANTHROPIC.get(status, usual), "message": message}
    return status, {"type": "error", "error": told, "request_id": request_id}


class _ErrorResponse(JSON):
    """OpenAI's form; on the way out, the path says if another one is wanted."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.to_json(), status_code=error.status, headers=error.headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_anthropic(scope["path"]):
            await super().__call__(scope, receive, send)
            return
        request_id = request_id_of(Request(scope)) or f"req_{uuid.uuid4().hex}"
        status, body = anthropic_error(self._error, request_id)
        headers = {**self._error.headers, HEADER: request_id}
        await JSON(body, status_code=status, headers=headers)(scope, receive, send)
