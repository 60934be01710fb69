"""`specc tune`: its options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specc.cli_app import Debug, EngineArgument, Json


def tune(
    engine: EngineArgument,
    prompts: Annotated[
        Path,
        typer.Option(
            "--prompts",
            help='File of JSON lines, each {"prompt": "…"}: prompts like those to be served.',
            show_default=False,
        ),
    ],
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", help="Only the first ones of the file.")
    ] = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option("--batch-size", help="Sequences that run together; repeatable. Else 1 … 8."),
    ] = None,
    max_nodes: Annotated[int, typer.Option("--max-nodes", help="Of a tree, root included.")] = 32,
    max_depth: Annotated[int, typer.Option("--max-depth", help="Levels of a tree.")] = 8,
    tokens: Annotated[int, typer.Option("--tokens", help="Output tokens of each prompt.")] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Of the requests that will come; 0 is greedy.")
    ] = 0.0,
    rounds: Annotated[int, typer.Option("--rounds", help="Counted rounds of whole runs.")] = 3,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads of torch; else as it is set.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure acceptance and latency, and give the engine the plans that are fastest here.

    The optimal tree by measured acceptance and pass times, the best chain, a dynamic tree and the
    plans that the engine has are run as whole steps beside plain decoding. The fastest one for
    each batch size stays in the engine; where none beats plain decoding, that is off. What was
    measured is written to the engine's profile.json.

    \b
    Examples:
      specc tune engine/ --prompts prompts.jsonl
      specc tune engine/ --prompts prompts.jsonl --batch-size 1 --batch-size 8 --max-nodes 64
      specc tune engine/ --prompts prompts.jsonl --temperature 0.8
    """  # noqa: D301
    from specc.cli_tune import run_tune
    from specc.tune import TuneOptions

    options = TuneOptions(
        batch_sizes=tuple(batch_size or ()),
        max_nodes=max_nodes,
        max_depth=max_depth,
        max_tokens=tokens,
        temperature=temperature,
        rounds=rounds,
    )
    run_tune(engine, prompts, options, num_prompts=num_prompts, threads=threads, as_json=as_json)
