"""`specc triton`: an engine in, a model of the Triton Inference Server out."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

from specc.errors import ConfigError
from specc.triton.repository import TritonConfig, start_command, write_backend, write_model


def run_triton(
    engine: Path,
    repository: Path,
    config: TritonConfig,
    *,
    backends: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the model, and its backend where it needs one; say how to start a server.

    Raises:
        SpeccError: of the engine, of the output, of an option.
    """
    if config.layout == "model" and backends is not None:
        raise ConfigError(
            f"--backends {backends} with --layout model",
            "--layout backend",
            "pass it, or leave --backends out",
        )
    model = write_model(engine, repository, config, force)
    backend = None
    if config.layout == "backend":
        backends = backends or repository.parent / "backends"
        backend = write_backend(backends, force)
    command = shlex.join(start_command(repository, backends))
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


def engine_files(copy: bool, link: bool, reference: bool) -> str:
    """Which of the three options was passed; `copy` without any.

    Raises:
        ConfigError: several.
    """
    given = [
        name
        for name, is_given in (("copy", copy), ("link", link), ("reference", reference))
        if is_given
    ]
    if len(given) > 1:
        raise ConfigError(
            " and ".join(f"--{name}" for name in given), "one of the three", "pass one"
        )
    return given[0] if given else "copy"


def parameters_of(options: Mapping[str, object]) -> dict[str, str]:
    """Those that were given, as config.pbtxt has them."""
    return {name: str(value) for name, value in options.items() if value is not None}
