"""Messages of a chat as templates read them, of what clients send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specc.runtime.requests.tool_messages import with_calls
from specc.server.protocol import ChatMessage

# one text by two names: of vLLM, and of DeepSeek and most templates
_REASONING = ("reasoning", "reasoning_content")


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages with the fields that their clients have sent.

    Arguments of calls are objects, as templates want them. Thinking of earlier messages goes by
    both of its names.

    Raises:
        RequestError: calls of another form.
    """
    return [_plain(index, message) for index, message in enumerate(messages)]


def _plain(index: int, message: ChatMessage) -> dict[str, Any]:
    fields = message.model_dump(exclude_unset=True)
    thinking = next((fields[name] for name in _REASONING if fields.get(name) is not None), None)
    if thinking is not None:
        fields |= {name: thinking for name in _REASONING if fields.get(name) is None}
    return with_calls(fields, f"messages.{index}")
