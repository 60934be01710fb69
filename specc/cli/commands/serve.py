"""`specc serve`: its options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specc.cli.app import Debug, EngineArgument


def serve(
    engine: EngineArgument,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen at; 0.0.0.0 is all of them.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 chooses one that is free.")] = 8000,
    plan: Annotated[
        str | None, typer.Option("--plan", help="One plan for every step, e.g. off or chain-4.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            help="What chooses plans: goodput (the default of engines that speculate), adaptive,"
            " best, profile, fixed.",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option("--max-num-seqs", help="Requests that run together; else as compiled."),
    ] = None,
    kv_cache_tokens: Annotated[
        int | None,
        typer.Option(
            "--kv-cache-tokens",
            help="Rows of the KV cache, for all requests together: where they run out, the newest"
            " gives way. Else the worst case.",
            show_default=False,
        ),
    ] = None,
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="Share rows of prompts that begin with the same tokens.",
        ),
    ] = True,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure",
            help="Time the engine's passes first, for the policy goodput, unless specc tune has.",
        ),
    ] = True,
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", help="Requests that wait at most; more get 503.")
    ] = 1024,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name", help="What clients call it; repeatable. Else the directory."
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            help="Needed under /v1; repeatable. Better in the environment: others see arguments.",
            envvar="SPECC_API_KEY",
            show_envvar=True,
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option("--chat-template", help="Jinja file; else the engine's own.", metavar="FILE"),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option("--max-body-bytes", help="Of one request; larger ones get 413.")
    ] = 8 << 20,
    max_unbounded_bytes: Annotated[
        int | None,
        typer.Option(
            "--max-unbounded-bytes",
            help="Most bytes of a prompt whose number says nothing about its tokens, as the"
            " tokenizer may leave them out. By default 64 for each position, and at least 1 MiB.",
            show_default=False,
        ),
    ] = None,
    max_grammar_chars: Annotated[
        int,
        typer.Option(
            "--max-grammar-chars",
            help="Of a grammar, schema or regex, or all choices of a request together.",
        ),
    ] = 256 << 10,
    request_timeout: Annotated[
        float | None,
        typer.Option(
            "--request-timeout",
            help="Seconds after which a request ends with what it has; else never.",
            show_default=False,
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            help="A name that clients may call this server, beside its addresses; repeatable, * is"
            " any. Without it: the machine's own names where the server listens at a local address"
            " and needs no key, else any.",
        ),
    ] = None,
    max_connections: Annotated[
        int,
        typer.Option(
            "--max-connections",
            help="Open at a time. Beyond, the one that has sent no request for the longest time is"
            " closed; where all of them work, new ones get 503.",
        ),
    ] = 4096,
    drain_timeout: Annotated[
        float,
        typer.Option("--drain-timeout", help="Seconds that open requests have after SIGTERM."),
    ] = 30.0,
    log_level: Annotated[
        str, typer.Option("--log-level", help="critical, error, warning, info or debug.")
    ] = "info",
    log_every: Annotated[
        float, typer.Option("--log-every", help="Seconds between two lines of figures; 0: none.")
    ] = 10.0,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="Compare all files with their hashes, or none; else all but the weights.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", help="Threads that torch uses; without it, as torch decides."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            help="Run with another backend: eager takes the graphs of any engine.",
        ),
    ] = None,
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
      specc serve engine/ --allowed-host specc.internal --max-connections 256
      curl localhost:8000/v1/completions -H 'Content-Type: application/json'
        -d '{"prompt": "def f(x):", "max_tokens": 32}'
    """  # noqa: D301
    from specc.cli.serve import run_serve
    from specc.server.config import ConnectionLimits, ServeConfig

    config = ServeConfig(
        model_names=tuple(served_model_name or (engine.resolve().name,)),
        api_keys=tuple(api_key or ()),
        max_body_bytes=max_body_bytes,
        max_unbounded_bytes=max_unbounded_bytes,
        max_grammar_chars=max_grammar_chars,
        request_timeout_s=request_timeout,
        log_every_s=log_every,
    )
    code = run_serve(
        engine,
        config,
        loading={
            "plan": plan,
            "policy": policy,
            "max_num_seqs": max_num_seqs,
            "kv_cache_tokens": kv_cache_tokens,
            "shares_prefixes": prefix_caching,
            "max_waiting": max_waiting,
            "verify": verify,
            "threads": threads,
            "backend": backend,
        },
        place={
            "host": host,
            "port": port,
            "drain_timeout_s": drain_timeout,
            "log_level": log_level,
            "chat_template": chat_template,
            "allowed_hosts": tuple(allowed_host or ()),
            "limits": ConnectionLimits(max_connections=max_connections),
        },
        measures=measure,
    )
    raise typer.Exit(code)
