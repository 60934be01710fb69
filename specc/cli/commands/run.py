"""`specc run`: its options and help."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from specc.cli.app import Debug, EngineArgument, Json
from specc.cli.options.common import PromptSource
from specc.cli.options.sampling import SamplingOptions
from specc.cli.options.with_options import Fields
from specc.runtime.engine_args import EngineArgs


def run(
    engine: EngineArgument,
    source: PromptSource,
    sampling: SamplingOptions,
    args: Annotated[
        EngineArgs,
        Fields(
            "plan",
            "policy",
            "adapts_verification",
            "confidence_threshold",
            "multi_step_ms",
            "verify",
            "check_weights",
            "num_threads",
            "backend",
            "offload_weights",
            "mmap",
            "rank_timeout_s",
            "oversubscribes",
            "overlaps",
            "micro_batches",
            "generation_config",
            "override_generation_config",
        ),
    ],
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Text to continue; else --file, --prompts or standard input.",
            show_default=False,
        ),
    ] = None,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            help="Print acceptance, times, and what plain decoding would do, to standard error.",
        ),
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Generate text with an engine, token by token as it comes.

    Tokens are drawn as specc serve draws them: options that are not given are as the checkpoint's
    generation_config.json says, else temperature is 1. --temperature 0 is greedy: the target
    model's own most likely text. A line break follows the text; --json gives it exactly.

    \b
    Examples:
      specc run engine/ "def fibonacci(n):" --temperature 0 --max-tokens 64 --stats
      specc run engine/ --file prompt.txt --stop "class " --stop "def "
      specc run engine/ "Once" --temperature 0.8 --top-p 0.95 --seed 7
      cat prompt.txt | specc run engine/ --plan off
      specc run engine/ --prompts prompts.jsonl --json > outputs.json
      specc run engine/ --file edit.txt --prediction module.py --temperature 0 --stats
    """  # noqa: D301
    from specc.cli.run import run_request

    source, args = replace(source, prompt=prompt), replace(args, engine=engine)
    run_request(args, source, sampling, stats=stats, as_json=as_json)
