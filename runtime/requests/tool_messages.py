"""Chats of callers in this process: the template, tools, and how a prompt ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specc.errors import RequestError
from specc.runtime.requests.chat_messages import Message
from specc.runtime.requests.chat_template import ChatTemplate

_TOOL = '{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}'


def render_chat(
    template: ChatTemplate,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any] | None,
    *,
    chat_template: str | Path | None = None,
    continue_final_message: bool | str = False,
    content_format: str = "auto",
) -> str:
    """The prompt of a conversation whose assistant may call tools.

    Args:
        messages: of the conversation; arguments of calls are objects, or JSON of one.
        add_generation_prompt: end where the assistant's answer begins.
        tools: that the template tells the model of, as OpenAI's API has them; None is none.
        variables: further ones of the template.
        chat_template: another template, as `ChatTemplate.read` takes it.
        continue_final_message: see `ChatTemplate.render`.
        content_format: likewise.
    Raises:
        RequestError: the template does not read tools, they or calls are malformed, or the template
            refuses the messages.
        ConfigError: a file with a template cannot be read.
        OverloadError: too many messages wait to be rendered.
    """
    source = template.read(chat_template)
    given = dict(variables or {}) | ({"tools": _checked(template, source, tools)} if tools else {})
    return template.render(
        messages,
        add_generation_prompt,
        given,
        template=source,
        continue_final_message=continue_final_message,
        content_format=content_format,
    )


def _checked(
    template: ChatTemplate, source: str | None, tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    are_tools = not isinstance(tools, (str, Mapping)) and all(
        isinstance(tool, Mapping) for tool in tools
    )
    if not are_tools:
        raise RequestError("tools= of another form", f"a list of {_TOOL}", "describe them so")
    if not template.names("tools", source):
        raise RequestError(
            "tools=, and a chat template that does not read them",
            "a template that tells the model which tools there are",
            "pass chat_template=FILE with such a template, or describe them in a message",
        )
    return [dict(tool) for tool in tools]
