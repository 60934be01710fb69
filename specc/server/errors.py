"""Errors as OpenAI's clients know them; nothing of the server's inside is in them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from specc.errors import FaultError, OverloadError, RequestError, SpeccError

# characters of a message; the values of bad requests are quoted in it
_MAX_MESSAGE = 600
_RETRY_AFTER_S = 1
# characters of a value that is quoted, and of a field's name
_MAX_QUOTED, _MAX_PARAM = 80, 120
# what `SamplingParams` complains about begins with the name of its field
_FIELD = re.compile(r"([a-z]\w{0,39})=")


class ApiError(Exception):
    """The answer to a request that cannot be served.

    Args:
        status: of HTTP.
        message: for the client.
        kind: `type` of the error; None follows from the status.
        param: field of the request that is to blame.
        code: short name of the error.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def to_json(self) -> dict[str, Any]:
        param = None if self.param is None else shorten(self.param, _MAX_PARAM)
        message = shorten(self.message, _MAX_MESSAGE)
        error = {"message": message, "type": self.kind, "param": param, "code": self.code}
        return {"error": error}


class JSON(Response):
    """A response of JSON; what cannot be written as UTF-8 is replaced."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_bytes(content)


def to_bytes(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def shorten(text: str, length: int = _MAX_QUOTED) -> str:
    """So many characters of it at most; an ellipsis is where the others were."""
    return text if len(text) <= length else text[: length - 1] + "…"


def unknown_model(name: str, names: Sequence[str]) -> ApiError:
    """The error of a request for another model."""
    return ApiError(
        404,
        _text(f"model {shorten(name)!r}", " or ".join(names), "choose it"),
        param="model",
        code="model_not_found",
    )


def bad_request(found: str, needed: str, do: str, param: str | None = None) -> ApiError:
    """A request that the client has to correct."""
    return ApiError(400, _text(found, needed, do), param=param)


def api_error_of(error: SpeccError) -> ApiError:
    """What a client may know of an error; what else there is stays in the log."""
    if isinstance(error, RequestError):
        field = _FIELD.match(error.found)
        param = field[1] if field else None
        return ApiError(400, _text(error.found, error.needed, error.do), param=param)
    if isinstance(error, OverloadError):
        return ApiError(
            503,
            _text(error.found, error.needed, error.do),
            kind="overloaded_error",
            code="overloaded",
            headers={"Retry-After": str(_RETRY_AFTER_S)},
        )
    if isinstance(error, FaultError):
        return ApiError(500, _text(error.found, error.needed, error.do), code="engine_failure")
    return internal_error()


def internal_error() -> ApiError:
    """For whatever nobody expected."""
    text = _text(
        "the server failed while it worked on this request",
        "a server without this fault",
        "send the request again; the server's log has the cause",
    )
    return ApiError(500, text, code="internal_error")


def stopping_error() -> ApiError:
    """The server ended the request, because it stops."""
    text = _text(
        "the server stopped before the output was complete",
        "a server that goes on",
        "send the request again, to another server",
    )
    return ApiError(503, text, code="server_stopping", headers={"Retry-After": "1"})


def error_response(error: ApiError) -> Response:
    return JSON(error.to_json(), status_code=error.status, headers=error.headers)


def _text(found: str, needed: str, do: str) -> str:
    return f"found: {shorten(found, _MAX_MESSAGE // 2)}; needed: {needed}; do: {do}"
