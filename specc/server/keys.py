"""Keys that requests bring: `Authorization: Bearer KEY`."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers

from specc.server.errors import ApiError


def has_key(headers: Headers, keys: Sequence[bytes]) -> bool:
    """Whether a request brings one of them; all are compared, and in constant time."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    given = key.strip().encode("utf-8", "replace")
    found = [hmac.compare_digest(given, own) for own in keys]
    return scheme.lower() == "bearer" and any(found)


def wrong_key(kind: str = "API") -> ApiError:
    """The answer to a request without the right one."""
    return ApiError(
        401,
        f"Incorrect {kind} key provided, or none: expected the header Authorization: Bearer KEY."
        " Please ask the operator of this server for a key.",
        kind="authentication_error",
        code=f"invalid_{kind.lower()}_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
