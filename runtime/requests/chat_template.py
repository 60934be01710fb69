"""Chat templates: from messages to a prompt, as transformers renders them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specc.artifact.special_tokens import CONFIG_FILE, MAX_BYTES, of_engine, read_object
from specc.errors import ConfigError, RequestError
from specc.runtime.processes.bounded_child import ChildLimits
from specc.runtime.processes.bounded_pool import BoundedPool
from specc.runtime.processes.fork_server import ChildError
from specc.runtime.requests.chat_messages import Message, plain_messages
from specc.system.extras import install_command

_FILE, _OTHERS = "chat_template.jinja", "additional_chat_templates"
_DEFAULT, _FOR_TOOLS = "default", "tool_use"
_FORMATS = ("auto", "string", "openai")
# what a call says itself, and which program it is
_FIXED = {"messages", "add_generation_prompt", "chat_template"}
_NEEDED = "a Jinja chat template in UTF-8"
# characters of a prompt that a template makes; as JSON, most have one byte, and none more than 12
MAX_CHARACTERS = 8 << 20
# a usual rendering takes a millisecond and hardly any memory
LIMITS = ChildLimits(
    cpu_seconds=2.0, memory_bytes=256 << 20, answer_bytes=48 << 20, stack_bytes=16 << 20
)
# characters of a template, and of messages from which on their rendering leaves room for others
_MAX_SOURCE, _LARGE_CHARACTERS = 1 << 20, 1 << 18
# what text has that is a template, and no name of one
_JINJA = "{}\n"


class ChatTemplate:
    """Renders messages, in a child process: templates come with checkpoints, and are programs.

    Args:
        source: Jinja, as in `tokenizer_config.json`; or several by name, of which `default` and,
            where there are tools, `tool_use` are rendered if none is asked for, as transformers
            has it.
        special_tokens: that templates name, `bos_token` and the like.
        content_format: what a content is handed as: `string`, `openai`, which is a list of parts,
            or `auto`, whichever the template reads.
        defaults: variables for chats that do not say otherwise.
    Raises:
        ConfigError: a template is malformed or takes too much, or there is no Jinja.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, str],
        limits: ChildLimits = LIMITS,
        content_format: str = "auto",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        # only chats need Jinja
        if importlib.util.find_spec("jinja2") is None:
            raise ConfigError(
                "no package jinja2",
                "jinja2, which chat templates are written in",
                install_command("serve"),
            )
        if content_format not in _FORMATS:
            found = f"chat_template_content_format={content_format!r}"
            raise ConfigError(found, f"one of {', '.join(_FORMATS)}", "choose one")
        self._defaults = dict(defaults or {})
        for name in _FIXED & self._defaults.keys():
            found = f"{name} among the defaults of a chat template's variables"
            raise ConfigError(found, "variables that a template has besides messages", "remove it")
        self._sources = {_DEFAULT: source} if isinstance(source, str) else dict(source)
        self._limits = limits
        self._content_format = content_format
        setup = {
            "sources": self._sources,
            "special_tokens": dict(special_tokens),
            "max_characters": MAX_CHARACTERS,
        }
        self._pool = BoundedPool(
            "specc.runtime.requests.chat_jinja:ChatRenderer", lambda: setup, limits, max_waiting=256
        )
        for name in self._sources:
            self._try(name)

    @property
    def template_names(self) -> list[str]:
        """Of the templates that can be asked for; a single one is called default."""
        return sorted(self._sources)

    @property
    def default_source(self) -> str | None:
        """The template that chats without a name have, if there is one."""
        return self._sources.get(_DEFAULT)

    def names(self, variable: str, template: str | None = None) -> bool:
        """Whether the template for messages with tools has this word.

        Without it, a variable of that name is not read.

        Args:
            template: see `render`.
        Raises:
            RequestError: there is no template.
        """
        source = self._source(self._choose(template, has_tools=True))
        return re.search(rf"\b{re.escape(variable)}\b", source) is not None

    def read(self, template: str | Path | None) -> str | None:
        """What a caller in this process means, as `render` takes it.

        Args:
            template: a file; or a text, which is the name of a template, Jinja, or a file's name.
        Raises:
            ConfigError: the file cannot be read.
        """
        if template is None or template in self._sources:
            return template if template is None else str(template)
        is_text = isinstance(template, str) and _has_jinja(template)
        return str(template) if is_text else _read(Path(template))

    def close(self) -> None:
        """End its processes; they also end with this object, and with this process."""
        self._pool.close()

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
        *,
        template: str | None = None,
        continue_final_message: bool | str = False,
        content_format: str | None = None,
    ) -> str:
        """The prompt, special tokens included: tokenize it without adding any.

        Args:
            messages: of the conversation; a content is text, or a list of parts of type text.
            add_generation_prompt: end where the assistant's answer begins.
            options: further variables of the template; for one that is None, the default holds.
            template: name of one, or the Jinja of another one.
            continue_final_message: end where the last message does, so that the answer goes on
                with it; a name is that of the field to go on with, content otherwise.
            content_format: instead of the template's.
        Raises:
            RequestError: the template refuses the messages or takes too much, or they are none, or
                hold more than text; there is no template; an option is malformed.
            OverloadError: too many messages wait to be rendered.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message=True and add_generation_prompt=True",
                "one of the two: an answer goes on with the last message, or begins after it",
                "pass add_generation_prompt=False",
            )
        content_format = content_format or self._content_format
        if content_format not in _FORMATS:
            found = f"chat_template_content_format={content_format!r}"
            raise RequestError(found, f"one of {', '.join(_FORMATS)}", "choose one")
        plain = plain_messages(messages)
        given = dict(options or {})
        variables = {
            "tools": None,
            "documents": None,
            **given,
            # null asks for nothing, as with vLLM
            **{k: v for k, v in self._defaults.items() if given.get(k) is None},
            "messages": plain,
            "add_generation_prompt": add_generation_prompt,
        }
        chosen = self._choose(template, has_tools=bool(variables["tools"]))
        field = "content" if continue_final_message is True else continue_final_message or None
        job = {"variables": variables, "content_format": content_format, "continues": field}
        try:
            answer = self._pool.run(chosen | job, is_large=_are_large(plain))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"messages that are no plain data ({error})",
                "a list of dicts with a role and a content, which is text",
                'pass messages such as [{"role": "user", "content": "Hello"}]',
            ) from error
        except ChildError as error:
            raise self._too_much(str(error)) from error
        if "text" in answer:
            return answer["text"]
        raise self._refused(answer)

    def _try(self, name: str) -> None:
        """Compile one, and render a conversation with it.

        Raises:
            ConfigError: it takes too much for any, or is malformed.
        """
        which = "a chat template" if len(self._sources) == 1 else f"a chat template ({name})"
        size = len(self._sources[name])
        if size > _MAX_SOURCE:
            raise _unfit(f"{which} of {size} characters, at most {_MAX_SOURCE}")
        try:
            answer = self._pool.run({"name": name, "variables": None})
        except ChildError as error:
            raise _unfit(f"{which} that takes too much for any chat: {error}") from error
        if "malformed" in answer:
            raise _unfit(f"{which} that Jinja does not take: {answer['malformed']}")
        if "costs" in answer:
            raise _unfit(f"{which} that takes too much {answer['costs']} for any chat")
        # each child compiles it once, with its first messages
        self._pool.small_cpu_s += 2 * float(answer["seconds"])

    def _choose(self, template: str | None, has_tools: bool) -> dict[str, str]:
        """Which one, as transformers chooses among several.

        Raises:
            RequestError: there is none, or none of that name.
        """
        known = self._sources
        if template is None:
            if not known:
                raise RequestError(
                    "a chat, and an engine without a chat template",
                    "a chat template",
                    "pass chat_template=FILE, or render the prompt yourself and pass it to"
                    " generate",
                )
            name = _FOR_TOOLS if has_tools and _FOR_TOOLS in known else _DEFAULT
            if name in known:
                return {"name": name}
            raise RequestError(
                f"chat_template=None, and the chat templates {', '.join(self.template_names)}, none"
                " of which is the default",
                "the name of one of them",
                "pass it as chat_template",
            )
        if template in known:
            return {"name": template}
        if not _has_jinja(template):
            names = ", ".join(self.template_names) or "none"
            raise RequestError(
                f"chat_template={template[:80]!r}",
                f"the Jinja of a chat template, or the name of one of the engine's: {names}",
                "correct it",
            )
        if len(template) > _MAX_SOURCE:
            found = f"chat_template=… of {len(template)} characters"
            raise RequestError(found, f"at most {_MAX_SOURCE}", "shorten it")
        return {"source": template}

    def _source(self, chosen: Mapping[str, str]) -> str:
        return self._sources[chosen["name"]] if "name" in chosen else chosen["source"]

    def _refused(self, answer: Mapping[str, str]) -> RequestError:
        if "costs" in answer:
            return self._too_much(f"it takes too much {answer['costs']}")
        if "malformed" in answer:
            found = f"chat_template=… that Jinja does not take: {answer['malformed']}"
            return RequestError(found, _NEEDED, "correct it")
        if "unfit" in answer:
            return RequestError(
                f"continue_final_message=True, and {answer['unfit']}",
                "a final message whose text the prompt can end with",
                "correct the final message, or leave continue_final_message out",
            )
        if "refusal" in answer:
            return RequestError(
                f"messages that the chat template refuses: {answer['refusal']}",
                "messages that it takes",
                "correct the messages",
            )
        # nobody learns here in which way
        return RequestError(
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


def load_template(
    directory: Path | None,
    file: Path | None = None,
    *,
    content_format: str = "auto",
    may_be_empty: bool = False,
    defaults: Mapping[str, Any] | None = None,
) -> ChatTemplate | None:
    """The templates of an engine directory, or one instead of them; None where there is none.

    Args:
        file: with another template; or the name of one of the engine's.
        content_format: of `ChatTemplate`.
        may_be_empty: without a template, give what renders those that requests bring.
        defaults: of `ChatTemplate`.
    Raises:
        ConfigError: a file that cannot be read, or that is malformed.
    """
    sources = {} if directory is None else _sources_of(directory)
    if file is not None:
        is_name = str(file) in sources and not file.exists()
        sources = {_DEFAULT: sources[str(file)] if is_name else _read(file)}
    if not sources and not may_be_empty:
        return None
    tokens = {} if directory is None else of_engine(directory)
    return ChatTemplate(sources, tokens, content_format=content_format, defaults=defaults)


def _sources_of(directory: Path) -> dict[str, str]:
    """Name → template; as with transformers, files go before what the configuration has."""
    file, found = directory / _FILE, {}
    if file.is_file():
        found[_DEFAULT] = _read(file)
    for other in sorted((directory / _OTHERS).glob("*.jinja")):
        found[other.name.removesuffix(".jinja")] = _read(other)
    if found:
        return found
    source = (read_object(directory / CONFIG_FILE) or {}).get("chat_template")
    if isinstance(source, str):
        return {_DEFAULT: source}
    if isinstance(source, list):
        source = {e.get("name"): e.get("template") for e in source if isinstance(e, dict)}
    texts = source.items() if isinstance(source, dict) else ()
    return {k: v for k, v in texts if isinstance(k, str) and isinstance(v, str)}


def _has_jinja(template: str) -> bool:
    return any(character in template for character in _JINJA)


def _unfit(found: str) -> ConfigError:
    return ConfigError(found, _NEEDED, "correct it, or pass another one with --chat-template")


def _are_large(messages: Sequence[Mapping[str, Any]]) -> bool:
    contents = (message.get("content") or "" for message in messages)
    sizes = (len(c) if isinstance(c, str) else sum(len(p["text"]) for p in c) for c in contents)
    return sum(sizes) > _LARGE_CHARACTERS


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise _unfit(f"{file} has {file.stat().st_size} bytes, more than {MAX_BYTES}")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"{file}: {reason}", _NEEDED, "pass a file that is one") from error
