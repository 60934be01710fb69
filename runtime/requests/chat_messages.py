"""Messages of a chat as templates read them, of what callers and clients send.

The rules are those of transformers' `apply_chat_template` and, for what OpenAI's clients send and
transformers leaves alone, those of vLLM.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from specc.errors import RequestError

# what a conversation holds: a dict with `role`, mostly `content`, and what else templates read
Message = Mapping[str, Any]

_log = logging.getLogger("specc.chat")
# one text by three names, the first of which most templates read; transformers takes the first
# that is given
REASONING = ("reasoning_content", "thinking", "reasoning")
# kinds of parts that hold a text → its field
_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages with the fields that have a value: null is absent.

    A content is a text, or a list of parts of type text. Arguments of calls are objects; there is
    no field of calls where there is no call. Earlier thinking goes by all of its names.

    Raises:
        RequestError: something else.
    """
    if isinstance(messages, str | bytes | Mapping):
        raise _no_messages(f"messages of type {type(messages).__name__}")
    plain = [_plain(index, message) for index, message in enumerate(messages)]
    if not plain:
        raise _no_messages("no messages")
    return plain


def _plain(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _no_messages(f"message {index} of type {type(message).__name__}")
    fields = {name: value for name, value in message.items() if value is not None}
    role, content = fields.get("role"), fields.get("content", "")
    if not isinstance(role, str) or not role:
        raise _no_messages(f"message {index} without a role")
    if isinstance(content, list | tuple):
        fields["content"] = [_text_part(index, part) for part in content]
    elif not isinstance(content, str):
        raise _no_messages(f"message {index} with a content of type {type(content).__name__}")
    thinking = next((fields[name] for name in REASONING if name in fields), None)
    if thinking is not None:
        # vLLM has the third name, too
        fields = {"thinking": thinking, **fields, "reasoning_content": thinking}
        fields.setdefault("reasoning", thinking)
    return _with_calls(fields, f"messages.{index}")


def _text_part(index: int, part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
    if not isinstance(text, str):
        raise RequestError(
            f"messages.{index}.content=[…] with a part of type {kind!r}",
            "parts of type text with a text",
            "leave the others out",
        )
    return dict(part) if kind == "text" else {"type": "text", "text": text}


def _no_messages(found: str) -> RequestError:
    return RequestError(
        found,
        "a list of dicts with a role and a content, which is text",
        'pass messages such as [{"role": "user", "content": "Hello"}]',
    )


def _with_calls(fields: dict[str, Any], place: str) -> dict[str, Any]:
    """A message whose calls have objects for arguments, as templates want them.

    OpenAI's API has them as JSON in a string.
    """
    if "tool_calls" not in fields:
        return fields
    place = f"{place}.tool_calls"
    calls = fields["tool_calls"]
    if not isinstance(calls, (list, tuple)):
        raise _malformed(place, "of another form", "a list of calls")
    made = [_call(f"{place}.{i}", call) for i, call in enumerate(calls)]
    rest = {name: value for name, value in fields.items() if name != "tool_calls"}
    # templates ask whether there is such a field
    return {**fields, "tool_calls": made} if made else rest


def _call(place: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        needed = '{"id": …, "type": "function", "function": {"name": …, "arguments": …}}'
        raise _malformed(place, "of another form", needed)
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = ...
    elif arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, dict):
        # the model's own, as a rule, cut by max_tokens: a refusal would end the conversation
        _log.warning("%s.function.arguments are no JSON object: the template gets {}", place)
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _malformed(place: str, found: str, needed: str) -> RequestError:
    return RequestError(f"{place} {found}", needed, "correct the message")
