"""`specc triton`: its options and help."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from specc.cli.app import Debug, EngineArgument, Json
from specc.cli.options.triton import RepositoryOptions
from specc.cli.options.with_options import Fields
from specc.runtime.engine_args import AsyncEngineArgs
from specc.triton.config import TritonConfig


def triton(
    engine: EngineArgument,
    repository: RepositoryOptions,
    config: TritonConfig,
    args: Annotated[
        AsyncEngineArgs,
        Fields(
            "max_num_seqs",
            "max_waiting",
            "plan",
            "policy",
            "backend",
            "num_threads",
            "mmap",
            "rank_timeout_s",
            "oversubscribes",
        ),
    ],
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
    from specc.cli.triton import parameters_of, run_triton

    parameters = parameters_of(args, repository.on_fault)
    config = replace(config, files=repository.files, parameters=parameters)
    run_triton(engine, repository, config, as_json=as_json)
