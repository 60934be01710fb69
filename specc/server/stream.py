"""Server-sent events: updates as they come, to a client that may go at any time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specc.runtime.service.service import Update
from specc.server.api_responses import ApiResponse
from specc.server.errors import ApiError, internal_error, to_bytes
from specc.server.generate import Generation, disconnected, end_tasks, unless_gone

_DONE = b"data: [DONE]\n\n"
_log = logging.getLogger("specc.serve")


class EventStream(Response):
    """A generation as events, up to `[DONE]` or an error; ends it where the client goes.

    Args:
        generation: started, its first update taken.
    """

    media_type = "text/event-stream"

    def __init__(
        self, generation: Generation, events: AsyncIterator[bytes], headers: dict[str, str]
    ) -> None:
        super().__init__(
            headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        # it ends where the connection does not close
        del self.headers["content-length"]
        self._generation = generation
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sender, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._generation.close()
            await end_tasks(sender, gone)

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        # a client that is slow to read holds this up, and the updates merge meanwhile
        with contextlib.suppress(OSError):
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def open_stream(
    request: Request,
    generation: Generation,
    answer: ApiResponse,
    headers: dict[str, str],
    *,
    has_usage: bool,
    has_all_usage: bool,
) -> EventStream:
    """Wait for the first update, so that what fails before it gets the status of its error.

    Args:
        request: of the client, which may go meanwhile.
        generation: started.
        answer: shape of the chunks.
        has_usage: a last chunk holds the usage, and all others say that they do not.
        has_all_usage: every chunk holds the usage so far.
    Raises:
        ApiError: an output failed.
        ClientGone: nobody reads it.
    """
    updates = generation.updates()
    first = await unless_gone(request, _next(updates))
    events = _events(generation, updates, first, answer, has_usage, has_all_usage)
    return EventStream(generation, events, headers)


async def _next(updates: AsyncIterator[tuple[int, Update]]) -> tuple[int, Update]:
    return await anext(updates)


async def _events(
    generation: Generation,
    updates: AsyncIterator[tuple[int, Update]],
    first: tuple[int, Update],
    answer: ApiResponse,
    has_usage: bool,
    has_all_usage: bool,
) -> AsyncIterator[bytes]:
    begun: set[int] = set()

    def event(index: int, update: Update) -> bytes:
        output = generation.outputs[index]
        chunks = answer.chunks(index, output, update, index not in begun)
        begun.add(index)
        if has_usage:
            usage = answer.usage(generation.outputs) if has_all_usage else None
            chunks = [chunk | {"usage": usage} for chunk in chunks]
        return b"".join(map(_event, chunks))

    try:
        answer.take(*first)
        yield event(*first)
        async for index, update in updates:
            # a token may have no text yet; it is in the next chunk that has some
            if answer.take(index, update) or has_all_usage:
                yield event(index, update)
        if has_usage:
            yield _event(answer.last_chunk(generation.outputs))
        yield _DONE
    except ApiError as error:
        yield _event(error.to_json())
    except Exception:
        _log.exception("a stream has failed")
        yield _event(internal_error().to_json())


def _event(data: Any) -> bytes:
    return b"data: " + to_bytes(data) + b"\n\n"
