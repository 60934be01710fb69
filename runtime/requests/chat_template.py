"""Chat templates: from messages to a prompt, as transformers renders them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specc.errors import ConfigError, RequestError
from specc.runtime.processes.bounded_child import ChildLimits
from specc.runtime.processes.bounded_pool import BoundedPool
from specc.runtime.processes.fork_server import ChildError
from specc.system.extras import install_command
from specc.system.json_file import read_json

# what a conversation holds: a dict with `role`, mostly `content`, and what else templates read
Message = Mapping[str, Any]

_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_NEEDED = "a Jinja chat template in UTF-8"
# characters of a prompt that a template makes; as JSON, most have one byte, and none more than 12
MAX_CHARACTERS = 8 << 20
# a usual rendering takes a millisecond and hardly any memory
LIMITS = ChildLimits(
    cpu_seconds=2.0, memory_bytes=256 << 20, answer_bytes=48 << 20, stack_bytes=16 << 20
)
# characters of a template, and of messages from which on their rendering leaves room for others
_MAX_SOURCE, _LARGE_CHARACTERS = 1 << 20, 1 << 18
# bytes of tokenizer_config.json
_MAX_CONFIG = 64 << 20


class ChatTemplate:
    """Renders messages, in a child process: templates come with checkpoints, and are programs.

    Args:
        source: Jinja, as in `tokenizer_config.json`.
        special_tokens: that templates name, `bos_token` and the like.
        limits: of compiling it, and of each rendering.
        for_tools: another template, for messages with tools.
    Raises:
        ConfigError: the template is malformed or takes too much, or there is no Jinja.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        limits: ChildLimits = LIMITS,
        for_tools: ChatTemplate | None = None,
    ) -> None:
        # only chats need Jinja
        if importlib.util.find_spec("jinja2") is None:
            raise ConfigError(
                "no package jinja2",
                "jinja2, which chat templates are written in",
                install_command("serve"),
            )
        if len(source) > _MAX_SOURCE:
            raise _unfit(f"a chat template of {len(source)} characters, at most {_MAX_SOURCE}")
        self._special_tokens = dict(special_tokens)
        self._words = frozenset(re.findall(r"\w+", source))
        self._limits = limits
        self._for_tools = for_tools
        setup = {"source": source, "max_characters": MAX_CHARACTERS}
        self._pool = BoundedPool(
            "specc.runtime.requests.chat_jinja:ChatRenderer", lambda: setup, limits, max_waiting=256
        )
        try:
            answer = self._pool.run(None)
        except ChildError as error:
            raise _unfit(f"a chat template that takes too much to compile: {error}") from error
        if "text" not in answer:
            reason = answer.get("malformed") or f"it takes too much {answer.get('costs')}"
            raise _unfit(f"a chat template that Jinja does not take: {reason}")
        # each child compiles it once, with its first messages
        self._pool.small_cpu_s += 2 * float(answer["seconds"])

    def names(self, variable: str) -> bool:
        """Whether the template has this word; without it, a variable of that name is not read."""
        others = self._for_tools
        return variable in self._words or (others is not None and others.names(variable))

    def close(self) -> None:
        """End its processes; they also end with this object, and with this process."""
        if self._for_tools is not None:
            self._for_tools.close()
        self._pool.close()

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
            RequestError: the template refuses the messages or takes too much, or they are none, or
                hold more than text.
            OverloadError: too many messages wait to be rendered.
        """
        if self._for_tools is not None and (options or {}).get("tools"):
            return self._for_tools.render(messages, add_generation_prompt, options)
        plain = _plain_messages(messages)
        variables = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **(options or {}),
            "messages": plain,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            answer = self._pool.run(variables, is_large=_are_large(plain))
        except (TypeError, ValueError, RecursionError) as error:
            raise _no_messages(f"messages that are no plain data ({error})") from error
        except ChildError as error:
            raise self._too_much(str(error)) from error
        if "text" in answer:
            return answer["text"]
        if "costs" in answer:
            raise self._too_much(f"it takes too much {answer['costs']}")
        if "refusal" in answer:
            raise RequestError(
                f"messages that the chat template refuses: {answer['refusal']}",
                "messages that it takes",
                "correct the messages",
            )
        # nobody learns here in which way
        raise RequestError(
            "messages that the chat template fails on",
            "messages with the fields and roles that it reads",
            "correct the messages",
        )

    def _too_much(self, reason: str) -> RequestError:
        limits = self._limits
        memory = "any" if limits.memory_bytes is None else f"{limits.memory_bytes >> 20} MiB of"
        return RequestError(
            f"messages whose chat template takes too much to render: {reason}",
            f"{limits.cpu_seconds:g} s of the processor, {memory} memory and {MAX_CHARACTERS}"
            " characters at most",
            "shorten the messages, or choose another template with --chat-template",
        )


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
        by_name = {e.get("name"): e.get("template") for e in source if isinstance(e, dict)}
        source, other = by_name.get("default"), by_name.get("tool_use")
        # as transformers: where there are tools, it goes before the default one
        if isinstance(source, str) and isinstance(other, str):
            return ChatTemplate(source, tokens, for_tools=ChatTemplate(other, tokens))
    return ChatTemplate(source, tokens) if isinstance(source, str) else None


def _unfit(found: str) -> ConfigError:
    return ConfigError(found, _NEEDED, "correct it, or pass another one with --chat-template")


def _are_large(messages: Sequence[Message]) -> bool:
    return sum(len(message.get("content") or "") for message in messages) > _LARGE_CHARACTERS


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
    needed, do = "the tokenizer's configuration", "correct the file"
    config = read_json(file, ConfigError, needed, do, max_bytes=_MAX_CONFIG)
    return config if isinstance(config, dict) else {}


def _token(value: Any) -> str:
    return str(value.get("content", "") if isinstance(value, dict) else value)


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > _MAX_CONFIG:
            raise _unfit(f"{file} has {file.stat().st_size} bytes, more than {_MAX_CONFIG}")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"{file}: {reason}", _NEEDED, "pass a file that is one") from error
