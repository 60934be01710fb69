"""Messages of a chat as templates read them, of what clients send."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from specc.server.errors import bad_request
from specc.server.protocol import ChatMessage

# one text by two names: of vLLM, and of DeepSeek and most templates
_REASONING = ("reasoning", "reasoning_content")


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages with the fields that their clients have sent.

    Arguments of calls are objects, as templates want them: OpenAI's API has them as JSON in a
    string. Thinking of earlier messages goes by both of its names.

    Raises:
        ApiError: calls of another form.
    """
    return [_plain(index, message) for index, message in enumerate(messages)]


def _plain(index: int, message: ChatMessage) -> dict[str, Any]:
    fields = message.model_dump(exclude_unset=True)
    thinking = next((fields[name] for name in _REASONING if fields.get(name) is not None), None)
    if thinking is not None:
        fields |= {name: thinking for name in _REASONING if fields.get(name) is None}
    if "tool_calls" not in fields:
        return fields
    # templates ask whether there is such a field
    calls = fields.pop("tool_calls")
    if calls in (None, []):
        return fields
    place = f"messages.{index}.tool_calls"
    if not isinstance(calls, list):
        raise _malformed(place, "of another form", "a list of calls")
    return fields | {"tool_calls": [_call(f"{place}.{i}", call) for i, call in enumerate(calls)]}


def _call(place: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
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


def _not_json(place: str, found: str) -> Exception:
    where = f"{place}.function.arguments"
    return _malformed(where, found, "a JSON object, as the answer had it")


def _malformed(place: str, found: str, needed: str) -> Exception:
    return bad_request(f"{place} {found}", needed, "correct the message", place)
