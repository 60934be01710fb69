"""The endpoints of Anthropic's API; a message is a chat whose request and answer look different."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specc.server.config import ServeConfig
from specc.server.endpoints import Chat, Endpoints
from specc.server.errors import JSON, ApiError, bad_request
from specc.server.messages.answer import MessageAnswer
from specc.server.messages.conversation import with_early_system
from specc.server.messages.request import MessagesBody, read_request
from specc.server.protocol import ChatRequest, parse

# answers are alike; the second one has fewer fields of requests
_VERSION_HEADER, _VERSIONS = "Anthropic-Version", ("2023-06-01", "2026-10-21")


class MessageEndpoints:
    """Serves messages; handlers raise what those of `Endpoints` do.

    Args:
        endpoints: of chats.
    """

    def __init__(self, endpoints: Endpoints, config: ServeConfig) -> None:
        self._endpoints = endpoints
        self._config = config

    async def create(self, request: Request) -> Response:
        """Handler of /v1/messages."""
        wanted, chat = await self._read(request)
        answer = MessageAnswer(
            self._endpoints.model_of(chat.params),
            chat.reader,
            max_seq_len=self._endpoints.service.engine.max_seq_len,
            hides_thinking=wanted.hides_thinking,
            has_cached_tokens=self._config.tells_cached_tokens,
        )
        return await self._endpoints.answer_chat(request, chat, answer)

    async def count(self, request: Request) -> Response:
        """Handler of /v1/messages/count_tokens: the length of the prompt that would be made."""
        _, chat = await self._read(request, is_count=True)
        return JSON({"input_tokens": len(chat.token_ids)})

    async def _read(self, request: Request, is_count: bool = False) -> tuple[MessagesBody, Chat]:
        version = request.headers.get(_VERSION_HEADER, _VERSIONS[0])
        if version not in _VERSIONS:
            raise bad_request(
                f"{_VERSION_HEADER.lower()}: {version[:40]!r}",
                " or ".join(_VERSIONS),
                "send one of them",
            )
        unknown = self._endpoints.unknown

        def read(body: bytes) -> tuple[MessagesBody, Chat]:
            wanted = read_request(self._endpoints.parse_body(body), unknown, is_count)
            try:
                return wanted, self._chat_of(wanted.chat)
            except ApiError as error:
                messages = with_early_system(wanted.chat["messages"])
                if error.param != "messages" or messages == wanted.chat["messages"]:
                    raise
            return wanted, self._chat_of(wanted.chat | {"messages": messages})

        return await self._endpoints.in_thread(request, read, is_chat=True)

    def _chat_of(self, chat: dict[str, Any]) -> Chat:
        return self._endpoints.read_chat(parse(ChatRequest, chat, self._endpoints.unknown))


def no_batches() -> ApiError:
    """The error of the paths of batches."""
    text = "This server has no batches of messages. Please send messages one by one."
    return ApiError(404, text, code="not_found")
