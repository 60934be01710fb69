"""`specc compile`: its options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specc.cli.app import Debug
from specc.cli.options.drafts import DraftOptions
from specc.config import CompileConfig
from specc.system.garbage import rare_collections


def compile_(
    target: Annotated[
        str,
        typer.Option(
            "--target",
            help="Directory of the target model, or its hub id once it is downloaded.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The engine directory to make.", show_default=False),
    ],
    drafts: DraftOptions,
    config: CompileConfig,
    dump_graphs: Annotated[
        Path | None,
        typer.Option(
            "--dump-graphs",
            help="Write the graph of each model after each phase into this directory.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the engine at --output, if there is one.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="List what every pass did; specc inspect does, too."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Compile a target and a draft into an engine directory.

    \b
    Examples:
      specc compile --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B -o engine/
      specc compile --target T/ --draft D/ --num-speculative-tokens 4 -o engine/
      specc compile --target T/ --draft D/ --tree 3,2,1 --tree 2,2,1,1 -o engine/
      specc compile --target T/ --draft D/ --dtype bfloat16 --max-seq-len 2048 -o engine/
      specc compile --target T/ --draft D/ --quantize int8 -o engine/
      specc compile --target T/ --dtype bfloat16 --quantize int4 --quantize-group 32 -o engine/
      specc compile --target T/ --max-seq-len 131072 --rope-length 131072 -o engine/
      specc compile --target T/ --draft D/ --dtype float32 --draft-dtype bfloat16 -o engine/
      specc compile --target T/ --draft D/ --max-seq-len 8192 --draft-kv window=512 -o engine/
      specc compile --target T/ --draft D1/ --draft D2/ --combine merge --tree 2,1,1 -o engine/
      specc compile --target T/ --draft self:window=512 --kv-cache-dtype int8 -o engine/
      specc compile --target T/ --draft mtp --draft-assume is_last_normed=false -o engine/
      specc compile --target T/ --draft D/ --draft suffix --combine best -o engine/
      specc compile --target T/ --draft lookup:3 -o engine/
      specc compile --target T/ --draft self:window=512 --num-speculative-tokens 3 -o engine/
      specc compile --target T/ --draft self:skip=20-25 --num-speculative-tokens 2 -o engine/
      specc compile --target T/ --draft D/ -tp 2 -pp 2 -o stages/
      specc compile --target T/ --draft D/ --backend onnx -o engine/
      specc compile --target T/ --draft D/ --backend tensorrt --dtype float16 \
        --compute-capability 8.9 -o engine/
      specc compile --target T/ -o engine/ \
        --speculative-config '{"model": "D/", "num_speculative_tokens": 4}'
      specc compile --target T/ -o plain-engine/
    """  # noqa: D301
    with rare_collections():  # imports make objects that stay, too
        from specc.cli.build_engine import run_compile

        run_compile(
            target, drafts, output, config, dump_graphs=dump_graphs, force=force, verbose=verbose
        )
