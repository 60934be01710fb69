"""`specc bench` and `specc bench serve`: their options and help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from specc.cli.app import Debug
from specc.cli.options.bench import BenchOptions, ShapesOptions
from specc.cli.options.load import LoadOptions
from specc.cli.options.with_options import Fields
from specc.errors import ConfigError
from specc.runtime.engine_args import EngineArgs


def bench(
    shapes: ShapesOptions,
    options: Annotated[
        BenchOptions,
        Fields(
            plot={"help": "Draw tokens/s."},
            num_prompts={
                "help": "Use only the first N prompts of the file; of a data set, the first N"
                " questions of each category."
            },
        ),
    ],
    args: Annotated[
        EngineArgs,
        Fields(
            "num_threads",
            "verify",
            "check_weights",
            "offload_weights",
            "mmap",
            "rank_timeout_s",
            "oversubscribes",
            "overlaps",
        ),
    ],
    engine: Annotated[
        Path | None,
        typer.Argument(help="Engine directory; none with --synthetic.", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """Measure an engine, or shapes with random weights: plans, plain decoding, other programs.

    The plan off always runs, too. Rounds are interleaved; figures are medians with their spread,
    and every output is compared with that of plain decoding.

    \b
    Examples:
      specc bench engine/
      specc bench engine/ --prompts prompts.jsonl --threads 4 --json out.json --plot out.svg
      specc bench engine/ --against transformers --against llama.cpp --rounds 7
      specc bench engine/ --plan chain-4 --plan tree-3-2-1 --batch-size 8
      specc bench engine/ --dataset question.jsonl --num-prompts 10 --tokens 512 --rounds 1
      specc bench engine/ --edits module.py --rounds 3 --against transformers
      specc bench engine/ --synthetic-acceptance 0.7,0.1,0.05
      specc bench --synthetic llama-3.1-8b/llama-3.2-1b --synthetic-acceptance .8
      specc bench --synthetic llama-3.1-8b/llama-3.2-1b --quantize int4 --quantize-group 64
      specc bench --synthetic llama-3.1-8b/llama-3.2-1b --tree 3,2,1 --estimate
      specc bench --synthetic qwen3-30b-a3b/qwen3-0.6b --synthetic-acceptance .8
      specc bench --synthetic llama-3.2-1b --draft self:window=512 --context 8192
      specc bench --synthetic llama-3.1-8b --draft eagle3 --tree 1,1,1,1 --tree 3,2,1
    """  # noqa: D301
    from specc.cli.commands.bench import choose_subject

    choose_subject(engine, shapes, replace(options, args=args))


def bench_serve(
    options: Annotated[
        LoadOptions, Fields(without=("num_prompts",), plot={"help": "Draw latency over rate."})
    ],
    args: Annotated[
        EngineArgs,
        Fields(
            "adapts_verification",
            "max_num_seqs",
            "num_threads",
            "backend",
            "verify",
            "check_weights",
            "offload_weights",
            "mmap",
            "rank_timeout_s",
            "oversubscribes",
            "overlaps",
        ),
    ],
    engine: Annotated[
        Path | None,
        typer.Argument(
            help="Engine directory; with --base-url and --simulate it may be left out.",
            show_default=False,
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Serve loads of requests: throughput, goodput, latencies and acceptance.

    Requests come at random times, whether or not earlier ones have ended. Several rates and
    policies make a sweep: at each rate all policies serve the same requests in turn. The engine
    runs in this process; --base-url sends the requests to a server, --simulate to a simulation.

    \b
    Examples:
      specc bench serve engine/ --request-rate 4 --num-requests 200
      specc bench serve engine/ --request-rate 1,2,4,8 --policies off,chain-4,goodput
        --rounds 3 --json out.json --plot out.svg
      specc bench serve engine/ --request-rate 8 --burstiness 0.3 --goodput "ttft:200 tpot:50"
      specc bench serve --base-url http://localhost:8000 --request-rate 4 --output-tokens 64
      specc bench serve engine/ --request-rate 2 --measure-table t.json --trace trace.jsonl
      specc bench serve --simulate t.json --acceptance 0.73,0.1/0.8 --prompt-tokens 100
        --request-rate 1,2,4,8 --policies off,chain-2,chain-4,goodput
    """  # noqa: D301
    from specc.cli.bench.serve import run_bench_serve

    run_bench_serve(engine, replace(options, args=args))


def choose_subject(directory: Path | None, shapes: ShapesOptions, options: BenchOptions) -> None:
    """Measure the engine or the shapes, whichever is there.

    Raises:
        ConfigError: both, neither, or options of the other.
        SpeccError: see `run_bench`, `run_dataset_bench`, `run_shapes_bench`, `run_estimate`.
    """
    if shapes.synthetic is None and directory is None:
        raise ConfigError(
            "no engine to measure",
            "an engine directory, or shapes to draw random weights for",
            "specc bench ENGINE, or specc bench --synthetic llama-3.1-8b/llama-3.2-1b",
        )
    if shapes.synthetic is None:
        _refuse_options(shapes.named(), "an engine", "--synthetic", "leave it out")
        assert directory is not None
        if options.dataset is not None:
            from specc.cli.bench.dataset import run_dataset_bench

            run_dataset_bench(directory, options.dataset, options)
            return
        if options.edits is not None:
            from specc.cli.bench.edits import run_edits_bench

            run_edits_bench(directory, options.edits, options)
            return
        from specc.cli.bench.engine import run_bench

        run_bench(directory, options)
        return
    if directory is not None:
        raise ConfigError(
            f"both {directory} and --synthetic {shapes.synthetic}",
            "one of them",
            "leave out the engine, or --synthetic",
        )
    do = "leave it out; shapes take --tree or --num-speculative-tokens, --context and --tokens"
    _refuse_options(options.named(), "--synthetic", "an engine", do)
    if shapes.estimate:
        from specc.cli.bench.estimate import run_estimate

        run_estimate(shapes, options)
        return
    from specc.cli.bench.synthetic import run_shapes_bench

    run_shapes_bench(shapes, options)


def _refuse_options(given: Mapping[str, object], subject: str, other: str, do: str) -> None:
    for name, value in given.items():
        if value not in (None, ()):
            raise ConfigError(f"{name} with {subject}", f"{name} with {other} only", do)
