"""`specc reshard`: its options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specc.cli.app import Debug, EngineArgument


def reshard(
    engine: EngineArgument,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The engine directory to make.", show_default=False),
    ],
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            "--tensor-parallel-size",
            "-tp",
            help="How many ranks share the target of the new engine; 1 makes it whole again.",
            show_default=False,
        ),
    ],
    pipeline_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--pipeline-parallel-size",
            "-pp",
            help="How many stages the new engine has, with so many ranks each; without it, as many"
            " as the old one.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the engine at --output, if there is one.")
    ] = False,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe",
            help="Generate a few dozen tokens at the end and report how many are accepted.",
        ),
    ] = True,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="List what every pass did; specc inspect does, too."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Make an engine for another number of ranks out of an engine, without its checkpoint.

    Weights and graphs are those that specc compile would write for so many ranks, with the same
    options; drafts, plans and tokenizer stay. The engine is left as it is, and the files of all of
    its ranks have to be there. For the backends cpu and eager, and for cuda engines of several
    ranks or stages.

    \b
    Examples:
      specc reshard engine/ --tensor-parallel-size 4 -o engine-4/
      specc reshard engine-4/ -tp 2 -o engine-2/
      specc reshard engine-4/ -tp 1 -o engine/
      specc reshard engine-4/ -tp 1 -pp 2 -o stages/
    """  # noqa: D301
    from specc.cli.build_engine import run_reshard

    sizes = tensor_parallel_size, pipeline_parallel_size
    run_reshard(engine, output, *sizes, force=force, probe=probe, verbose=verbose)
