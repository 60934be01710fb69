"""`specc triton`: its options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specc.cli.app import Debug, EngineArgument, Json


def triton(
    engine: EngineArgument,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            help="The model repository to write into; it is made if absent.",
            show_default=False,
        ),
    ],
    name: Annotated[str, typer.Option("--name", help="Name of the model.")] = "specc",
    layout: Annotated[
        str,
        typer.Option(
            "--layout",
            help="model: a model.py beside the engine; backend: the backend specc serves all"
            " models, each a config.pbtxt and an engine.",
        ),
    ] = "model",
    backends: Annotated[
        Path | None,
        typer.Option(
            "--backends",
            help="Directory of the backends, for --layout backend; default OUTPUT/../backends.",
        ),
    ] = None,
    copy: Annotated[
        bool, typer.Option("--copy", help="Copy the engine, which is the default.")
    ] = False,
    link: Annotated[
        bool, typer.Option("--link", help="Link the engine's files instead of copying.")
    ] = False,
    reference: Annotated[
        bool, typer.Option("--reference", help="Only write down where the engine is.")
    ] = False,
    instances: Annotated[
        int, typer.Option("--instances", help="How many times to load the engine.")
    ] = 1,
    kind: Annotated[
        str,
        typer.Option(
            "--kind", help="Kind of the instances, in Triton's words: auto, cpu, gpu or model."
        ),
    ] = "auto",
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", help='Devices of each instance: "0,1;2,3" is two of two devices.'),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", help="How many requests run together.", min=1)
    ] = None,
    max_waiting: Annotated[
        int | None,
        typer.Option("--max-waiting", help="How many requests may wait; more are refused.", min=1),
    ] = None,
    plan: Annotated[
        str | None, typer.Option("--plan", help="The plan that all requests use.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", help="What chooses plans; the default is the engine's own."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option("--backend", help="eager runs any engine; the default is the engine's own."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads of torch in each instance.", min=1)
    ] = None,
    on_fault: Annotated[
        str | None,
        typer.Option(
            "--on-fault",
            help="What to do once the engine has failed: refuse requests, or stop the server.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a model of this name, and the backend.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a model for the Triton Inference Server: config.pbtxt, model.py and the engine.

    The server's Python needs specc and torch, and numpy below 2 up to Triton 2.52. Requests bring
    text and get text, streamed or not; tensors are named as NVIDIA's OpenAI front end sends them.

    \b
    Examples:
      specc triton engine/ -o models
      specc triton engine/ -o models --name code --link --max-num-seqs 32
      specc triton engine/ -o models --layout backend --backends /opt/tritonserver/backends
      specc triton engine/ -o models --gpus "0;1"
      curl -d '{"text_input": "def f(", "max_tokens": 64}' localhost:8000/v2/models/specc/generate
    """  # noqa: D301
    from specc.cli.triton import engine_files, parameters_of, run_triton
    from specc.triton.repository import TritonConfig

    config = TritonConfig(
        name=name,
        layout=layout,
        files=engine_files(copy, link, reference),
        instances=instances,
        kind=kind,
        gpus=gpus,
        parameters=parameters_of(
            {
                "plan": plan,
                "policy": policy,
                "backend": backend,
                "max_num_seqs": max_num_seqs,
                "max_waiting": max_waiting,
                "num_threads": threads,
                "on_fault": on_fault,
            }
        ),
    )
    run_triton(engine, output, config, backends=backends, force=force, as_json=as_json)
