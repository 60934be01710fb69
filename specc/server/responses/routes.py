"""The routes of /v1/responses: make, get, cancel and delete responses, and list their items."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from specc.errors import ContextLengthError, RequestError
from specc.runtime.requests.chat_template import ChatTemplate
from specc.server.config import ServeConfig
from specc.server.endpoints import Chat, Endpoints
from specc.server.errors import JSON, ApiError, api_error_of, bad_request, shorten
from specc.server.openapi import of_kept, request_body
from specc.server.protocol import ChatRequest
from specc.server.responses.answer import Place, ResponseAnswer, ResponseWriter, new_id
from specc.server.responses.items import (
    Item,
    check_calls,
    place_of,
    read_items,
    to_bytes,
    to_messages,
)
from specc.server.responses.request import Wanted, in_own_names, read_request
from specc.server.responses.store import Kept, ResponseStore, caller_of

# items of a page, and what it has if nobody says
_MOST_ITEMS, _USUAL_ITEMS = 100, 20
# what the body holds besides is OpenAI's to describe
_INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_SCHEMA = {
    "type": "object",
    "required": ["input"],
    "properties": {"input": _INPUT, "instructions": {"type": "string"}},
    "externalDocs": {"url": "https://platform.openai.com/docs/api-reference/responses/create"},
}
_BODY = {"required": True, "content": {"application/json": {"schema": _SCHEMA}}}


class Responses:
    """Serves responses, as chats.

    Args:
        endpoints: of the chats.
        template: of chats; None refuses them.
    """

    def __init__(
        self, endpoints: Endpoints, config: ServeConfig, template: ChatTemplate | None
    ) -> None:
        self._endpoints = endpoints
        self._config = config
        self._template = template
        self.store = ResponseStore(config.max_stored_responses, config.max_stored_bytes)
        self._running: dict[tuple[bytes, str], ResponseWriter] = {}

    async def create(self, request: Request) -> Response:
        """Answer a conversation.

        Raises:
            ApiError: the error response.
            SpeccError: the same, before `api_error_of`.
            ClientGone: the client has disconnected.
        """
        caller, endpoints = caller_of(request), self._endpoints

        def read(body: bytes) -> tuple[Chat, ResponseAnswer]:
            wanted = read_request(endpoints.parse_body(body), endpoints.unknown)
            response_id, fields = new_id(), wanted.fields
            previous = fields.get("previous_response_id")
            earlier = self._history(caller, previous)
            new = read_items(
                fields["input"], response_id, lambda *found: self._referred(caller, *found)
            )
            check_calls([*earlier, *new], len(earlier))
            chat = self._read_chat(wanted, [*earlier, *new])
            is_kept = fields.get("store", True) and self.store.has_room()
            items = to_bytes(new) if is_kept else None
            place = Place(self.store, self._running, caller, items, previous)
            return chat, self._answer_of(wanted, chat, response_id, place)

        with _blaming_input():
            chat, answer = await endpoints.in_thread(request, read, is_chat=True)
            return await endpoints.answer_chat(request, chat, answer)

    def get(self, request: Request, response_id: str) -> Response:
        """One that is kept, or that runs."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            raise ApiError(
                400,
                "Not supported here: the stream of a response that was made. Please leave stream"
                " out.",
                param="stream",
                code="unsupported_parameter",
            )
        writer = self._running_of(request, response_id)
        if writer is not None:
            return JSON(writer.snapshot())
        return _as_kept(self._kept(request, response_id).response)

    def cancel(self, request: Request, response_id: str) -> Response:
        """End one that runs with what it has; one that is over stays as it is."""
        writer = self._running_of(request, response_id)
        if writer is not None:
            return JSON(writer.cancel())
        return _as_kept(self._kept(request, response_id).response)

    def delete(self, request: Request, response_id: str) -> Response:
        """Forget one, and what it has said."""
        if not self.store.delete(caller_of(request), response_id):
            raise _unknown(response_id)
        return JSON({"id": response_id, "object": "response", "deleted": True})

    def input_items(self, request: Request, response_id: str) -> Response:
        """Items of its conversation before it: the newest first, unless asked otherwise."""
        chain = self._chain(caller_of(request), response_id)
        if chain is None:
            raise _unknown(response_id)
        query = request.query_params
        order, after = query.get("order", "desc"), query.get("after")
        limit = query.get("limit", str(_USUAL_ITEMS))
        if order not in ("asc", "desc"):
            raise bad_request(f"order={shorten(order)!r}", "asc or desc", "correct it", "order")
        if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MOST_ITEMS:
            raise bad_request(
                f"limit={shorten(limit)!r}", f"1 … {_MOST_ITEMS}", "correct it", "limit"
            )
        items = [*_items(chain[:-1]), *json.loads(chain[-1].items)]
        items = items if order == "asc" else items[::-1]
        if after is not None:
            at = next((i for i, item in enumerate(items) if item["id"] == after), None)
            if at is None:
                raise bad_request(
                    f"after={shorten(after)!r}", "the id of an item", "correct it", "after"
                )
            items = items[at + 1 :]
        page = items[: int(limit)]
        ids = [item["id"] for item in page] or [""]
        return JSON(
            {
                "object": "list",
                "data": page,
                "first_id": ids[0],
                "last_id": ids[-1],
                "has_more": len(items) > len(page),
            }
        )

    def _read_chat(self, wanted: Wanted, items: Sequence[Item]) -> Chat:
        """The chat of all items, or of the last ones that fit, where that is asked for."""

        def read(begin: int) -> Chat:
            kept = _without_orphans(items[begin:])
            messages = to_messages(wanted.fields.get("instructions"), kept, self._knows_developers)
            most = self._config.max_grammar_chars
            chat = wanted.chat(messages, self._endpoints.unknown, most)
            found = self._endpoints.read_chat(chat)
            requests = self._endpoints.service.core.requests
            requests.check_length(len(found.token_ids), 0)
            return found

        try:
            return read(0)
        except ContextLengthError:
            # whole turns go, as templates want what begins with a user
            begins = [i for i, item in enumerate(items) if i and item.get("role") == "user"]
            if not wanted.truncates or not begins:
                raise
        fits = read(begins[-1])
        low, high = -1, len(begins) - 1
        while high - low > 1:
            middle = (low + high) // 2
            try:
                fits, high = read(begins[middle]), middle
            except ContextLengthError:
                low = middle
        return fits

    @property
    def _knows_developers(self) -> bool:
        try:
            return self._template is not None and self._template.names("developer")
        except RequestError:
            return False

    def _answer_of(
        self, wanted: Wanted, chat: Chat, response_id: str, place: Place
    ) -> ResponseAnswer:
        if wanted.logprobs is not None and not chat.reader.is_plain:
            raise bad_request(
                "log probabilities of a message that is told from thinking or calls",
                "no tools that may be called, and a server without --reasoning-parser, or a"
                " text.format",
                "leave them out, or use /v1/chat/completions, which has those of all tokens",
                "include",
            )
        endpoints, params = self._endpoints, chat.params
        asked = wanted.asked(
            endpoints.model_of(params), params.temperature, params.top_p, place.items is not None
        )
        return ResponseAnswer(
            response_id,
            asked,
            chat.reader,
            endpoints.tokens,
            endpoints.service.engine.tokenizer,
            place,
            wanted.logprobs,
            self._config.tells_cached_tokens,
        )

    def _history(self, caller: bytes, previous: str | None) -> list[Item]:
        """Items of a response and of all before it; instructions are none of them.

        Raises:
            ApiError: one is gone, or there are too many bytes.
        """
        if previous is None:
            return []
        chain = self._chain(caller, previous)
        if chain is None:
            raise ApiError(
                400,
                f"Previous response with id {shorten(previous)!r} not found. Please send all items"
                " as input: responses are kept in memory, for a while, and for their own key.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return _items(chain)

    def _chain(self, caller: bytes, response_id: str) -> list[Kept] | None:
        chain = self.store.chain(caller, response_id)
        num_bytes = sum(kept.num_bytes for kept in chain or ())
        if num_bytes > self._config.max_body_bytes:
            raise bad_request(
                f"a conversation of {num_bytes} bytes", f"at most {self._config.max_body_bytes}"
                " (--max-body-bytes)", "begin a new one, or send its items as input",
                "previous_response_id",
            )  # fmt: skip
        return chain

    def _referred(self, caller: bytes, found: str, place: str) -> Item:
        """The item of a response that an id names."""
        known = place_of(found)
        kept = self.store.get(caller, known[0]) if known is not None else None
        if known is not None and kept is not None:
            _, side, index = known
            items = json.loads(kept.items if side == "i" else kept.response)
            items = items if side == "i" else items["output"]
            if index < len(items) and items[index]["id"] == found:
                item: Item = items[index]
                return item
        raise ApiError(
            404,
            f"Item with id {shorten(found)!r} not found. Please send the item itself.",
            param=place,
            code="item_not_found",
        )

    def _running_of(self, request: Request, response_id: str) -> ResponseWriter | None:
        return self._running.get((caller_of(request), response_id))

    def _kept(self, request: Request, response_id: str) -> Kept:
        kept = self.store.get(caller_of(request), response_id)
        if kept is None:
            raise _unknown(response_id)
        return kept


def add_routes(
    app: FastAPI,
    responses: Responses,
    guarded: Callable[[Coroutine[Any, Any, Response]], Coroutine[Any, Any, Response]],
) -> None:
    """Add all of them.

    Args:
        guarded: awaits an answer, and tells what nobody expected as an error.
    """
    path = "/v1/responses/{response_id}"
    made = request_body(ChatRequest) | {"openapi_extra": {"requestBody": _BODY}}

    @app.post("/v1/responses", **made)
    async def create_response(request: Request) -> Response:
        """Answer a conversation of items."""
        return await guarded(responses.create(request))

    @app.get(path, **of_kept())
    async def get_response(request: Request, response_id: str) -> Response:
        """One that is kept, or that runs."""
        return responses.get(request, response_id)

    @app.delete(path, **of_kept())
    async def delete_response(request: Request, response_id: str) -> Response:
        """Forget one, and what it has said."""
        return responses.delete(request, response_id)

    @app.post(f"{path}/cancel", **of_kept())
    async def cancel_response(request: Request, response_id: str) -> Response:
        """End one that runs with what it has; one that is over stays as it is."""
        return responses.cancel(request, response_id)

    @app.get(f"{path}/input_items", **of_kept())
    async def input_items(request: Request, response_id: str) -> Response:
        """Items of the conversation before a response."""
        # there may be megabytes of them
        return await asyncio.to_thread(responses.input_items, request, response_id)


def _items(chain: Sequence[Kept]) -> list[Item]:
    """What a chain of responses has said and been told."""
    found: list[Item] = []
    for kept in chain:
        found += json.loads(kept.items)
        found += json.loads(kept.response)["output"]
    return found


def _without_orphans(items: Sequence[Item]) -> list[Item]:
    """Without outputs of calls that were left out."""
    called: set[str] = set()
    kept = []
    for item in items:
        if item["type"] == "function_call":
            called.add(item["call_id"])
        if item["type"] != "function_call_output" or item["call_id"] in called:
            kept.append(item)
    return kept


def _as_kept(response: bytes) -> Response:
    return Response(response, media_type="application/json")


def _unknown(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"Response with id {shorten(response_id)!r} not found. Please send all items as input:"
        " responses are kept in memory, for a while, and for their own key.",
        param="response_id",
        code="response_not_found",
    )


@contextlib.contextmanager
def _blaming_input() -> Iterator[None]:
    """Tell errors of chats by the names that fields have here."""
    try:
        yield
    except RequestError as error:
        raise in_own_names(api_error_of(error, prompt="input")) from error
    except ApiError as error:
        raise in_own_names(error) from error.__cause__
