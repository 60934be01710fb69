"""Options that say which other origins' pages may use the server."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from specc.errors import ConfigError
from specc.option import option

# any origin, method or header, as browsers write it
ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


@dataclass(frozen=True)
class Origins:
    """Pages of which other origins may use the server, as browsers see to it (CORS).

    Args:
        allowed_origins: `https://app.example`, or `*`, any; none refuses all.
        allow_credentials: pages may send what the browser keeps for this server.
        allowed_methods: none is those that the server has.
        allowed_headers: of requests; none is any.
    Raises:
        ConfigError: what is no origin, any origin with credentials, or options without an origin.
    """

    allowed_origins: tuple[str, ...] = option(
        (),
        "An origin whose pages may use this server, such as https://app.example; repeatable, * is"
        " any. Without it: none.",
        "--allowed-origin",
        "--allowed-origins",
        metavar="ORIGIN",
    )
    allow_credentials: bool = option(
        False,
        "Such pages may send cookies and certificates that the browser keeps for this server; an"
        " API key needs none of this.",
        "--allow-credentials",
    )
    allowed_methods: tuple[str, ...] = option(
        (),
        "A method that such pages may use; repeatable, * is any. Else GET, HEAD and POST.",
        "--allowed-method",
        "--allowed-methods",
        metavar="METHOD",
    )
    allowed_headers: tuple[str, ...] = option(
        (),
        "A header that such pages may send; repeatable, * is any. Else any.",
        "--allowed-header",
        "--allowed-headers",
        metavar="HEADER",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "allowed_origins", tuple(map(_origin, self.allowed_origins)))
        # browsers write those that the server has in capitals, and compare each letter
        methods = tuple(method.upper() for method in self.allowed_methods)
        object.__setattr__(self, "allowed_methods", methods)
        for name in ("allowed_methods", "allowed_headers"):
            for value in getattr(self, name):
                if value != ANY_ORIGIN and not _TOKEN.fullmatch(value):
                    option_name = "--" + name.removesuffix("s").replace("_", "-")
                    raise ConfigError(
                        f"{option_name} {value[:80]}",
                        f"one name, such as {'GET' if name == 'allowed_methods' else 'X-My-Name'}",
                        f"repeat {option_name} for each",
                    )
        if not self.allowed_origins:
            for given, name in (
                (self.allow_credentials, "--allow-credentials"),
                (self.allowed_methods, "--allowed-method"),
                (self.allowed_headers, "--allowed-header"),
            ):
                if given:
                    raise ConfigError(
                        f"{name} without --allowed-origin",
                        "an origin that it is for",
                        f"add --allowed-origin https://…, or leave out {name}",
                    )
        if self.allow_credentials and ANY_ORIGIN in self.allowed_origins:
            raise ConfigError(
                "--allowed-origin * and --allow-credentials: every page of the internet could act"
                " for whoever reads it",
                "origins by name, or none of their credentials",
                "name the origins, or leave out --allow-credentials; an API key needs none",
            )


def _origin(text: str) -> str:
    """As browsers write it: in lower case, addresses short, without the port of its scheme.

    Raises:
        ConfigError: no origin.
    """
    if text == ANY_ORIGIN:
        return text
    match = _ORIGIN.fullmatch(text.lower())
    try:
        if match is None:
            raise ValueError
        scheme, host, digits = match.groups()
        if host.startswith("["):
            host = f"[{ipaddress.IPv6Address(host[1:-1])}]"
        port = None if digits is None else int(digits)
        if port is not None and not 0 < port < 1 << 16:
            raise ValueError
    except ValueError as error:
        raise ConfigError(
            f"--allowed-origin {text[:80]}",
            "a scheme and a host, with a port where it is not the usual one, or *",
            "for example --allowed-origin https://app.example; repeat it for each",
        ) from error
    is_usual = port in (None, {"http": 80, "https": 443}.get(scheme))
    return f"{scheme}://{host}" + ("" if is_usual else f":{port}")
