"""Chats over HTTP: from a request to its prompt, or to what its client is told."""

from __future__ import annotations

import re
from typing import Any

from specc.errors import RequestError
from specc.runtime.requests.chat_template import ChatTemplate
from specc.server.errors import ApiError, api_error_of, bad_request
from specc.server.protocol import ChatMessage, ChatRequest

# what `ChatTemplate` complains about begins with the place of the fault, where it knows one
_PLACE = re.compile(r"(messages[\w.]*)=")


def render(template: ChatTemplate | None, wanted: ChatRequest) -> str:
    """The prompt of a chat, special tokens included.

    Raises:
        ApiError: there is no template, it refuses the messages, or they hold more than text.
    """
    if template is None:
        raise bad_request(
            "a chat, and a model without a chat template",
            "a chat template",
            "send the prompt to /v1/completions, or start the server with --chat-template FILE",
            "messages",
        )
    try:
        return template.render(
            [_plain(message) for message in wanted.messages],
            add_generation_prompt=wanted.add_generation_prompt is not False,
            options=wanted.chat_template_kwargs,
        )
    except RequestError as error:
        raise _api_error(error) from error


def _plain(message: ChatMessage) -> dict[str, Any]:
    """A message with the fields that its client has sent."""
    return message.model_dump(exclude_unset=True)


def _api_error(error: RequestError) -> ApiError:
    answer = api_error_of(error)
    place = _PLACE.match(error.found)
    answer.param = place[1] if place else "messages"
    return answer
