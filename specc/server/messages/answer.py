"""Answers in the shape of Anthropic's API."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from specc.runtime.service.service import Update
from specc.server.api_responses import Answer
from specc.server.error_forms import anthropic_error
from specc.server.errors import ApiError
from specc.server.generate import Output
from specc.server.message_reader import MessageReader
from specc.server.messages.blocks import BlockEvents, blocks_of
from specc.server.parsers.message import MessageParser
from specc.server.protocol import GenerationRequest
from specc.server.stream import EventWriter, to_event


class MessageAnswer(Answer):
    """A message.

    Args:
        model: what it is called.
        reader: of the output.
        max_seq_len: positions of prompt and output together.
        hides_thinking: blocks of thinking have no text.
        has_cached_tokens: usage says how much of the prompt was in the cache.
    """

    def __init__(
        self,
        model: str,
        reader: MessageReader,
        *,
        max_seq_len: int,
        hides_thinking: bool = False,
        has_cached_tokens: bool = True,
    ) -> None:
        self.id = self.request_id = f"msg_{uuid.uuid4().hex}"
        self.reader = reader
        self.hides_thinking = hides_thinking
        self._model = model
        self._max_seq_len = max_seq_len
        self._has_cached_tokens = has_cached_tokens

    def name(self, request_id: str | None) -> None:
        if request_id is not None:
            self.id, self.request_id = f"msg_{request_id}", request_id

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        (output,) = outputs
        parser = self.reader.parser()
        pieces = parser.feed(output.text, is_last=True).pieces
        blocks = blocks_of(pieces, self.hides_thinking)
        return self.head(blocks) | self.end(output, parser) | {"usage": self.usage(output)}

    def writer(self, wanted: GenerationRequest, cancel: Callable[[], None]) -> EventWriter:
        return MessageWriter(self)

    def head(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        """What a message says of itself."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
        }

    def end(self, output: Output, parser: MessageParser) -> dict[str, Any]:
        """Why it ended."""
        reason, stop = output.finish_reason, output.stop_reason
        is_stop = reason == "stop" and isinstance(stop, str)
        if self.reader.has_called(reason, parser):
            found = "tool_use"
        elif is_stop:
            found = "stop_sequence"
        elif reason == "length":
            num_tokens, wanted = output.num_tokens, output.job.params.max_tokens
            is_full = len(output.job.token_ids) + num_tokens >= self._max_seq_len
            is_full = is_full and (wanted is None or num_tokens < wanted)
            found = "model_context_window_exceeded" if is_full else "max_tokens"
        else:
            found = "end_turn"
        sequence = stop if found == "stop_sequence" else None
        return {"stop_reason": found, "stop_sequence": sequence, "stop_details": None}

    def usage(self, output: Output) -> dict[str, Any]:
        """Tokens so far; what of the prompt was in the cache is known at the end."""
        prompt, metrics = len(output.job.token_ids), output.metrics
        cached = metrics.num_cached_tokens if metrics and self._has_cached_tokens else 0
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output.num_tokens,
        }


class MessageWriter(EventWriter):
    """The stream of one message."""

    def __init__(self, answer: MessageAnswer) -> None:
        self._answer = answer
        self._parser = answer.reader.parser()
        self._blocks = BlockEvents(answer.hides_thinking)

    def begin(self, outputs: Sequence[Output]) -> bytes:
        none = dict.fromkeys(("stop_reason", "stop_sequence", "stop_details"))
        usage = self._answer.usage(outputs[0]) | {"output_tokens": 0}
        message = self._answer.head([]) | none | {"usage": usage}
        return _events([{"type": "message_start", "message": message}, {"type": "ping"}])

    def write(self, outputs: Sequence[Output], index: int, update: Update) -> bytes:
        news = self._parser.feed(update.text, update.is_last)
        return _events(self._blocks.take(news.pieces))

    def end(self, outputs: Sequence[Output]) -> bytes:
        (output,) = outputs
        delta = {
            "type": "message_delta",
            "delta": self._answer.end(output, self._parser),
            "usage": self._answer.usage(output),
        }
        return _events([*self._blocks.close(), delta, {"type": "message_stop"}])

    def fail(self, outputs: Sequence[Output], error: ApiError) -> bytes:
        _, body = anthropic_error(error, self._answer.request_id)
        return to_event(body, "error")


def _events(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(to_event(event, event["type"]) for event in events)
