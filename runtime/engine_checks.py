"""Whether an engine is the one that options ask for; see `EngineArgs`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from specc.runtime.engine import Engine

# other names of types, as vLLM and PyTorch have them
_DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32"}
_DTYPES |= {"fp32": "float32"}


def engine_directory(found: Any) -> Path:
    """The directory of an engine that is not loaded yet.

    Raises:
        ConfigError: it is no path.
        EngineError: it is a checkpoint, or the name of one.
    """
    if not isinstance(found, str | Path):
        raise ConfigError(
            f"an engine of type {type(found).__name__}",
            "an engine directory, or an Engine",
            "pass one of these",
        )
    path = Path(found)
    is_checkpoint = (path / "config.json").is_file() and not (path / "manifest.json").is_file()
    if is_checkpoint or (not path.exists() and _is_hub_id(str(found))):
        what = "a Hugging Face checkpoint" if is_checkpoint else "which does not exist"
        command = f"specc compile --target {found} --draft DRAFT -o engine/"
        raise EngineError(
            f"{found}, {what}",
            "an engine directory, which specc compile writes",
            f"compile it first: {command}"
            if is_checkpoint
            else f"correct the path; a model of the hub is compiled first: {command}",
        )
    return path


def check_dtype(engine: Engine, dtype: Any) -> None:
    """Raises ConfigError: the target computes in another type than `dtype`, if that is one."""
    name = str(dtype).removeprefix("torch.")
    name = _DTYPES.get(name, name)
    own = engine.manifest.dtype if engine.manifest else name
    if dtype not in (None, "auto") and name != own:
        raise ConfigError(
            f"dtype={name}, and an engine of {own}",
            f"{own}, or auto",
            "leave dtype out, or compile the engine again with --dtype",
        )


def check_length(engine: Engine, max_model_len: Any) -> None:
    """Raises ConfigError: sequences of this length, if it is one, are none of the engine's."""
    most = engine.max_seq_len
    length = max_model_len
    if length is not None and (type(length) is not int or not 2 <= length <= most):
        raise ConfigError(
            f"max_model_len={length!r}",
            f"2 … {most}, the engine's max_seq_len",
            "choose a number in this range, or compile with a larger --max-seq-len",
        )


def check_cut(
    engine: Engine, tensor_parallel_size: Any = None, pipeline_parallel_size: Any = None
) -> None:
    """Raises ConfigError: the engine has other ranks or stages than these, where they are given."""
    cut = engine.manifest
    for name, given, own in (
        ("tensor_parallel_size", tensor_parallel_size, cut.tensor_parallel_size if cut else 1),
        ("pipeline_parallel_size", pipeline_parallel_size, (len(cut.stages) if cut else 0) or 1),
    ):
        if given not in (None, own):
            raise ConfigError(
                f"{name}={given!r}, and an engine that was cut for {own}",
                f"{own}, or None",
                "leave it out, or cut the engine otherwise: specc reshard",
            )


def _is_hub_id(name: str) -> bool:
    """`owner/name`, as models of the hub are called."""
    owner, slash, rest = name.partition("/")
    return bool(slash and owner and rest) and "/" not in rest and owner not in (".", "..", "~")
