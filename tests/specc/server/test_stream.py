"""Events of a stream, in the order in which an answer writes them, and its own form of an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest

from specc.runtime.service.service import Update
from specc.server.errors import ApiError
from specc.server.generate import Generation, Output
from specc.server.stream import EventWriter, open_stream, to_event


class Written(EventWriter):
    """Names each event by the method that wrote it; updates without text have none."""

    is_closed = False

    def begin(self, outputs: Sequence[Output]) -> bytes:
        return to_event({}, "begin")

    def write(self, outputs: Sequence[Output], index: int, update: Update) -> bytes:
        return to_event({"text": update.text}, "news") if update.text else b""

    def end(self, outputs: Sequence[Output]) -> bytes:
        return to_event({}, "end")

    def fail(self, outputs: Sequence[Output], error: ApiError) -> bytes:
        return to_event({"status": error.status}, "fail")

    def close(self) -> None:
        self.is_closed = True


class _Generation:
    outputs: Sequence[Output] = ()

    def __init__(self, updates: Sequence[Update | Exception]) -> None:
        self._updates = updates
        self.is_closed = False

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        for update in self._updates:
            if isinstance(update, Exception):
                raise update
            yield 0, update

    def close(self) -> None:
        self.is_closed = True


class _Request:
    async def receive(self) -> Any:
        await asyncio.sleep(60)


def streamed(*updates: Update | Exception) -> list[bytes]:
    """Messages of a stream's body."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        generation, request = cast(Any, _Generation(updates)), cast(Any, _Request())
        writer = Written()
        stream = await open_stream(request, cast(Generation, generation), writer, {})
        await stream({}, request.receive, send)
        assert generation.is_closed
        assert writer.is_closed

    asyncio.run(run())
    start, *bodies, end = sent
    assert (start["status"], end["body"], end["more_body"]) == (200, b"", False)
    return [message["body"] for message in bodies]


def update(text: str, is_last: bool = False) -> Update:
    return Update([1], text, finish_reason="stop" if is_last else None)


BEGIN, END = b"event: begin\ndata: {}\n\n", b"event: end\ndata: {}\n\n"


def test_events_come_in_order_and_none_is_empty() -> None:
    found = streamed(update("a"), update(""), update("é", True))
    news = ['event: news\ndata: {"text":"a"}\n\n', 'event: news\ndata: {"text":"é"}\n\n']
    assert found == [BEGIN, *(event.encode() for event in news), END]


@pytest.mark.parametrize(("error", "status"), [(ApiError(503, "No."), 503), (ValueError(), 500)])
def test_an_error_is_told_in_the_answers_form_and_last(error: Exception, status: int) -> None:
    found = streamed(update("a"), error)
    assert found[0] == BEGIN
    assert found[2:] == [b'event: fail\ndata: {"status":%d}\n\n' % status]


def test_what_fails_before_the_first_update_is_no_stream() -> None:
    with pytest.raises(ApiError):
        streamed(ApiError(503, "No."))
