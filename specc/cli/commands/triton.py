"""`specc triton`: an engine in, a model of the Triton Inference Server out."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Annotated

from specc.cli.app import Debug, EngineArgument, Json
from specc.cli.options.triton import RepositoryOptions
from specc.cli.options.with_options import Fields
from specc.errors import ConfigError
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
    parameters = _parameters_of(args, repository.on_fault)
    config = dataclasses.replace(config, files=repository.files, parameters=parameters)
    _write(engine, repository, config, as_json=as_json)


def _write(
    engine: Path, repository: RepositoryOptions, config: TritonConfig, *, as_json: bool
) -> None:
    """Write the model, and its backend where it needs one; say how to start a server.

    Raises:
        SpeccError: of the engine, of the output, of an option.
    """
    from specc.triton.repository import start_command, write_backend, write_model

    backends = repository.backends
    if config.layout == "model" and backends is not None:
        raise ConfigError(
            f"--backends {backends} with --layout model",
            "--layout backend",
            "pass it, or leave --backends out",
        )
    model = write_model(engine, repository.output, config, repository.force)
    backend = None
    if config.layout == "backend":
        backends = backends or repository.output.parent / "backends"
        backend = write_backend(backends, repository.force)
    command = shlex.join(start_command(repository.output, backends))
    if as_json:
        written = {"model": str(model), "backend": backend and str(backend), "start": command}
        print(json.dumps(written, indent=1))
        return
    print(f"model    {model}")
    if backend is not None:
        print(f"backend  {backend}; --backend-directory must hold the backend python, too")
    print(f"start    {command}")
    print(
        f'ask      curl -d \'{{"text_input": "…", "max_tokens": 64}}\''
        f" 127.0.0.1:8000/v2/models/{config.name}/generate"
    )


def _parameters_of(args: AsyncEngineArgs, on_fault: str | None) -> dict[str, str]:
    """What config.pbtxt has to say: all that is not as it is without it."""
    given = {
        field.name: str(value).lower() if isinstance(value, bool) else str(value)
        for field in dataclasses.fields(args)
        if (value := getattr(args, field.name)) != field.default
    }
    return given if on_fault is None else given | {"on_fault": on_fault}
