"""`specc compare`: its options and help."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from specc.cli.app import Debug, EngineArgument, Json
from specc.cli.options.with_options import Fields
from specc.runtime.engine_args import EngineArgs


def compare(
    engine: EngineArgument,
    texts: Annotated[
        Path,
        typer.Option(
            "--texts",
            help='UTF-8 file: one text; or .jsonl: a text a line, {"prompt": "…"} or'
            ' {"prompt_token_ids": […]}.',
            show_default=False,
        ),
    ],
    args: Annotated[
        EngineArgs,
        Fields("num_threads", "backend", "verify", "check_weights", "offload_weights", "mmap"),
    ],
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="ENGINE|CHECKPOINT",
            help="What to compare with: another engine, or a checkpoint in Hugging Face's format,"
            " which transformers runs in float32.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            min=2,
            help="How many tokens of a text are read at once. The default is 512, or as many as the"
            " engine is compiled for.",
            show_default=False,
        ),
    ] = None,
    num_windows: Annotated[
        int | None,
        typer.Option("--num-windows", min=1, help="Read only the first N such parts."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say how good an engine is at texts, and how far from another model: what --quantize costs.

    Prints the perplexity of the target, and with --against that of the other model, the KL
    divergence between their distributions (mean, and what 99 % of the tokens are below), how often
    they find different tokens most likely, and how many of their 10 most likely ones they share.

    \b
    Examples:
      specc compare int4/ --texts README.md
      specc compare int4/ --texts texts.jsonl --against float32/
      specc compare int4/ --texts texts.jsonl --against Qwen3-0.6B/ --num-windows 12 --json
    """  # noqa: D301
    from specc.cli.compare import run_compare

    run_compare(replace(args, engine=engine), texts, against, context, num_windows, as_json=as_json)
