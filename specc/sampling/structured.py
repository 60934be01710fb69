"""What the output of one request must look like: a JSON schema, a regex, a choice, a grammar."""

from __future__ import annotations

import hashlib
import json as json_
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specc.errors import ConfigError, RequestError
from specc.vllm.answers import answers_names
from specc.vllm.sampling_options import STRUCTURED

# what says a form; exactly one of them
KINDS = ("json", "regex", "choice", "grammar", "json_object")
_DO = "correct this value"
# of the JSON of a schema
SWITCHES = ("disable_any_whitespace", "disable_additional_properties", "lenient")
# which library compiles grammars, and others that change no output
_OF_VLLM = ("backend", "disable_fallback", "reasoning_parser", "enable_in_reasoning")
# what is refused unseen: characters, and rules or references, each of which may lead to the next
MAX_CHARS = 2 << 20
MAX_RULES = 10_000
# choices that become text in one call
_MOST_AT_ONCE = 2000
_RULE = re.compile(r"^[ \t]*[?!]*\w[\w.\-]*[ \t]*:", re.MULTILINE)
_REFERENCE = re.compile(r'"\$(?:ref|dynamicRef|recursiveRef)"')


@answers_names(STRUCTURED)
@dataclass(frozen=True)
class StructuredOutputsParams:
    """Form of an output, named as vLLM's users know it: exactly one of the first five.

    Whether the library for grammars understands it is found out when a request is made.

    Args:
        json: JSON schema: a dict, its text, or a class with `model_json_schema`, as pydantic's.
        regex: the whole output matches it.
        choice: strings; the output is one of them.
        grammar: context-free, as llama.cpp's GBNF or as Lark.
        json_object: True for any JSON object.
        disable_any_whitespace: True for JSON without white space between its parts. This and the
            next ones are for JSON alone; None is the engine's default.
        disable_additional_properties: True: objects have no properties but those that the schema
            names, where it says nothing about others; False: they may.
        whitespace_pattern: regex of what may stand between the parts of JSON; without it, a space,
            or one or two line feeds and at most twenty spaces or tabs.
        lenient: True: keywords and formats that the library lacks are ignored, with a warning;
            False: they are refused.
        free_openings: texts; an output that begins with one of them has no form from there on, as
            one that calls tools in place of an answer.
    Raises:
        RequestError: none or several of the first five, a value of another type, or one that is
            larger than `MAX_CHARS` and `MAX_RULES` say.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    lenient: bool | None = None
    free_openings: tuple[str, ...] = ()
    # what was given, and its text; `json_object` is a schema by then
    kind: str = field(init=False, default="")
    text: str = field(init=False, default="")
    # equal for equal grammars: 32 bytes
    digest: bytes = field(init=False, default=b"", repr=False)

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured outputs with {' and '.join(given) or 'nothing'}",
                f"exactly one of {', '.join(KINDS)}",
                _DO,
            )
        (kind,) = given
        object.__setattr__(self, "kind", "json" if kind == "json_object" else kind)
        object.__setattr__(self, "text", _TEXT_OF[kind](getattr(self, kind)))
        self._check_options()
        self._check_size()
        options = json_.dumps([self.kind, *self.key[2:]])
        digest = hashlib.sha256(options.encode() + b"\n" + self.text.encode()).digest()
        object.__setattr__(self, "digest", digest)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal grammars; hashable, as a schema is not."""
        return (
            self.kind,
            self.text,
            self.disable_any_whitespace,
            self.disable_additional_properties,
            self.whitespace_pattern,
            self.lenient,
            tuple(self.free_openings),
        )

    def _check_size(self) -> None:
        for name in ("text", "whitespace_pattern"):
            num_chars = len(getattr(self, name) or "")
            if num_chars > MAX_CHARS:
                raise RequestError(
                    f"{self.kind} of {num_chars} characters", f"at most {MAX_CHARS}", _DO
                )
        unit = {"json": "references", "grammar": "rules"}.get(self.kind)
        if unit is not None:
            form = _RULE if self.kind == "grammar" else _REFERENCE
            count = sum(1 for _ in form.finditer(self.text))
            if count > MAX_RULES:
                raise RequestError(f"{self.kind} with {count} {unit}", f"at most {MAX_RULES}", _DO)

    def _check_options(self) -> None:
        pattern = self.whitespace_pattern
        if not isinstance(self.free_openings, (list, tuple)):
            raise _wrong("free_openings", self.free_openings, "a list of strings")
        for opening in self.free_openings:
            _text("free_openings", opening)
        for name in SWITCHES:
            if not isinstance(value := getattr(self, name), bool | None):
                raise _wrong(name, value, "True, False or None")
        if pattern is not None:
            _text("whitespace_pattern", pattern)
        # what is False is every other form's, too, as clients that send all defaults have it
        given = [name for name in (*SWITCHES, "whitespace_pattern") if getattr(self, name)]
        if given and self.kind != "json":
            raise RequestError(f"{given[0]} beside {self.kind}", "json or json_object", _DO)
        if pattern is not None and self.disable_any_whitespace:
            raise RequestError(
                "disable_any_whitespace beside whitespace_pattern", "one of the two", _DO
            )


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """What holds for the JSON of an engine's requests, unless they say otherwise.

    Args:
        disable_any_whitespace: see `StructuredOutputsParams`, as for the others.
        disable_additional_properties: likewise.
        lenient: likewise.
    """

    disable_any_whitespace: bool = False
    disable_additional_properties: bool = True
    lenient: bool = False

    @classmethod
    def read(cls, value: Mapping[str, Any] | str | None) -> StructuredOutputsConfig:
        """From a dict or JSON, as vLLM's option of that name has it.

        Raises:
            ConfigError: anything else.
        """
        try:
            given = json_.loads(value) if isinstance(value, str) else value or {}
        except ValueError as error:
            raise _no_config(value) from error
        if not isinstance(given, Mapping):
            raise _no_config(value)
        own = {name: item for name, item in given.items() if name not in _OF_VLLM}
        if own.keys() - {*SWITCHES} or not all(isinstance(item, bool) for item in own.values()):
            raise _no_config(value)
        return cls(**own)


