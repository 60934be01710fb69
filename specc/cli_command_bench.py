"""`specc bench`: its options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specc.cli_app import Debug


def bench(
    engine: Annotated[
        Path | None,
        typer.Argument(help="Engine directory; none with --synthetic.", show_default=False),
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(
            "--synthetic",
            metavar="TARGET[/DRAFT]",
            help="Shapes of published models with random weights, instead of an engine.",
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", help="Of --synthetic: tokens of a prompt; else 1024.")
    ] = None,
    tree: Annotated[
        list[str] | None, typer.Option("--tree", help="Of --synthetic: as specc compile takes it.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("--num-speculative-tokens", help="Of --synthetic: likewise.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Of --synthetic; else what suits the device.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help='File of JSON lines, each {"prompt": "…"}; else built-in.'),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", help="Only the first ones of the file.")
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", help="Output tokens of each prompt; EOS does not end it.")
    ] = 128,
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Prompts that are decoded together.")
    ] = 1,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads of torch; else as it is set.")
    ] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option("--plan", help="Instead of the engine's default plan; repeatable."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", help="transformers: its plain and assisted generation, too."),
    ] = None,
    target_checkpoint: Annotated[
        str | None,
        typer.Option("--target-checkpoint", help="For transformers; else what was compiled."),
    ] = None,
    draft_checkpoint: Annotated[
        str | None,
        typer.Option("--draft-checkpoint", help="For transformers; else what was compiled."),
    ] = None,
    synthetic_acceptance: Annotated[
        str | None,
        typer.Option(
            "--synthetic-acceptance",
            metavar="P1,P2,…",
            help="Draw acceptance by sibling rank: what a step costs, apart from the draft.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Counted rounds.")] = 5,
    warmup: Annotated[int, typer.Option("--warmup", help="Rounds before them.")] = 1,
    json_output: Annotated[
        str | None,
        typer.Option("--json", metavar="OUT", help="Write the report; - is standard output."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="OUT.svg", help="Draw tokens/s.")
    ] = None,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="Compare all files with their hashes, or none; else all but the weights.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Measure an engine, or shapes with random weights: plans, plain decoding, transformers.

    The plan off always runs, too. Rounds are interleaved; figures are medians with their spread,
    and every output is compared with that of plain decoding.

    \b
    Examples:
      specc bench engine/
      specc bench engine/ --prompts prompts.jsonl --threads 4 --json out.json --plot out.svg
      specc bench engine/ --against transformers --rounds 7
      specc bench engine/ --plan chain-4 --plan tree-3-2-1 --batch-size 8
      specc bench engine/ --synthetic-acceptance 0.7,0.1,0.05
      specc bench --synthetic llama-3.1-8b/llama-3.2-1b --synthetic-acceptance .8
    """  # noqa: D301
    from specc.cli_bench import BenchOptions, choose_subject
    from specc.cli_bench_shapes import ShapesOptions

    options = BenchOptions(
        plans=tuple(plan or ()),
        against=against,
        target_checkpoint=target_checkpoint,
        draft_checkpoint=draft_checkpoint,
        prompts=prompts,
        num_prompts=num_prompts,
        tokens=tokens,
        batch_size=batch_size,
        threads=threads,
        rounds=rounds,
        warmup=warmup,
        synthetic_acceptance=synthetic_acceptance,
        json=json_output,
        plot=plot,
        verify=verify,
    )
    shapes = ShapesOptions(synthetic, context, tuple(tree or ()), num_speculative_tokens, dtype)
    choose_subject(engine, shapes, options)
