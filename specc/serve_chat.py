"""Chat templates: from messages to a prompt, as transformers renders them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specc.errors import ConfigError
from specc.json_file import read_json
from specc.serve_errors import bad_request
from specc.serve_protocol import ChatMessage, TextPart

_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_NEEDED = "a Jinja chat template in UTF-8"


class ChatTemplate:
    """Renders messages.

    Args:
        source: Jinja, as in `tokenizer_config.json`.
        special_tokens: that templates name, `bos_token` and the like.
    Raises:
        ConfigError: the template is malformed.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(
                f"a chat template that Jinja does not take: {error}",
                _NEEDED,
                "correct it, or pass another one with --chat-template",
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt, special tokens included.

        Args:
            messages: of the conversation.
            add_generation_prompt: end where the assistant's answer begins.
            options: further variables of the template.
        Raises:
            ApiError: the template refuses the messages, or they hold more than text.
        """
        variables = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **(options or {}),
            "messages": [_plain(i, message) for i, message in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except _Refusal as error:
            raise bad_request(
                f"messages that the chat template refuses: {error}",
                "messages that it takes",
                "correct the messages",
                "messages",
            ) from error
        except Exception as error:  # templates can fail in any way, of which nobody learns here
            raise bad_request(
                "messages that the chat template fails on",
                "messages with the fields and roles that it reads",
                "correct the messages",
                "messages",
            ) from error


def load_template(directory: Path | None, file: Path | None = None) -> ChatTemplate | None:
    """The template of a file, else of an engine directory; None where it has none.

    Raises:
        ConfigError: a file that cannot be read, or that is malformed.
    """
    config = _read_config(directory / _CONFIG) if directory else {}
    tokens = {name: _token(config[name]) for name in _SPECIAL if config.get(name)}
    if file is not None:
        return ChatTemplate(_read(file), tokens)
    if directory is not None and (directory / _TEMPLATE).is_file():
        return ChatTemplate(_read(directory / _TEMPLATE), tokens)
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name
        by_name = {entry.get("name"): entry.get("template") for entry in source}
        source = by_name.get("default")
    return ChatTemplate(source, tokens) if isinstance(source, str) else None


class _Refusal(jinja2.TemplateError):
    """A template has called `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for training: here just its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes for HTML
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _plain(index: int, message: ChatMessage) -> dict[str, Any]:
    """A message as templates know it: its content is text."""
    plain: dict[str, Any] = {"role": message.role}
    if "content" in message.model_fields_set:
        plain["content"] = message.content
    plain |= message.model_extra or {}
    if isinstance(message.content, list):
        parts = message.content
        plain["content"] = "\n".join(_text(index, part) for part in parts)
    return plain


def _text(index: int, part: TextPart) -> str:
    if part.type != "text" or part.text is None:
        raise bad_request(
            f"a part of type {part.type!r} in message {index}",
            "parts of type text with a text",
            "leave the others out",
            f"messages.{index}.content",
        )
    return part.text


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    config = read_json(file, ConfigError, "the tokenizer's configuration", "correct the file")
    return config if isinstance(config, dict) else {}


def _token(value: Any) -> str:
    return str(value["content"] if isinstance(value, dict) else value)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"{file}: {reason}", _NEEDED, "pass a file that is one") from error
