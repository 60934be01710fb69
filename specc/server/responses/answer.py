"""A response: whole, or as the events of its stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from specc.runtime.service.service import Update
from specc.server.api_responses import Answer, ends_by_token, usage_of
from specc.server.errors import ApiError
from specc.server.generate import Output
from specc.server.logprobs import TokenTexts, chat_logprobs
from specc.server.message_reader import MessageReader
from specc.server.parsers.message import MessageParser
from specc.server.protocol import GenerationRequest
from specc.server.responses.items import Item, to_bytes
from specc.server.responses.output import COMPLETED, IN_PROGRESS, INCOMPLETE, Event, OutputItems
from specc.server.responses.store import Kept, ResponseStore
from specc.server.stream import EventWriter, to_event

CANCELLED, FAILED = "cancelled", "failed"


def new_id() -> str:
    """Nobody guesses it: who knows a response's id may still not have its caller's key."""
    return f"resp_{secrets.token_hex(24)}"


@dataclass(frozen=True)
class Place:
    """Where a response is kept.

    Args:
        store: of all responses.
        running: those whose streams are not over, by caller and id.
        caller: whose response it is.
        items: JSON of what its request adds to the conversation; None keeps nothing.
        previous: the response that it goes on with.
    """

    store: ResponseStore
    running: dict[tuple[bytes, str], ResponseWriter]
    caller: bytes
    items: bytes | None
    previous: str | None


class ResponseAnswer(Answer):
    """Of /v1/responses.

    Args:
        response_id: of `new_id`.
        asked: fields of the response that repeat the request.
        logprobs: best tokens to name beside each; None leaves them out.
        tells_cached: usage says how much of the prompt was in the cache.
        names: see `OutputItems`.
    """

    def __init__(
        self,
        response_id: str,
        asked: Item,
        reader: MessageReader,
        tokens: TokenTexts,
        tokenizer: Tokenizer | None,
        place: Place,
        logprobs: int | None = None,
        tells_cached: bool = True,
        names: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        self.id = response_id
        self.place = place
        self._asked = asked
        self._reader = reader
        self._tokens = tokens
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._tells_cached = tells_cached
        self._names = names or {}
        self._created = int(time.time())

    def name(self, request_id: str | None) -> None:
        """Its id stays: a client's own could be guessed."""

    def whole(self, outputs: Sequence[Output]) -> Item:
        (output,) = outputs
        parser = self._reader.parser()
        items = self.items(parser)
        items.feed(output.text, True, self.logprobs(output, output))
        status = self.status(output, parser)
        items.finish(status)
        response = self.response(status, items, outputs)
        self.keep(response)
        return response

    def writer(self, wanted: GenerationRequest, cancel: Callable[[], None]) -> EventWriter:
        return ResponseWriter(self, self._reader.parser(), cancel)

    def items(self, parser: MessageParser) -> OutputItems:
        return OutputItems(self.id, parser, self._reader.shows_reasoning, self._names)

    def logprobs(self, output: Output, news: Output | Update) -> list[Item]:
        """Of new tokens, but for the one that ends an output: it has no text."""
        if self._logprobs is None:
            return []
        found = chat_logprobs(self._tokens, news.token_ids, news.logprobs or [], self._logprobs)
        content: list[Item] = found["content"]
        if content and news.finish_reason is not None and ends_by_token(output):
            content.pop()
        return content

    def status(self, output: Output, parser: MessageParser) -> str:
        """Of an output that has ended, and of its last item."""
        reason = self._reader.finish_reason(output.finish_reason, parser)
        return INCOMPLETE if reason == "length" else COMPLETED

    def response(
        self,
        status: str,
        items: OutputItems | None = None,
        outputs: Sequence[Output] = (),
        error: ApiError | None = None,
    ) -> Item:
        """The object; usage is there once nothing more will come.

        Args:
            outputs: the one output, where it is over.
        """
        is_cut = status == INCOMPLETE
        is_late = bool(outputs) and outputs[0].stop_reason == "timeout"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "completed_at": int(time.time()) if status == COMPLETED else None,
            "error": None if error is None else _error(error),
            # the API has no word for an output that took too long
            "incomplete_details": {"reason": None if is_late else "max_output_tokens"}
            if is_cut
            else None,
            "output": [] if items is None else list(items.items),
            "previous_response_id": self.place.previous,
            **self._asked,
            "usage": self._usage(items, outputs) if outputs else None,
        }

    def keep(self, response: Item) -> None:
        """Keep what is over, if it is to be kept; it says so where there is no room for it."""
        place = self.place
        if place.items is None:
            return
        kept = Kept(to_bytes(response), place.items, place.previous)
        response["store"] = place.store.put(place.caller, self.id, kept)

    def _usage(self, items: OutputItems | None, outputs: Sequence[Output]) -> Item:
        found = usage_of(outputs)
        cached = found["prompt_tokens_details"]["cached_tokens"] if self._tells_cached else 0
        num_output = found["completion_tokens"]
        thinking = 0
        if items is not None and self._tokenizer is not None and (text := items.reasoning):
            # encoding a batch releases the GIL
            (encoded,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
            thinking = min(len(encoded.ids), num_output)
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": thinking},
            "total_tokens": found["total_tokens"],
        }


