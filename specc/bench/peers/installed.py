"""Whether the packages of peers are installed, and which versions; imports none of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib import metadata

from specc.bench.peers.names import PEERS
from specc.errors import ConfigError
from specc.system.extras import install_command


def check_installed(names: Sequence[str]) -> None:
    """Raises ConfigError: a package of one of these peers, or of its converter, is absent."""
    for name in names:
        facts = PEERS[name]
        needed = {**facts.packages, **facts.converters}
        if absent := [needed[module] for module in needed if not _is_there(module)]:
            raise ConfigError(
                f"--against {name}, and no {' and no '.join(absent)} in this environment",
                f"the packages of {name}: {', '.join(needed.values())}",
                install_command(facts.extra),
            )


def versions_of(names: Sequence[str]) -> dict[str, str | None]:
    """Distribution → version, of all that these peers are made of."""
    found: dict[str, str | None] = {}
    for name in names:
        for distribution in {**PEERS[name].packages, **PEERS[name].converters}.values():
            try:
                found[distribution] = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                found[distribution] = None
    return found


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        # a module that tests or users have put out of reach
        return False
