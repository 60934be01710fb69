"""`specc draft-weights`: its options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specc.cli.app import Debug


def draft_weights(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="The draft's checkpoint, as --draft of specc compile has it; of an MTP module that"
            " of its target.",
            show_default=False,
        ),
    ],
    engine: Annotated[
        Path, typer.Option("--engine", help="The engine that runs.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write.", show_default=False)
    ],
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            help="Which draft model of the engine, draft_0 or another, where it has several.",
            show_default=False,
            metavar="NAME",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            help="The target's checkpoint, which a draft that reads hidden states is compared"
            " with; by default where the engine was compiled from.",
            show_default=False,
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a checkpoint's weights as an engine holds its draft's, to load them while it runs.

    The file is for this engine alone: the checkpoint has to be the model that it was compiled with,
    with other weights. A server takes it with POST /v1/drafts/reload, Python with
    LLM.reload_draft.

    \b
    Examples:
      specc draft-weights draft-new/ --engine engine/ -o new.safetensors
      specc draft-weights head-new/ --engine engine/ --draft draft_1 -o new.safetensors
    """  # noqa: D301
    from specc.cli.progress import make_listener
    from specc.compiler.draft_weights import write_draft_weights
    from specc.progress import PhaseTimer
    from specc.system.files import format_bytes

    with make_listener() as listen:
        phases = PhaseTimer(listen)
        with phases.phase("write draft weights") as advance:
            form = write_draft_weights(checkpoint, engine, output, draft, target, advance)
    typer.echo(
        f"{output}: {len(form.tensors)} tensors of {form.name},"
        f" {format_bytes(output.stat().st_size)}, for engines of {form.identity[:12]}"
    )
