"""Names that a server answers to.

A web page can let its own name point at an address of the reader's network, and its scripts then
talk to whatever listens there: to the browser it is the page's own server (DNS rebinding). Such
requests carry the page's name as `Host`. An address as `Host` cannot come from there.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specc.errors import ConfigError
from specc.server.error_forms import error_response
from specc.server.errors import ApiError, shorten

ANY = "*"


def choose_hosts(
    address: str, host: str, wanted: Sequence[str], *, has_keys: bool
) -> tuple[str, ...] | None:
    """Names to answer to, None for any.

    Args:
        host: as the user has written it.
        wanted: the user's names; `*` is any.
        has_keys: who has no key learns nothing, whatever name is used.
    Raises:
        ConfigError: what is no name of a host.
    """
    wanted = [name.lower() for name in wanted]
    for name in wanted:
        if name != ANY and (not name or name != host_of(name) or "/" in name):
            raise ConfigError(
                f"allowed host {shorten(name)!r}",
                "a name without scheme, port and path",
                "correct --allowed-host",
            )
    if ANY in wanted:
        return None
    if not wanted and (has_keys or not ipaddress.ip_address(address).is_loopback):
        # who opens a server to a network has names for it that are not known here
        return None
    own = {"localhost", socket.gethostname().lower(), host.lower(), *wanted}
    return tuple(sorted(own - {""}))


def host_of(header: str) -> str:
    """The host of a `Host` header, without its port; an address of IPv6 keeps its brackets."""
    text = header.strip().lower()
    if text.startswith("["):
        return text.partition("]")[0] + "]"
    return text.partition(":")[0].rstrip(".")


class KnownHosts:
    """Answers requests for this server only, whatever their path.

    Args:
        names: of this server; addresses are fine besides.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # no browser leaves the header out
        header = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if not header or self._is_known(host_of(header)):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            403,
            f"The host {shorten(header)!r} is no name of this server. Please use its address, or"
            " start it with --allowed-host NAME.",
            kind="permission_error",
            code="host_not_allowed",
            headers={"Connection": "close"},
        )
        await error_response(error)(scope, receive, send)

    def _is_known(self, host: str) -> bool:
        if host in self._names or host.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True
