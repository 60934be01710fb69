"""`specc serve`: from the command line's options to the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specc.errors import ConfigError
from specc.system.extras import install_command

# seconds after which no further round of passes begins
MEASURE_S = 8.0

if TYPE_CHECKING:
    from specc.runtime.engine import Engine
    from specc.runtime.engine_args import AsyncEngineArgs
    from specc.server.config import Place, ServeConfig


def run_serve(
    args: AsyncEngineArgs, place: Place, config: ServeConfig, *, measures: bool = True
) -> int:
    """Serve until a signal; returns the exit code.

    Args:
        args: the engine's directory, and how it is opened and run.
        place: where to listen.
        config: names, keys and limits.
        measures: time the passes of an engine that has no latency table, where goodput wants one.
    Raises:
        ConfigError: the server's packages are not installed.
        SpeccError: of the engine, the port or an option.
    """
    try:
        from specc.server.run import serve
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("specc"):
            raise
        raise ConfigError(
            f"no package {error.name}", "the packages of the server", install_command("serve")
        ) from error
    return serve(args, place, config, measure if measures else None)


def measure(engine: Engine) -> dict[str, Any]:
    """An engine's latency table as JSON, and a line that tells what takes so long."""
    from specc.cli.progress import make_listener
    from specc.progress import PhaseTimer
    from specc.tune.latency import measure_latency

    with make_listener() as listen, PhaseTimer(listen).phase("measure latency") as progress:
        return measure_latency(engine, progress, budget_s=MEASURE_S).to_json()
