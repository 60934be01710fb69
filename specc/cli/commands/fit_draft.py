"""`specc fit-draft`: its options and help."""

from __future__ import annotations

from typing import Annotated

import typer

from specc.cli.app import Debug, Json
from specc.fit.options import FitOptions


def fit_draft(
    target: Annotated[
        str,
        typer.Argument(
            help="The target: a directory, a GGUF file, or a hub id once it is downloaded.",
            show_default=False,
        ),
    ],
    options: FitOptions,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a draft for a target that has none, from texts like those that it will write.

    The target's hidden states along the texts are kept on disk meanwhile; where texts are few, the
    target also writes continuations of them. What comes out has a published layout: specc compile,
    vLLM and SGLang read it. A run that was ended goes on with --resume.

    \b
    Examples:
      specc fit-draft T/ --kind eagle3 --texts docs/ -o head/
      specc fit-draft T/ --kind eagle3 --texts chats.jsonl --minutes 120 --device cuda -o head/
      specc fit-draft model.gguf --kind eagle3 --texts docs/ --prompts prompts.jsonl -o head/
      specc fit-draft T/ --kind dflash2 --texts docs/ --num-speculative-tokens 7 -o drafter/
      specc fit-draft T/ --kind eagle3 --texts docs/ -o head/ --resume
    """  # noqa: D301
    from specc.cli.fit_draft import run_fit

    run_fit(target, options, as_json=as_json)
