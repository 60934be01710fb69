"""`specc chat`: its options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specc.cli.app import Debug, EngineArgument


def chat(
    engine: EngineArgument,
    system: Annotated[
        str | None,
        typer.Option("--system", help="Message to the model that comes before the conversation."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", help="Most tokens of an answer; without it, what fits."),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option("--chat-template", help="Jinja file to use instead of the engine's own."),
    ] = None,
    plan: Annotated[
        str | None, typer.Option("--plan", help="A plan of the engine, e.g. off or chain-4.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", help="What chooses plans: adaptive, best, profile or fixed."),
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", help="0 is greedy, the most likely token.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Draw from the likeliest tokens with this share.")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option("--top-k", help="Draw from the k likeliest tokens; 0 is all.")
    ] = 0,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Draw the same tokens again for the same input.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads that torch uses.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            help="Run with another backend: eager takes the graphs of any engine.",
        ),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print acceptance and times when the chat ends.")
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
    from specc.cli.run import Loading

    run_chat(
        engine,
        Loading(plan=plan, policy=policy, threads=threads, backend=backend),
        {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed},
        system=system,
        max_tokens=max_tokens,
        template=chat_template,
        stats=stats,
    )
