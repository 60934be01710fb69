"""Pages of other origins that may use the server: what browsers ask it for (CORS)."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from specc.server.config import ANY_ORIGIN, Origins

# what the server answers to
_METHODS = ("GET", "HEAD", "POST")
# of the headers of answers, those that scripts read besides the usual ones
_EXPOSED = ("Retry-After",)


def with_origins(app: ASGIApp, origins: Origins) -> ASGIApp:
    """The application, whose answers say which origins may read them; as it is where none may.

    It has to be around everything that answers, errors included: a browser keeps from its page what
    an answer without these headers says. Questions before a request (preflight) carry no key, and
    are answered before one is looked for.
    """
    if not origins.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins.allowed_origins,
        allow_methods=origins.allowed_methods or _METHODS,
        # clients have headers of their own, such as X-Stainless-Lang
        allow_headers=origins.allowed_headers or (ANY_ORIGIN,),
        allow_credentials=origins.allow_credentials,
        expose_headers=_EXPOSED,
    )
