"""Pages of other origins that may use the server: what browsers ask it for (CORS)."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from specc.server.origin_options import ANY_ORIGIN, Origins

# what the server answers to
_METHODS = ("GET", "HEAD", "POST")
# of the headers of answers, those that scripts read besides the usual ones
_EXPOSED = ("Retry-After",)
_ASKS_FOR_PRIVATE = "access-control-request-private-network"


def with_origins(app: ASGIApp, origins: Origins) -> ASGIApp:
    """The application, whose answers say which origins may read them; as it is where none may.

    It has to be around everything that answers, errors included: a browser keeps from its page what
    an answer without these headers says. Questions before a request (preflight) carry no key, and
    are answered before one is looked for.
    """
    if not origins.allowed_origins:
        return app
    return _Cors(
        app,
        allow_origins=origins.allowed_origins,
        allow_methods=origins.allowed_methods or _METHODS,
        # clients have headers of their own, such as X-Stainless-Lang
        allow_headers=origins.allowed_headers or (ANY_ORIGIN,),
        allow_credentials=origins.allow_credentials,
        expose_headers=_EXPOSED,
    )


class _Cors(CORSMiddleware):
    """Starlette's, also for pages of the internet and a server at 127.0.0.1 or in a local network.

    Some browsers ask leave for that, too, with the question before a request. An origin that the
    operator has named has it; Starlette would refuse, or in older versions not answer that part.
    Source: WICG, Private Network Access.
    """

    def preflight_response(self, request_headers: Headers) -> Response:
        name = _ASKS_FOR_PRIVATE.encode()
        others = [header for header in request_headers.raw if header[0] != name]
        response = super().preflight_response(Headers(raw=others))
        if _ASKS_FOR_PRIVATE in request_headers and response.status_code == 200:
            response.headers["Access-Control-Allow-Private-Network"] = "true"
        return response
