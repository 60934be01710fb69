"""Defaults of sampling that come with a checkpoint, in its generation_config.json.

They are taken as vLLM takes them: of a request that leaves these options out, never of one whose
`SamplingParams` were made by hand; and `do_sample`, which only transformers reads, says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specc.errors import ConfigError, EngineError, RequestError, SpeccError
from specc.sampling.params import SamplingParams
from specc.system.json_file import read_json

FILE = "generation_config.json"
# whose defaults: those beside the weights, or none
CHECKPOINT, NONE = "auto", "vllm"
# key of the file → option of a request
_OPTIONS = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
_KEYS = {option: key for key, option in _OPTIONS.items()}
_NEEDED = "an object with the settings of generation"
_DO = 'correct the file, or leave its values out with generation_config="vllm"'


@dataclass(frozen=True)
class SamplingDefaults:
    """Options of `SamplingParams` that a request has where it says nothing.

    Args:
        values: option → value; what is absent is as `SamplingParams` has it.
        source: where they come from, for messages.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def max_tokens(self) -> int | None:
        """Most output tokens of every request of a server; None where the checkpoint is silent."""
        return self.values.get("max_tokens")

    def params(self, **given: Any) -> SamplingParams:
        """Options of a request, those that it gives first.

        Raises:
            RequestError: a value is outside its range.
        """
        return SamplingParams(**{**self.values, **given})

    def told(self) -> str:
        """A line about what was taken; empty where that is nothing."""
        if not self.values:
            return ""
        values = ", ".join(f"{name}={value:g}" for name, value in self.values.items())
        return (
            f"sampling defaults of {self.source}: {values}"
            ' (generation_config "vllm" leaves them out)'
        )


def read_defaults(
    engine: Path | None,
    choice: str | Path = CHECKPOINT,
    override: Mapping[str, Any] | None = None,
) -> SamplingDefaults:
    """The defaults of an engine.

    Args:
        engine: its directory, which has the checkpoint's file, if there was one; None has not.
        choice: `auto`, the engine's; `vllm`, none; or a directory with another file.
        override: keys as in the file, over those of the file.
    Raises:
        ConfigError: no file where one was named; or a value, there or in `override`, that no
            request can have.
        EngineError: the same of the engine's own file.
    """
    values: dict[str, Any] = {}
    sources = []
    if str(choice) not in (CHECKPOINT, NONE):
        values = _read(Path(choice) / FILE, ConfigError)
        sources = [str(Path(choice) / FILE)]
    elif str(choice) == CHECKPOINT and engine is not None and (engine / FILE).is_file():
        values = _read(engine / FILE, EngineError)
        sources = [f"the checkpoint's {FILE}"]
    if override:
        place = "override_generation_config"
        # null takes a default away
        values = {n: v for n, v in values.items() if override.get(_KEYS[n], v) is not None}
        values |= _options(override, place, ConfigError)
        sources.append(place)
    return SamplingDefaults(values, " and ".join(sources))


def _read(file: Path, error: type[SpeccError]) -> dict[str, Any]:
    """Options of `SamplingParams` that a file has."""
    found = read_json(file, error, _NEEDED, _DO)
    if not isinstance(found, dict):
        raise error(f"{file} is no object", _NEEDED, _DO)
    return _options(found, str(file), error)


def _options(found: Mapping[str, Any], place: str, error: type[SpeccError]) -> dict[str, Any]:
    """Raises `error`: a value that no request can have."""
    values = {
        option: _whole(found[key]) if option in ("top_k", "max_tokens") else found[key]
        for key, option in _OPTIONS.items()
        if found.get(key) is not None
    }
    try:
        SamplingParams(**values)
    except RequestError as refused:
        raise error(f"{place}: {refused.found}", refused.needed, _DO) from refused
    return values


def _whole(value: Any) -> Any:
    """50.0, as some files have it, is 50."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
