"""A model in a repository of the Triton Inference Server, and the backend that it may need."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from specc.artifact.directory import read_manifest
from specc.close_name import advice
from specc.errors import ConfigError, OutputError
from specc.system.files import check_free_space, fsync_path, output_error, remove_stale
from specc.triton.config import BACKEND, TritonConfig

MODEL_PY = '''"""specc in the Triton Inference Server; written by `specc triton`."""

import triton_python_backend_utils

from specc.runtime.triton.model import TritonModel


class TritonPythonModel(TritonModel):
    pb_utils = triton_python_backend_utils
'''


def write_model(engine: Path, repository: Path, config: TritonConfig, force: bool = False) -> Path:
    """Write a model into a repository, whole or not at all.

    Args:
        repository: directory of models; it is made where it does not exist.
        force: replace a model of this name.
    Returns:
        directory of the model.
    Raises:
        EngineError: that is no engine.
        ConfigError: the engine has no such plan.
        OutputError: the model exists, or cannot be written.
    """
    manifest = read_manifest(engine)
    plan = config.parameters.get("plan")
    if plan is not None and plan not in (names := [plan.name for plan in manifest.plans]):
        raise ConfigError(
            f"--plan {plan}",
            f"one of {', '.join(names)}",
            advice(plan, names, "choose one of them"),
        )
    target = Path(os.path.abspath(repository)) / config.name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_replaceable(target, "config.pbtxt", force)
        remove_stale(target)
        if config.files == "copy":
            size = sum(entry.bytes for entry in manifest.files.values())
            check_free_space(target, size + (1 << 20))
        staging = _staging(target)
        try:
            _fill_model(staging, engine, config)
            _publish(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise output_error(target, error) from error
    return target


def write_backend(backends: Path, force: bool = False) -> Path:
    """Write the backend `specc`, unless it is there as it would be written.

    Args:
        backends: the directory that `--backend-directory` names; it must hold the backend `python`.
        force: replace another one of this name.
    Returns:
        directory of the backend.
    Raises:
        OutputError: another one is there, or it cannot be written.
    """
    target = Path(os.path.abspath(backends)) / BACKEND
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir() and _files(target) == {"model.py": MODEL_PY.encode()}:
            return target
        _check_replaceable(target, "model.py", force)
        remove_stale(target)
        staging = _staging(target)
        try:
            _write(staging / "model.py", MODEL_PY)
            _publish(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise output_error(target, error) from error
    return target


def _fill_model(staging: Path, engine: Path, config: TritonConfig) -> None:
    version = staging / "1"
    version.mkdir()
    place = "engine"
    if config.files == "reference":
        place = os.path.abspath(engine)
    else:
        _bring(engine, version / place, config.files == "link")
    if config.layout == "model":
        _write(version / "model.py", MODEL_PY)
    _write(staging / "config.pbtxt", config.to_pbtxt(place))


def _bring(engine: Path, target: Path, is_linked: bool) -> None:
    try:
        shutil.copytree(engine, target, copy_function=os.link if is_linked else shutil.copy2)
    except (OSError, shutil.Error) as error:
        if not is_linked:
            if isinstance(error, shutil.Error):  # an OSError without a number: the first cause
                raise OSError(None, str(error.args[0][0][2])) from error
            raise
        raise OutputError(
            f"{engine} cannot be linked into {target.parent}",
            "both on one file system that has hard links",
            "pass --copy, or --reference",
        ) from error


def _check_replaceable(target: Path, mark: str, force: bool) -> None:
    """Nothing is there; or, with `force`, something that was written by this module."""
    if not target.exists() and not target.is_symlink():
        return
    if not force:
        raise OutputError(
            f"{target} exists", "a name that is free", "choose another --name, or pass --force"
        )
    if target.is_symlink() or not (target / mark).is_file():
        raise OutputError(
            f"{target} holds no {mark}", f"a directory with {mark}, to replace it", "remove it"
        )


def _staging(target: Path) -> Path:
    staging = target.parent / f".{target.name}.partial-{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    return staging


def _publish(staging: Path, target: Path) -> None:
    for directory, _, names in os.walk(staging):
        for name in (*names, "."):
            fsync_path(Path(directory) / name)
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    if target.exists():
        target.rename(old)
    try:
        staging.rename(target)
    except BaseException:
        if old.exists():
            old.rename(target)
        raise
    fsync_path(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def start_command(repository: Path, backends: Path | None) -> Sequence[str]:
    """How a server is started with what was written, on this machine alone."""
    command = ["tritonserver", f"--model-repository={os.path.abspath(repository)}"]
    if backends is not None:
        command.append(f"--backend-directory={os.path.abspath(backends)}")
    command += [f"--{service}-address=127.0.0.1" for service in ("http", "grpc", "metrics")]
    return command