class ResponseWriter(EventWriter):
    """Writes the typed events of one response, numbered from 0 on."""

    def __init__(
        self, answer: ResponseAnswer, parser: MessageParser, cancel: Callable[[], None]
    ) -> None:
        self._answer = answer
        self._parser = parser
        self._cancel = cancel
        self._items = answer.items(parser)
        self._number = 0
        self._outputs: Sequence[Output] = ()
        # after it was cancelled: the response, and the events before its end
        self._last: Item | None = None
        self._cut: list[Event] = []

    def begin(self, outputs: Sequence[Output]) -> bytes:
        self._outputs = outputs
        place = self._answer.place
        place.running[place.caller, self._answer.id] = self
        head = self._answer.response(IN_PROGRESS)
        names = ("response.created", "response.in_progress")
        return self._write([{"type": name, "response": head} for name in names])

    def write(self, outputs: Sequence[Output], index: int, update: Update) -> bytes:
        if self._last is not None:
            return b""
        logprobs = self._answer.logprobs(outputs[index], update)
        return self._write(self._items.feed(update.text, update.is_last, logprobs))

    def end(self, outputs: Sequence[Output]) -> bytes:
        if self._last is not None:
            return self._end(self._cut, self._last)
        (output,) = outputs
        status = self._answer.status(output, self._parser)
        events = self._items.finish(status)
        response = self._answer.response(status, self._items, outputs)
        # before it is told: the next request may come at once
        self._answer.keep(response)
        return self._end(events, response)

    def fail(self, outputs: Sequence[Output], error: ApiError) -> bytes:
        """Told by the response itself; one that was cancelled has not failed."""
        if self._last is not None:
            return self._end(self._cut, self._last)
        events = self._items.cut()
        response = self._answer.response(FAILED, self._items, outputs, error)
        self._answer.keep(response)
        return self._end(events, response)

    def close(self) -> None:
        place = self._answer.place
        place.running.pop((place.caller, self._answer.id), None)

    def cancel(self) -> Item:
        """End it with what it has; returns the response."""
        if self._last is None:
            self._cut = self._items.cut()
            self._last = self._answer.response(CANCELLED, self._items, self._outputs)
            self._answer.keep(self._last)
            self._cancel()
        return self._last

    def snapshot(self) -> Item:
        """The response so far."""
        return self._last or self._answer.response(IN_PROGRESS, self._items)

    def _end(self, events: list[Event], response: Item) -> bytes:
        told = response["status"]
        # there is no event for one that was cancelled
        name = INCOMPLETE if told == CANCELLED else told
        return self._write([*events, {"type": f"response.{name}", "response": response}])

    def _write(self, events: Sequence[Event]) -> bytes:
        written = []
        for event in events:
            numbered = {"type": event["type"], "sequence_number": self._number} | event
            written.append(to_event(numbered, event["type"]))
            self._number += 1
        return b"".join(written)


def _error(error: ApiError) -> dict[str, Any]:
    code = "server_error" if error.status >= 500 else "invalid_prompt"
    return {"code": code, "message": error.message}
