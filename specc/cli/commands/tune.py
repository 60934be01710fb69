"""`specc tune`: its options and help."""

from __future__ import annotations

from dataclasses import MISSING, replace
from typing import Annotated

from specc.cli.app import Debug, EngineArgument, Json
from specc.cli.options.common import PromptFile
from specc.cli.options.with_options import Fields
from specc.runtime.engine_args import EngineArgs
from specc.tune.options import TuneOptions


def tune(
    engine: EngineArgument,
    file: Annotated[
        PromptFile,
        Fields(
            prompts={
                "default": MISSING,
                "help": 'File of JSON lines, each {"prompt": "…"} or {"prompt_token_ids": […]}:'
                " prompts like those that the engine will serve.",
                "shows_default": False,
            }
        ),
    ],
    options: TuneOptions,
    args: Annotated[EngineArgs, Fields("num_threads", "offload_weights")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure acceptance and latency, and give the engine the plans that are fastest here.

    The optimal tree by measured acceptance and pass times, the best chain, a dynamic tree and the
    plans that the engine has are run as whole steps beside plain decoding. The fastest one for
    each batch size is what the engine then uses by itself; where none beats plain decoding, that
    is off. Its other plans stay in it, for --plan, unless --prune is given. What was measured is
    written to the engine's profile.json. With --skip auto it searches for layers to leave out
    instead, and changes nothing.

    \b
    Examples:
      specc tune engine/ --prompts prompts.jsonl
      specc tune engine/ --prompts prompts.jsonl --batch-size 1 --batch-size 8 --max-nodes 64
      specc tune engine/ --prompts prompts.jsonl --temperature 0.8
      specc tune engine/ --prompts prompts.jsonl --offload-weights 4GB
      specc tune engine/ --prompts prompts.jsonl --skip auto
    """  # noqa: D301
    from specc.cli.tune import run_tune

    run_tune(replace(args, engine=engine), file, options, as_json=as_json)
