"""`specc bench`: its options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specc.cli.app import Debug


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
        int | None,
        typer.Option(
            "--context", help="With --synthetic: tokens of a prompt; 1024 unless it is given."
        ),
    ] = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            "--tree", help="With --synthetic: a tree, in the form that specc compile takes."
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option("--num-speculative-tokens", help="With --synthetic: a chain of this length."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="With --synthetic: dtype of the weights; without it, what suits the device.",
        ),
    ] = None,
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate",
            help="With --synthetic: nodes, bytes and estimated time of a step on an H200; needs no"
            " GPU and measures nothing.",
        ),
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help='File of JSON lines, each {"prompt": "…"} or {"prompt_token_ids": […]};'
            " without it, built-in prompts.",
        ),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", help="Use only the first N prompts of the file.")
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(
            "--tokens",
            help="Output tokens to generate for each prompt; EOS does not end an output.",
        ),
    ] = 128,
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Prompts that are decoded together.")
    ] = 1,
    threads: Annotated[
        int | None,
        typer.Option("--threads", help="Threads that torch uses; without it, as torch decides."),
    ] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option(
            "--plan", help="Measure this plan instead of the engine's default one; repeatable."
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            help="Also measure another program: transformers, its plain and assisted generation.",
        ),
    ] = None,
    target_checkpoint: Annotated[
        str | None,
        typer.Option(
            "--target-checkpoint",
            help="Checkpoint for transformers; without it, the one that was compiled.",
        ),
    ] = None,
    draft_checkpoint: Annotated[
        str | None,
        typer.Option(
            "--draft-checkpoint",
            help="Checkpoint for transformers; without it, the one that was compiled.",
        ),
    ] = None,
    synthetic_acceptance: Annotated[
        str | None,
        typer.Option(
            "--synthetic-acceptance",
            metavar="P1,P2,…",
            help="Draw acceptance by sibling rank: what a step costs, apart from the draft.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Rounds that are measured.")] = 5,
    warmup: Annotated[
        int, typer.Option("--warmup", help="Rounds that run before them and do not count.")
    ] = 1,
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
      specc bench --synthetic llama-3.1-8b/llama-3.2-1b --tree 3,2,1 --estimate
    """  # noqa: D301
    from specc.cli.bench.engine import BenchOptions, choose_subject
    from specc.cli.bench.synthetic import ShapesOptions

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
    shapes = ShapesOptions(
        synthetic, context, tuple(tree or ()), num_speculative_tokens, dtype, estimate
    )
    choose_subject(engine, shapes, options)


def bench_serve(
    engine: Annotated[
        Path | None,
        typer.Argument(
            help="Engine directory; with --base-url and --simulate it may be left out.",
            show_default=False,
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            "--base-url", metavar="URL", help="A server of OpenAI's completions, instead."
        ),
    ] = None,
    simulate: Annotated[
        Path | None,
        typer.Option(
            "--simulate",
            metavar="TABLE.json",
            help="Simulate a machine: the real scheduler on a latency table's seconds.",
        ),
    ] = None,
    request_rate: Annotated[
        str,
        typer.Option(
            "--request-rate", metavar="R1,R2,…", help="Requests a second; inf is all at once."
        ),
    ] = "inf",
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            metavar="P1,P2,…",
            help="Plans and policies, in turn at each rate; else what specc serve uses.",
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option("--rounds", help="Rounds of the whole sweep, interleaved.")
    ] = 1,
    num_requests: Annotated[
        int, typer.Option("--num-requests", help="Requests of each rate, policy and round.")
    ] = 100,
    max_seconds: Annotated[
        float | None, typer.Option("--max-seconds", help="Leave out requests that come later.")
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(
            "--burstiness", help="1: Poisson; less: in bursts; more: more even; inf: constant."
        ),
    ] = 1.0,
    on_off: Annotated[
        str | None,
        typer.Option(
            "--on-off", metavar="ON,OFF", help="Seconds with requests, then without, repeated."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help='File of JSON lines, each {"prompt": "…"} or {"prompt_token_ids": […]};'
            " without it, built-in prompts.",
        ),
    ] = None,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(
            "--prompt-tokens",
            metavar="LENGTHS",
            help="128, uniform:64-256 or lognormal:MEAN,SPREAD[,LEAST-MOST]; without it, prompts"
            " as they are.",
        ),
    ] = None,
    output_tokens: Annotated[
        str,
        typer.Option(
            "--output-tokens",
            metavar="LENGTHS",
            help="Output tokens of each request, in the same form; EOS does not end outputs.",
        ),
    ] = "128",
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of arrivals, lengths and sampling.")
    ] = 0,
    max_concurrency: Annotated[
        int | None, typer.Option("--max-concurrency", help="Most requests that are open at a time.")
    ] = None,
    warmup: Annotated[
        int, typer.Option("--warmup", help="Requests before each run that do not count.")
    ] = 4,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Seconds after which a request has failed.")
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            "--goodput",
            metavar="NAME:MS",
            help='Objectives, such as "ttft:200 tpot:50 e2el:2000": count the requests that keep'
            " all of them.",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    share_prefixes: Annotated[
        bool,
        typer.Option(
            "--share-prefixes", help="Reuse prompts' cache rows; prompts repeat, so it flatters."
        ),
    ] = False,
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", help="Requests that run together.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", help="Threads that torch uses; without it, as torch decides."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            help="Run with another backend: eager takes the graphs of any engine.",
        ),
    ] = None,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="Compare all files with their hashes, or none; else all but the weights.",
        ),
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(
            "--acceptance",
            metavar="ROWS",
            help="Of simulations: by depth and sibling rank, as in 0.73,0.1/0.75,0.1.",
        ),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option("--table", metavar="TABLE.json", help="Latency table that goodput knows."),
    ] = None,
    measure_table: Annotated[
        Path | None,
        typer.Option(
            "--measure-table", metavar="OUT.json", help="Measure it first (30 s), and keep it."
        ),
    ] = None,
    compare_simulation: Annotated[
        bool,
        typer.Option(
            "--compare-simulation", help="Simulate the same requests, too, on the latency table."
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="With --base-url: name of the model; without it, the first that the server lists.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            help="With --base-url: key of the server; better in the environment, as others see"
            " arguments.",
            envvar="OPENAI_API_KEY",
            show_envvar=True,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="OUT.jsonl", help="Goodput's decisions, a JSON line for each."
        ),
    ] = None,
    details: Annotated[
        Path | None,
        typer.Option("--details", metavar="OUT.jsonl", help="A JSON line for each request."),
    ] = None,
    json_output: Annotated[
        str | None,
        typer.Option("--json", metavar="OUT", help="Write the report; - is standard output."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="OUT.svg", help="Draw latency over rate.")
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
    from specc.cli.bench.serve_options import LoadOptions

    options = LoadOptions(
        base_url=base_url,
        simulate=simulate,
        request_rate=request_rate,
        policies=policies,
        rounds=rounds,
        num_requests=num_requests,
        max_seconds=max_seconds,
        burstiness=burstiness,
        on_off=on_off,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seed=seed,
        max_concurrency=max_concurrency,
        warmup=warmup,
        timeout=timeout,
        goodput=tuple(goodput or ()),
        temperature=temperature,
        share_prefixes=share_prefixes,
        max_num_seqs=max_num_seqs,
        threads=threads,
        backend=backend,
        verify=verify,
        acceptance=acceptance,
        table=table,
        measure_table=measure_table,
        compare_simulation=compare_simulation,
        model=model,
        api_key=api_key,
        trace=trace,
        details=details,
        json=json_output,
        plot=plot,
    )
    run_bench_serve(engine, options)
