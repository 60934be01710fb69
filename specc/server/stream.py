"""Server-sent events: updates as they come, to a client that may go at any time."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specc.runtime.service.service import Update
from specc.server.errors import ApiError, internal_error, to_bytes
from specc.server.generate import Generation, Output, disconnected, end_tasks, unless_gone

_log = logging.getLogger("specc.serve")


class EventWriter(abc.ABC):
    """Writes an answer as events, in the order of these methods; one for each stream.

    What they return is sent as it is: some results of `to_event`, one after the other.
    """

    media_type = "text/event-stream"

    def begin(self, outputs: Sequence[Output]) -> bytes:
        """What stands before all else; the first update is there, and is written next."""
        return b""

    @abc.abstractmethod
    def write(self, outputs: Sequence[Output], index: int, update: Update) -> bytes:
        """What an update of one output says; each update once and in order."""

    @abc.abstractmethod
    def end(self, outputs: Sequence[Output]) -> bytes:
        """After the last update of all outputs."""

    @abc.abstractmethod
    def fail(self, outputs: Sequence[Output], error: ApiError) -> bytes:
        """In place of all that would have followed."""

    def close(self) -> None:
        """The stream is over, at its end or before: nobody reads it any more."""
        return


class EventStream(Response):
    """A generation as events; ends it where the client goes.

    Args:
        generation: started, its first update taken.
        close: called when the stream is over.
        media_type: of all events together.
    """

    def __init__(
        self,
        generation: Generation,
        events: AsyncIterator[bytes],
        headers: dict[str, str],
        close: Callable[[], None],
        media_type: str,
    ) -> None:
        super().__init__(
            headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            media_type=media_type,
        )
        # it ends where the connection does not close
        del self.headers["content-length"]
        self._generation = generation
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sender, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._generation.close()
            self._close()
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
    request: Request, generation: Generation, writer: EventWriter, headers: dict[str, str]
) -> EventStream:
    """Wait for the first update, so that what fails before it gets the status of its error.

    Args:
        request: of the client, which may go meanwhile.
        generation: started.
    Raises:
        ApiError: an output failed.
        ClientGone: nobody reads it.
    """
    updates = generation.updates()
    first = await unless_gone(request, _next(updates))
    events = _events(generation, updates, first, writer)
    return EventStream(generation, events, headers, writer.close, writer.media_type)


def to_event(data: Any, name: str | None = None) -> bytes:
    """One event, of JSON; OpenAI's first API has no names for them."""
    begin = b"" if name is None else b"event: " + name.encode() + b"\n"
    return begin + b"data: " + to_bytes(data) + b"\n\n"


async def _next(updates: AsyncIterator[tuple[int, Update]]) -> tuple[int, Update]:
    return await anext(updates)


async def _events(
    generation: Generation,
    updates: AsyncIterator[tuple[int, Update]],
    first: tuple[int, Update],
    writer: EventWriter,
) -> AsyncIterator[bytes]:
    outputs = generation.outputs
    try:
        if begin := writer.begin(outputs):
            yield begin
        if events := writer.write(outputs, *first):
            yield events
        async for index, update in updates:
            if events := writer.write(outputs, index, update):
                yield events
        if end := writer.end(outputs):
            yield end
    except ApiError as error:
        yield writer.fail(outputs, error)
    except Exception:
        _log.exception("a stream has failed")
        yield writer.fail(outputs, internal_error())
