"""Errors as OpenAI's clients know them; nothing of the server's inside is in them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from specc.errors import ContextLengthError, FaultError, OverloadError, RequestError, SpeccError

# characters of a message; the values of bad requests are quoted in it
_MAX_MESSAGE = 600
_RETRY_AFTER_S = 1
# characters of a value that is quoted, and of a field's name
_MAX_QUOTED, _MAX_PARAM = 80, 120
# what a request is refused for begins with its place, where that is one field: `top_p=2`,
# `prompt 1 with rule='mss'`, `messages.0.content of another form`, `prompt 1 has no tokens`
_FIELD = re.compile(r"(?:prompt \d+ with )?([a-z]\w{0,39})=|(messages\.[\w.]{1,99})|(prompt) \d+ ")
# a word that a sentence can begin with, unlike the name of a field
_WORD = re.compile(r"[a-z]+(?=[ ,])")


class ApiError(Exception):
    """The answer to a request that cannot be served.

    Args:
        status: of HTTP; OpenAI's clients choose the class of their exception by it.
        kind: `type` of the error; None follows from the status.
        param: field of the request that is to blame.
        code: short name of the error.
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
    text = f"The model {shorten(name)!r} does not exist. This server has {' and '.join(names)}."
    return ApiError(404, text, param="model", code="model_not_found")


def bad_request(found: str, needed: str, do: str, param: str | None = None) -> ApiError:
    """A request that the client has to correct."""
    code = None if param is None else "invalid_value"
    return ApiError(400, _sentence(found, needed, do), param=param, code=code)


def overloaded(
    found: str, needed: str, do: str, headers: Mapping[str, str] | None = None
) -> ApiError:
    """A request that comes at a bad time: OpenAI's clients send it again by themselves."""
    return ApiError(
        503,
        _sentence(found, needed, do),
        kind="overloaded_error",
        code="overloaded",
        headers={"Retry-After": str(_RETRY_AFTER_S), **(headers or {})},
    )


def api_error_of(error: SpeccError, param: str | None = None, prompt: str = "prompt") -> ApiError:
    """What a client may know of an error; what else there is stays in the log.

    Args:
        param: field to blame where the error names none.
        prompt: the field that holds the prompt.
    """
    if isinstance(error, ContextLengthError):
        # clients tell it from others by these words or by the code, and send less
        text = (
            f"This model's maximum context length is {error.max_length} tokens. However, "
            f"{shorten(error.found, _MAX_MESSAGE // 3)}; expected {error.needed}. Please"
            f" reduce the length of the {prompt}."
        )
        return ApiError(400, text, param=prompt, code="context_length_exceeded")
    if isinstance(error, RequestError):
        place = _FIELD.match(error.found)
        if place:
            param = place[1] or place[2] or prompt
        return bad_request(error.found, error.needed, error.do, param)
    if isinstance(error, OverloadError):
        return overloaded(error.found, error.needed, error.do)
    if isinstance(error, FaultError):
        return ApiError(500, _fault(error.found, error.do), code="engine_failure")
    return internal_error()


def internal_error() -> ApiError:
    """For whatever nobody expected."""
    text = _fault(
        "the server failed while it worked on this request",
        "send the request again; the server's log has the cause",
    )
    return ApiError(500, text, code="internal_error")


def stopping_error() -> ApiError:
    """The server ended the request, because it stops."""
    text = _fault(
        "the server stopped before the output was complete",
        "send the request again, to another server",
    )
    return ApiError(503, text, code="server_stopping", headers={"Retry-After": "1"})


def _sentence(found: str, needed: str, do: str) -> str:
    """What the command line says in three lines, for people who read a client's exception."""
    return f"{_begin(found)}; expected {needed}. Please {do}."


def _fault(found: str, do: str) -> str:
    return f"{_begin(found)}. Please {do}."


def _begin(found: str) -> str:
    found = shorten(found, _MAX_MESSAGE // 2)
    if _WORD.match(found):
        return found[0].upper() + found[1:]
    # `top_p=2` and the like stay as the client wrote them
    return found if found[0].isdigit() else f"Invalid request: {found}"
