"""`specc serve`: its options and help, and from there to the server."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from specc.cli.app import Debug, EngineArgument
from specc.cli.options.with_options import Fields
from specc.errors import ConfigError
from specc.runtime.engine_args import AsyncEngineArgs
from specc.server.admin_options import Admin
from specc.server.config import ConnectionLimits, Place, ServeConfig, Tls
from specc.server.origin_options import Origins

if TYPE_CHECKING:
    from specc.runtime.core import EngineCore
    from specc.tune.latency import IdleLatency

# seconds after which no further round of passes begins
_MEASURE_S = 8.0


def serve(
    engine: EngineArgument,
    place: Place,
    args: Annotated[
        AsyncEngineArgs,
        Fields(
            "plan",
            "policy",
            "adapts_verification",
            "confidence_threshold",
            "multi_step_ms",
            "max_num_seqs",
            "kv_cache_tokens",
            "shares_prefixes",
            "shares_outputs",
            "shares_unsalted",
            "max_waiting",
            "sleep_after_s",
            "verify",
            "check_weights",
            "num_threads",
            "backend",
            "offload_weights",
            "mmap",
            "rank_timeout_s",
            "oversubscribes",
            "overlaps",
            "micro_batches",
            "generation_config",
            "override_generation_config",
            policy={
                "help": "What chooses plans: goodput (the default of engines that speculate),"
                " adaptive, best, profile, fixed."
            },
        ),
    ],
    config: ServeConfig,
    limits: ConnectionLimits,
    tls: Tls,
    origins: Origins,
    admin: Admin,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure",
            help="Time the engine's passes while no request runs, for the policy goodput, unless"
            " that was done on this machine, by specc tune or an earlier start.",
        ),
    ] = True,
    debug: Debug = False,
) -> None:
    """Serve an engine over HTTP, as OpenAI's API does: completions, chats, streams.

    The first SIGTERM or Ctrl-C lets open requests end, a second one ends the process. There is
    a page of live figures at /, and figures for Prometheus at /metrics.

    \b
    Examples:
      specc serve engine/
      specc serve engine/ --host 0.0.0.0 --port 9000 --served-model-name coder
      SPECC_API_KEY=secret specc serve engine/ --max-waiting 64 --request-timeout 120
      specc serve engine/ --enable-auto-tool-choice --tool-call-parser hermes
      specc serve engine/ --allowed-host specc.internal --max-connections 256
      specc serve engine/ --ssl-certfile cert.pem --ssl-keyfile key.pem
      specc serve engine/ --allowed-origin https://app.example
      curl localhost:8000/v1/completions -H 'Content-Type: application/json'
        -d '{"prompt": "def f(x):", "max_tokens": 32}'
    """  # noqa: D301
    code = _run(
        replace(args, engine=engine),
        replace(place, limits=limits, tls=tls),
        replace(config, origins=origins, admin=admin),
        measures=measure,
    )
    raise typer.Exit(code)


def _run(args: AsyncEngineArgs, place: Place, config: ServeConfig, *, measures: bool) -> int:
    """Serve until a signal; returns the exit code.

    Args:
        args: the engine's directory, and how it is opened and run.
        place: where to listen.
        config: names, keys and limits.
        measures: time the passes of an engine of which no latency table of this machine is known,
            where goodput wants one.
    Raises:
        ConfigError: the server's packages are not installed.
        SpeccError: of the engine, the port or an option.
    """
    try:
        from specc.server import run as server
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("specc"):
            raise
        from specc.system.extras import install_command

        raise ConfigError(
            f"no package {error.name}", "the packages of the server", install_command("serve")
        ) from error
    return server.serve(args, place, config, _measure if measures else None)


def _measure(core: EngineCore) -> IdleLatency:
    from specc.tune.latency import IdleLatency

    return IdleLatency(core, _MEASURE_S)
