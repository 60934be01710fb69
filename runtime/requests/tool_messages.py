"""Tools in chats: how templates get them, and the calls of earlier messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specc.errors import RequestError
from specc.runtime.requests.chat_template import ChatTemplate, Message

_TOOL = '{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}'


def render_chat(
    template: ChatTemplate,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
) -> str:
    """The prompt of a conversation whose assistant may call tools.

    Args:
        template: of chats.
        messages: of the conversation; arguments of calls are objects, or JSON of one.
        add_generation_prompt: end where the assistant's answer begins.
        tools: that the template tells the model of, as OpenAI's API has them; None is none.
        options: further variables of the template.
    Raises:
        RequestError: the template does not read tools, they or calls are malformed, or the template
            refuses the messages.
        OverloadError: too many messages wait to be rendered.
    """
    plain: Sequence[Message] = messages
    if isinstance(messages, Sequence):
        plain = [with_calls(m, f"messages.{i}") for i, m in enumerate(messages)]
    if not tools:
        return template.render(plain, add_generation_prompt, options)
    are_tools = not isinstance(tools, (str, Mapping)) and all(
        isinstance(tool, Mapping) for tool in tools
    )
    if not are_tools:
        raise RequestError("tools= of another form", f"a list of {_TOOL}", "describe them so")
    if not template.names("tools"):
        raise RequestError(
            "tools=, and a chat template that does not read them",
            "a template that tells the model which tools there are",
            "pass chat_template=FILE with such a template, or describe them in a message",
        )
    return template.render(
        plain, add_generation_prompt, {**(options or {}), "tools": [dict(tool) for tool in tools]}
    )


def with_calls(message: Any, place: str) -> Any:
    """A message whose calls have objects for arguments, as templates want them.

    OpenAI's API has them as JSON in a string. A message without calls has no field of that name:
    templates ask whether there is one.

    Args:
        message: with or without `tool_calls`; what is no message is returned as it is.
        place: of the message, as errors call it.
    Raises:
        RequestError: calls of another form.
    """
    if not isinstance(message, Mapping) or "tool_calls" not in message:
        return message
    fields = dict(message)
    calls = fields.pop("tool_calls")
    if calls is None or calls == []:
        return fields
    place = f"{place}.tool_calls"
    if not isinstance(calls, (list, tuple)):
        raise _malformed(place, "of another form", "a list of calls")
    return fields | {"tool_calls": [_call(f"{place}.{i}", call) for i, call in enumerate(calls)]}


def _call(place: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        needed = '{"id": …, "type": "function", "function": {"name": …, "arguments": …}}'
        raise _malformed(place, "of another form", needed)
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "too much of it"
            raise _not_json(place, f"that are no JSON: {reason}") from error
    if not isinstance(arguments, dict):
        raise _not_json(place, "that are no object")
    return {**call, "function": {**function, "arguments": arguments}}


def _not_json(place: str, found: str) -> RequestError:
    where = f"{place}.function.arguments"
    return _malformed(where, found, "a JSON object, as the answer had it")


def _malformed(place: str, found: str, needed: str) -> RequestError:
    return RequestError(f"{place} {found}", needed, "correct the message")
