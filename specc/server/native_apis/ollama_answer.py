"""Answers of Ollama's API, whole or as lines of JSON."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from specc.runtime.service.service import Update
from specc.server.api_responses import Answer
from specc.server.errors import ApiError, to_bytes
from specc.server.generate import Output
from specc.server.message_reader import MessageReader
from specc.server.parsers.message import Delta
from specc.server.protocol import GenerationRequest
from specc.server.stream import EventWriter
from specc.speculation.metrics import SpecStats


def error_form(error: ApiError) -> dict[str, Any]:
    """An error's body."""
    return {"error": error.to_json()["error"]["message"]}


class OllamaAnswer(Answer):
    """To a chat or a prompt, whole or as lines of JSON.

    Args:
        reader: of the output; None takes it for text.
        is_chat: it is a message.
    """

    def __init__(self, model: str, reader: MessageReader | None, is_chat: bool) -> None:
        self.id = f"ollama-{uuid.uuid4().hex}"
        self._begin_s = time.monotonic()
        self._model = model
        self._reader = reader
        self._is_chat = is_chat

    def name(self, request_id: str | None) -> None:
        self.id = request_id or self.id

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        (output,) = outputs
        reader = self._reader
        said = Delta(content=output.text)
        if reader is not None:
            said = reader.parser().feed(output.text, is_last=True)
        return self.part(said, is_done=True) | self.figures(output)

    def writer(self, wanted: GenerationRequest, cancel: Callable[[], None]) -> EventWriter:
        return _OllamaWriter(self, self._reader)

    def part(self, said: Delta, is_done: bool = False) -> dict[str, Any]:
        """What is new; calls of tools are whole."""
        head = {"model": self._model, "created_at": now()}
        return head | said_fields(said, self._is_chat) | {"done": is_done}

    def figures(self, output: Output) -> dict[str, Any]:
        """Of an output that has ended; times are nanoseconds, waiting included."""
        total_s = time.monotonic() - self._begin_s
        first_s = min(total_s, (output.metrics or SpecStats()).first_token_s)
        return {
            "done_reason": output.finish_reason,
            "total_duration": round(1e9 * total_s),
            "load_duration": 0,
            "prompt_eval_count": len(output.job.token_ids),
            "prompt_eval_duration": round(1e9 * first_s),
            "eval_count": output.num_tokens,
            "eval_duration": round(1e9 * (total_s - first_s)),
        }


class _OllamaWriter(EventWriter):
    media_type = "application/x-ndjson"

    def __init__(self, answer: OllamaAnswer, reader: MessageReader | None) -> None:
        self._answer = answer
        self._parser = None if reader is None else reader.parser()
        # calls come in parts, and are told whole
        self._calls = Delta()

    def write(self, outputs: Sequence[Output], index: int, update: Update) -> bytes:
        news = Delta(content=update.text)
        if self._parser is not None:
            news = self._parser.feed(update.text, update.is_last)
        for call in news.calls:
            if call.id is not None:
                self._calls.calls.append(call)
            else:
                self._calls.calls[-1].arguments += call.arguments
        news = Delta(content=news.content, reasoning=news.reasoning)
        return _line(self._answer.part(news)) if news.says_something else b""

    def end(self, outputs: Sequence[Output]) -> bytes:
        calls = _line(self._answer.part(self._calls)) if self._calls.says_something else b""
        end = self._answer.part(Delta(), is_done=True) | self._answer.figures(outputs[0])
        return calls + _line(end)

    def fail(self, outputs: Sequence[Output], error: ApiError) -> bytes:
        return _line(error_form(error))


def said_fields(said: Delta, is_chat: bool) -> dict[str, Any]:
    """Fields that hold what is said, of a chat or of a prompt's answer."""
    thinking = {"thinking": said.reasoning} if said.reasoning else {}
    if not is_chat:
        return {"response": said.content} | thinking
    calls = [
        {"function": {"name": call.name, "arguments": arguments}}
        for call in said.calls
        if (arguments := _arguments(call.arguments)) is not None
    ]
    message = {"role": "assistant", "content": said.content} | thinking
    return {"message": message | ({"tool_calls": calls} if calls else {})}


def _arguments(text: str) -> Any:
    """None of a call that num_predict has cut: clients read objects alone."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return None


def now() -> str:
    """The time, as answers have it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _line(data: Mapping[str, Any]) -> bytes:
    return to_bytes(data) + b"\n"
