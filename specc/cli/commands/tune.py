"""`specc tune`: its options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specc.cli.app import Debug, EngineArgument, Json


def tune(
    engine: EngineArgument,
    prompts: Annotated[
        Path,
        typer.Option(
            "--prompts",
            help='File of JSON lines, each {"prompt": "…"} or {"prompt_token_ids": […]}: prompts'
            " like those that the engine will serve.",
            show_default=False,
        ),
    ],
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", help="Use only the first N prompts of the file.")
    ] = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(
            "--batch-size",
            help="Sequences that run together; repeatable. Without it: 1, 2, 4 and 8.",
        ),
    ] = None,
    max_nodes: Annotated[
        int, typer.Option("--max-nodes", help="Most nodes of a tree, its root included.")
    ] = 32,
    max_depth: Annotated[int, typer.Option("--max-depth", help="Most levels of a tree.")] = 8,
    tokens: Annotated[
        int, typer.Option("--tokens", help="Output tokens to generate for each prompt.")
    ] = 64,
    temperature: Annotated[
        float,
        typer.Option("--temperature", help="Temperature that requests will have; 0 is greedy."),
    ] = 0.0,
    rounds: Annotated[
        int, typer.Option("--rounds", help="Rounds of whole runs that are measured.")
    ] = 3,
    prune: Annotated[
        bool,
        typer.Option("--prune", help="Remove the engine's plans that no batch size has chosen."),
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option("--threads", help="Threads that torch uses; without it, as torch decides."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure acceptance and latency, and give the engine the plans that are fastest here.

    The optimal tree by measured acceptance and pass times, the best chain, a dynamic tree and the
    plans that the engine has are run as whole steps beside plain decoding. The fastest one for
    each batch size is what the engine then uses by itself; where none beats plain decoding, that
    is off. Its other plans stay in it, for --plan, unless --prune is given. What was measured is
    written to the engine's profile.json.

    \b
    Examples:
      specc tune engine/ --prompts prompts.jsonl
      specc tune engine/ --prompts prompts.jsonl --batch-size 1 --batch-size 8 --max-nodes 64
      specc tune engine/ --prompts prompts.jsonl --temperature 0.8
    """  # noqa: D301
    from specc.cli.tune import run_tune
    from specc.tune.run import TuneOptions

    options = TuneOptions(
        batch_sizes=tuple(batch_size or ()),
        max_nodes=max_nodes,
        max_depth=max_depth,
        max_tokens=tokens,
        temperature=temperature,
        rounds=rounds,
        prunes=prune,
    )
    run_tune(engine, prompts, options, num_prompts=num_prompts, threads=threads, as_json=as_json)
