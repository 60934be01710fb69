"""Keys that requests bring: `Authorization: Bearer KEY`, or `X-Api-Key: KEY`."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers

from specc.server.errors import ApiError


def has_key(headers: Headers, keys: Sequence[bytes]) -> bool:
    """Whether a request brings one of them, as OpenAI's clients send it, or Anthropic's."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    found = [_is_known(key, keys) and scheme.lower() == "bearer"]
    return any([*found, _is_known(headers.get("x-api-key", ""), keys)])


def _is_known(key: str, keys: Sequence[bytes]) -> bool:
    given = key.strip().encode("utf-8", "replace")
    # every key is compared, and in constant time
    return any([hmac.compare_digest(given, own) for own in keys])


def wrong_key(kind: str = "API") -> ApiError:
    """The answer to a request without the right one."""
    return ApiError(
        401,
        f"Incorrect {kind} key provided, or none: expected the header Authorization: Bearer KEY,"
        " or X-Api-Key: KEY. Please ask the operator of this server for a key.",
        kind="authentication_error",
        code=f"invalid_{kind.lower()}_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
