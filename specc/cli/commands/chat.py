"""`specc chat`: its options and help."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from specc.cli.app import Debug, EngineArgument
from specc.cli.options.sampling import SamplingOptions
from specc.cli.options.with_options import Fields
from specc.runtime.engine_args import EngineArgs


def chat(
    engine: EngineArgument,
    args: Annotated[
        EngineArgs,
        Fields(
            "plan",
            "policy",
            "check_weights",
            "num_threads",
            "backend",
            "offload_weights",
            "mmap",
            "rank_timeout_s",
            "oversubscribes",
            "overlaps",
            "generation_config",
            "override_generation_config",
        ),
    ],
    sampling: Annotated[SamplingOptions, Fields("temperature", "top_p", "top_k", "seed")],
    system: Annotated[
        str | None,
        typer.Option("--system", help="Message to the model that comes before the conversation."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            help="Most tokens of an answer; else as the checkpoint says, or what fits.",
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option("--chat-template", help="Jinja file to use instead of the engine's own."),
    ] = None,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            help="Print acceptance, times, and what plain decoding would do, when the chat ends.",
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Talk with an engine: the whole conversation is its prompt, in the form of its chat template.

    On a terminal, type a message and read the answer as it comes; Ctrl-C stops an answer, Ctrl-D
    ends the chat. From a pipe, every line is a message. Where a conversation outgrows the context,
    its oldest turns are left out, and you are told.

    \b
    Examples:
      specc chat engine/
      specc chat engine/ --system "Answer in one sentence." --temperature 0.7
      printf 'Hello\\nWhat did I say?\\n' | specc chat engine/ --stats
    """  # noqa: D301
    from specc.cli.chat import run_chat

    run_chat(
        replace(args, engine=engine, max_num_seqs=1),
        sampling.given("temperature", "top_p", "top_k", "seed"),
        system=system,
        max_tokens=max_tokens,
        template=chat_template,
        stats=stats,
    )