def _no_config(value: Any) -> ConfigError:
    return ConfigError(
        f"structured_outputs_config={value!r}",
        f"an object with {', '.join(SWITCHES)}, each true or false",
        _DO,
    )


def _schema(value: Any) -> str:
    """The text of a schema; equal schemas need not have equal texts."""
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    is_text = isinstance(value, str)
    try:
        schema = json_.loads(value) if is_text else value
        text = value if is_text else json_.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"json of type {type(value).__name__}: {error}", "a JSON schema or its text", _DO
        ) from error
    if not isinstance(schema, (dict, bool)):
        raise _wrong("json", value, "a JSON schema: an object, true or false")
    return text


def _choices(value: Any) -> str:
    is_list = isinstance(value, (list, tuple)) and all(
        issubclass(t, str) for t in {*map(type, value)}
    )
    if not is_list or not value:
        raise _wrong("choice", value, "a list of at least one string")
    # without a look at each: there can be 100,000 of them
    if not all(value) or not _is_utf8("".join(value)):
        for item in value:
            _text("choice", item)
    # in parts: the encoder holds the interpreter's lock for as long as a call of it takes
    parts = [value[i : i + _MOST_AT_ONCE] for i in range(0, len(value), _MOST_AT_ONCE)]
    return f"[{', '.join(json_.dumps(list(part), ensure_ascii=False)[1:-1] for part in parts)}]"


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(name, value, "a string that is not empty")
    if not _is_utf8(value):
        raise _wrong(name, value, "text that can be written as UTF-8")
    return value


def _any_object(value: Any) -> str:
    if value is not True:
        raise _wrong("json_object", value, "True, or None")
    return '{"type": "object"}'


def _wrong(name: str, value: Any, needed: str) -> RequestError:
    found = repr(value)
    return RequestError(f"{name}={found if len(found) <= 80 else found[:79] + '…'}", needed, _DO)


_TEXT_OF: dict[str, Any] = {
    "json": _schema,
    "regex": lambda value: _text("regex", value),
    "choice": _choices,
    "grammar": lambda value: _text("grammar", value),
    "json_object": _any_object,
}
