"""Prompts of a file of JSON lines: text or token ids, and options of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from specc.errors import InputFileError, RequestError
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from specc.system.json_file import JsonError, parse_json

_FORM = 'a line such as {"prompt": "text"} or {"prompt_token_ids": [1, 2, 3]}'
_DO = "correct the line"
_OPTIONS = frozenset(f.name for f in dataclasses.fields(SamplingParams) if f.init)
_KEYS = ("prompt", "prompt_token_ids")
_PREDICTION = "prediction"


@dataclass(frozen=True)
class PromptLine:
    """A prompt of a file.

    Args:
        place: file and line, for errors.
        prompt: text, or token ids.
        options: of `SamplingParams`, for this prompt alone.
        others: keys that mean nothing here.
        prediction: what the output may be, see `LLM.generate`.
    """

    place: str
    prompt: str | list[int]
    options: Mapping[str, Any]
    others: tuple[str, ...] = ()
    prediction: Any = None

    def params(self, common: Mapping[str, Any]) -> SamplingParams:
        """The options of the prompt, over those that all prompts share.

        Raises:
            RequestError: a value outside its range; it names the line where that is the line's.
        """
        options = {**common, **self.options}
        structured = self.options.get("structured_outputs")
        try:
            if isinstance(structured, dict):
                options["structured_outputs"] = _structured(structured)
            return SamplingParams(**options)
        except RequestError as error:
            if not self.options:
                raise
            raise RequestError(f"{self.place}: {error.found}", error.needed, _DO) from error


def read_prompt_lines(path: Path) -> list[PromptLine]:
    """All prompts of a file.

    Raises:
        InputFileError: no such file, no UTF-8, or a line that is no prompt.
        RequestError: no line, or an empty prompt.
    """
    text = decode(read_bytes(path), str(path))
    # splitlines() would also cut at characters that JSON allows inside strings
    lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise RequestError(f"{path} is empty", "a JSON object on each line", "write a prompt")
    return [_read_line(f"{path}, line {number}", line) for number, line in lines]


def plain_prompts(path: Path) -> list[str | list[int]]:
    """The prompts alone, for commands that have options of their own; says which keys it ignores.

    Raises:
        SpeccError: as `read_prompt_lines`.
    """
    lines = read_prompt_lines(path)
    predicted = [_PREDICTION for line in lines if line.prediction is not None]
    note_keys(path, [key for line in lines for key in (*line.options, *line.others)] + predicted)
    return [line.prompt for line in lines]


def note_keys(path: Path, keys: Iterable[str]) -> None:
    """Say on standard error what of a file has no effect."""
    names = list(dict.fromkeys(key for key in keys))
    if names:
        typer.echo(f"note: {path}: ignored here: {', '.join(names)}", err=True)


def read_bytes(path: Path) -> bytes:
    """Raises InputFileError: it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputFileError(
            f"{path}: {error.strerror}", "a readable text file", "check the path"
        ) from error


def decode(data: bytes, name: str) -> str:
    """Raises InputFileError: no UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputFileError(
            f"{name}: byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8",
            "UTF-8 text",
            "convert it, for example: iconv -f latin1 -t utf-8",
        ) from error


def not_empty(prompt: str | list[int], name: str) -> Any:
    """Raises RequestError: nothing to continue."""
    if not prompt:
        raise RequestError(f"{name} is empty", "text to continue", "write a prompt")
    return prompt


def needs_ids(prompts: Sequence[str | list[int]], has_tokenizer: bool) -> None:
    """Raises RequestError: text for an engine without a tokenizer."""
    if not has_tokenizer and any(isinstance(prompt, str) for prompt in prompts):
        raise RequestError(
            "a prompt that is text, and an engine without a tokenizer",
            "token ids",
            'pass --prompts FILE with lines such as {"prompt_token_ids": [1, 2, 3]}',
        )


def _read_line(place: str, line: str) -> PromptLine:
    try:
        value = parse_json(line)
    except JsonError as error:
        raise InputFileError(f"{place}: no JSON ({error})", _FORM, _DO) from error
    given = [key for key in _KEYS if key in value] if isinstance(value, dict) else []
    if len(given) != 1:
        found = "no text under the key prompt" if not given else " and ".join(given)
        raise InputFileError(f"{place}: {found}", _FORM, _DO)
    prompt = value[given[0]]
    if given == ["prompt"]:
        if not isinstance(prompt, str):
            raise InputFileError(f"{place}: no text under the key prompt", _FORM, _DO)
    elif not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise InputFileError(f"{place}: prompt_token_ids that are no integers", _FORM, _DO)
    options = {key: item for key, item in value.items() if key in _OPTIONS}
    known = {*_OPTIONS, *_KEYS, _PREDICTION}
    others = tuple(key for key in value if key not in known)
    own = value.get(_PREDICTION)
    return PromptLine(place, not_empty(prompt, place), options, others, own)


def _structured(fields: dict[str, Any]) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**fields)
    except TypeError as error:
        names = ", ".join(f.name for f in dataclasses.fields(StructuredOutputsParams) if f.init)
        raise RequestError(
            f"structured_outputs with {', '.join(fields)}", f"of {names}", _DO
        ) from error
