"""`specc run`: its options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specc.cli.app import Debug, EngineArgument, Json


def run(
    engine: EngineArgument,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Text to continue; else --file, --prompts or standard input.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="UTF-8 file: all of it is one prompt.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help='File of JSON lines, a batch: each {"prompt": "…"} or {"prompt_token_ids": […]},'
            " and options of that prompt, such as max_tokens.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Output tokens at most, for each prompt.")
    ] = 128,
    plan: Annotated[
        str | None, typer.Option("--plan", help="A plan of the engine, e.g. off or chain-4.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            help="What chooses plans: adaptive (learns how long a chain pays), best, profile,"
            " fixed; without it, as compiled or tuned.",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", help="0 is greedy, the most likely token.")
    ] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p", help="Draw from the likeliest tokens that hold this share; else from all."
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", help="Draw from the k likeliest tokens; 0, or none, is all."),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p",
            help="Draw from tokens that are at least this share as likely as the likeliest one.",
        ),
    ] = None,
    repetition_penalty: Annotated[
        float,
        typer.Option(
            "--repetition-penalty",
            help="Divide logits of tokens that came before, in prompt or output; 1 is none.",
        ),
    ] = 1.0,
    presence_penalty: Annotated[
        float,
        typer.Option(
            "--presence-penalty", help="Lower logits of tokens that are in the output; 0 is none."
        ),
    ] = 0.0,
    frequency_penalty: Annotated[
        float,
        typer.Option(
            "--frequency-penalty",
            help="Lower logits of tokens by this, as often as they are in the output; 0 is none.",
        ),
    ] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Draw the same tokens again, with any draft and plan."),
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option("--rule", help="How trees are drawn: coupled, delta, mss, swor; lossless."),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            help="Log probabilities of the output's tokens and of the N likeliest; with --json.",
        ),
    ] = None,
    n: Annotated[
        int, typer.Option("--n", help="Outputs of each prompt; the seed of each is one higher.")
    ] = 1,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Text that ends the output; repeatable.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence tokens.")
    ] = False,
    min_tokens: Annotated[
        int, typer.Option("--min-tokens", help="Output tokens before anything may end it.")
    ] = 0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            "--logit-bias",
            metavar="ID=BIAS",
            help="Add a number from -100 to 100 to the logit of a token id; repeatable.",
        ),
    ] = None,
    bad_words: Annotated[
        list[str] | None,
        typer.Option("--bad-word", help="Text that the output must not hold; repeatable."),
    ] = None,
    allowed_token_ids: Annotated[
        list[int] | None,
        typer.Option(
            "--allowed-token-id", help="Draw from the token ids given so alone; repeatable."
        ),
    ] = None,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="Compare all files with their hashes, or none; else all but the weights.",
        ),
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
    stats: Annotated[
        bool, typer.Option("--stats", help="Print acceptance and times to standard error.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Generate text with an engine, token by token as it comes.

    Greedy decoding, unless there is a temperature: the output is the target model's own, or
    follows its distribution. A line break follows the text; --json gives it exactly.

    \b
    Examples:
      specc run engine/ "def fibonacci(n):" --max-tokens 64 --stats
      specc run engine/ --file prompt.txt --stop "class " --stop "def "
      specc run engine/ "Once" --temperature 0.8 --top-p 0.95 --seed 7
      cat prompt.txt | specc run engine/ --plan off
      specc run engine/ --prompts prompts.jsonl --json > outputs.json
    """  # noqa: D301
    from specc.cli.run import Loading, Request, run_request
    from specc.sampling.logit_controls import parse_bias

    request = Request(
        prompt=prompt,
        file=file,
        prompts=prompts,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        sampling={
            "temperature": temperature,
            **_given(top_p=top_p, top_k=top_k, min_p=min_p),
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "seed": seed,
            "rule": rule,
            "logprobs": logprobs,
            "n": n,
            "min_tokens": min_tokens,
            "logit_bias": parse_bias(logit_bias) if logit_bias else None,
            "bad_words": bad_words or None,
            "allowed_token_ids": allowed_token_ids or None,
        },
    )
    loading = Loading(plan=plan, policy=policy, verify=verify, threads=threads, backend=backend)
    run_request(engine, request, loading, stats=stats, as_json=as_json)


def _given(**options: float | None) -> dict[str, float]:
    """Those that the command line has; the others are as `SamplingParams` says."""
    return {name: value for name, value in options.items() if value is not None}
