"""`specc serve`: from the command line's options to the server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.errors import ConfigError
from specc.system.extras import install_command

# seconds after which no further round of passes begins
MEASURE_S = 8.0

if TYPE_CHECKING:
    from specc.runtime.engine import Engine
    from specc.server.config import ServeConfig


def run_serve(
    engine: Path,
    config: ServeConfig,
    *,
    loading: Mapping[str, Any],
    place: Mapping[str, Any],
    measures: bool = True,
) -> int:
    """Serve until a signal; returns the exit code.

    Args:
        engine: directory.
        config: names, keys and limits.
        loading: fields of `specc.server.run.Loading`.
        place: fields of `specc.server.run.Place`.
        measures: time the passes of an engine that has no latency table, where goodput wants one.
    Raises:
        ConfigError: the server's packages are not installed.
        SpeccError: of the engine, the port or an option.
    """
    try:
        from specc.server.run import Loading, Place, serve
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("specc"):
            raise
        raise ConfigError(
            f"no package {error.name}", "the packages of the server", install_command("serve")
        ) from error
    timing = measure if measures else None
    return serve(engine, Loading(**loading, measure=timing), Place(**place), config)


def measure(engine: Engine) -> dict[str, Any]:
    """An engine's latency table as JSON, and a line that tells what takes so long."""
    from specc.cli.progress import make_listener
    from specc.progress import Phases
    from specc.tune.latency import measure_latency

    with make_listener() as listen, Phases(listen).phase("measure latency") as progress:
        return measure_latency(engine, progress, budget_s=MEASURE_S).to_json()
