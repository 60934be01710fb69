"""Chat templates: from messages to a prompt, as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specc.errors import ConfigError, RequestError

# what a conversation holds: a dict with `role`, mostly `content`, and what else templates read
Message = Mapping[str, Any]

_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_NEEDED = "a Jinja chat template in UTF-8"


class ChatTemplate:
    """Renders messages.

    Args:
        source: Jinja, as in `tokenizer_config.json`.
        special_tokens: that templates name, `bos_token` and the like.
    Raises:
        ConfigError: the template is malformed, or there is no Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        # only chats need Jinja
        try:
            from specc.runtime import chat_jinja
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"no package {error.name}",
                "jinja2, which chat templates are written in",
                "pip install jinja2",
            ) from error
        try:
            self._template = chat_jinja.compile_template(source)
        except chat_jinja.Malformed as error:
            raise ConfigError(
                f"a chat template that Jinja does not take: {error}",
                _NEEDED,
                "correct it, or pass another one with --chat-template",
            ) from error
        self._jinja = chat_jinja
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt, special tokens included: tokenize it without adding any.

        Args:
            messages: of the conversation; a content is text, or a list of parts of type text.
            add_generation_prompt: end where the assistant's answer begins.
            options: further variables of the template.
        Raises:
            RequestError: the template refuses the messages, or they are none, or hold more than
                text.
        """
        variables = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **(options or {}),
            "messages": _plain_messages(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._jinja.render(self._template, variables)
        except self._jinja.Refusal as error:
            raise RequestError(
                f"messages that the chat template refuses: {error}",
                "messages that it takes",
                "correct the messages",
            ) from error
        except Exception as error:  # templates can fail in any way, of which nobody learns here
            raise RequestError(
                "messages that the chat template fails on",
                "messages with the fields and roles that it reads",
                "correct the messages",
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


def _plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates know them: their content is text.

    Raises:
        RequestError: something else.
    """
    if isinstance(messages, str | bytes | Mapping):
        raise _no_messages(f"messages of type {type(messages).__name__}")
    plain = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _no_messages(f"message {index} of type {type(message).__name__}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise _no_messages(f"message {index} without a role")
        if isinstance(content, list | tuple):
            content = "\n".join(_text_of(index, part) for part in content)
        if content is not None and not isinstance(content, str):
            raise _no_messages(f"message {index} with a content of type {type(content).__name__}")
        plain.append({**message, "content": content} if "content" in message else dict(message))
    if not plain:
        raise _no_messages("no messages")
    return plain


def _text_of(index: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise RequestError(
            f"messages.{index}.content=[…] with a part of type {kind!r}",
            "parts of type text with a text",
            "leave the others out",
        )
    return text


def _no_messages(found: str) -> RequestError:
    return RequestError(
        found,
        "a list of dicts with a role and a content, which is text",
        'pass messages such as [{"role": "user", "content": "Hello"}]',
    )


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(_read(file))
    except ValueError as error:
        raise ConfigError(
            f"{file} is no JSON: {error}", "the tokenizer's configuration", "correct the file"
        ) from error
    except RecursionError as error:
        raise ConfigError(
            f"{file} is nested too deeply", "the tokenizer's configuration", "correct the file"
        ) from error
    return config if isinstance(config, dict) else {}


def _token(value: Any) -> str:
    return str(value["content"] if isinstance(value, dict) else value)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"{file}: {reason}", _NEEDED, "pass a file that is one") from error
