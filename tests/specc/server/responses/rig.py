"""Answers of /v1/responses without an engine, and what their streams have to be."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, get_args

from openai.types.responses import ResponseStreamEvent

from specc.runtime.service.service import Update
from specc.sampling.params import SamplingParams
from specc.server.api_responses import Answer
from specc.server.config import ServeConfig
from specc.server.fields import UnknownFields
from specc.server.generate import Output, OutputJob
from specc.server.logprobs import TokenTexts
from specc.server.message_reader import MessageReader
from specc.server.parsers.message import MessageParser
from specc.server.protocol import ChatRequest, parse
from specc.server.responses.answer import Place, ResponseAnswer
from specc.server.responses.request import read_request
from specc.server.responses.store import ResponseStore
from specc.server.tool_counts import ToolCounts
from specc.server.tools import read_tools
from specc.speculation.metrics import SpecStats
from tests.specc.server.scripted import byte_tokenizer

CONFIG = ServeConfig(
    ("m",), reasoning_parser="qwen3", enable_auto_tool_choice=True, tool_call_parser="hermes"
)
PLAIN = ServeConfig(("m",))
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": name, "parameters": {"type": "object"}} for name in "fg"
]
ID = "resp_" + "ab" * 24


class _Numbered(MessageReader):
    """Ids of calls are numbers."""

    def parser(self) -> MessageParser:
        parser, numbers = super().parser(), itertools.count()
        parser._make_id = lambda: f"call_{next(numbers)}"
        return parser


def answer_of(
    body: dict[str, Any], config: ServeConfig = CONFIG, store: ResponseStore | None = None
) -> ResponseAnswer:
    """What a request is answered with; its id and those of calls are the same each time."""
    unknown = UnknownFields()
    wanted = read_request({"input": "hi", "tools": TOOLS} | body, unknown)
    chat: ChatRequest = wanted.chat([{"role": "user", "content": "hi"}], unknown, 1000)
    use = read_tools(chat, config, reads_tools=True)
    reader = _Numbered(config, chat, "A", use, ToolCounts())
    tokenizer = byte_tokenizer()
    place = Place(store or ResponseStore(8, 1 << 20), {}, b"me", b"[]", None)
    asked = wanted.asked("m", 1.0, 1.0, True)
    return ResponseAnswer(
        ID, asked, reader, TokenTexts(tokenizer), tokenizer, place, wanted.logprobs, True,
        wanted.names,
    )  # fmt: skip


def updates_of(
    text: str,
    sizes: Sequence[int],
    reason: str = "stop",
    logprobs: Callable[[int], Any] | None = None,
) -> list[Update]:
    """A text whose characters are tokens, some in each update, over and over; EOS is the last."""
    tokens = [*text, ""] if reason == "stop" else list(text)
    updates, at = [], 0
    for size in itertools.cycle(sizes):
        own = tokens[at : at + size]
        ids = [ord(one) % 250 if one else 256 for one in own]
        at += size
        is_last = at >= len(tokens)
        scores = None if logprobs is None else [logprobs(i) for i in ids]
        updates.append(
            Update(
                ids, "".join(own), scores, reason if is_last else None,
                metrics=SpecStats() if is_last else None,
            )
        )  # fmt: skip
        if is_last:
            return updates
    raise AssertionError("no sizes")


def output_of(updates: Sequence[Update] = ()) -> Output:
    output = Output(OutputJob(0, [1, 2, 3], SamplingParams()))
    for update in updates:
        take(output, update)
        output.text += update.text
        output.token_ids += update.token_ids
        output.logprobs += update.logprobs or []
    return output


def take(output: Output, update: Update) -> None:
    """What `Generation` notes of an update."""
    output.num_tokens += len(update.token_ids)
    output.finish_reason, output.metrics = update.finish_reason, update.metrics


def streamed(answer: Answer, updates: Sequence[Update]) -> list[dict[str, Any]]:
    """Events of a stream."""
    output = output_of()
    writer = answer.writer(parse(ChatRequest, {"messages": [{"role": "user"}]}), lambda: None)
    written = writer.begin([output])
    for update in updates:
        take(output, update)
        written += writer.write([output], 0, update)
    written += writer.end([output])
    writer.close()
    return events_of(written.decode())


def events_of(text: str) -> list[dict[str, Any]]:
    """Of a stream's text; each is named by its type."""
    events = []
    for part in text.split("\n\n")[:-1]:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert text.endswith("\n\n")
    return events


@functools.cache
def _models() -> dict[str, Any]:
    kinds = get_args(get_args(ResponseStreamEvent)[0])
    return {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in kinds}


def check_events(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """As the API has them: kinds, order, places, and ends that say what deltas have said.

    Returns:
        the final response.
    """
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        _models()[event["type"]].model_validate(event, strict=True)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    final = events[-1]["response"]
    last = "incomplete" if final["status"] == "cancelled" else final["status"]
    assert kinds[-1] == last
    assert last in ("completed", "incomplete", "failed")
    left = list(zip(kinds[2:-1], events[2:-1], strict=True))
    for index, item in enumerate(final["output"]):
        left = _check_item(left, index, item)
    assert not left
    for event in events[:2]:
        head = event["response"]
        assert (head["status"], head["output"], head["usage"]) == ("in_progress", [], None)
        assert head.keys() == final.keys()
    return final


def _check_item(left: list[Any], index: int, item: dict[str, Any]) -> list[Any]:
    """Events of one item, which stand first; returns those after them."""
    places = []

    def next_event(kind: str) -> dict[str, Any]:
        name, event = left.pop(0)
        assert name == kind, (name, kind)
        assert event["output_index"] == index
        if "item_id" in event:
            assert event["item_id"] == item["id"]
        places.append(event.get("content_index", 0))
        return event

    added = next_event("output_item.added")["item"]
    assert added["status"] == "in_progress"
    assert (added["id"], added["type"]) == (item["id"], item["type"])
    if item["type"] == "function_call":
        assert added["arguments"] == ""
        assert (added["name"], added["call_id"]) == (item["name"], item["call_id"])
        text, of = item["arguments"], "function_call_arguments"
    else:
        assert added["content"] == []
        (part,) = item["content"]
        text = part["text"]
        of = "reasoning_text" if item["type"] == "reasoning" else "output_text"
        assert next_event("content_part.added")["part"] == part | {"text": ""} | (
            {"logprobs": []} if of == "output_text" else {}
        )
    deltas, scores = "", []
    while left[0][0] == f"{of}.delta":
        event = next_event(f"{of}.delta")
        deltas += event["delta"]
        scores += event.get("logprobs", [])
    assert deltas == text
    done = next_event(f"{of}.done")
    if of == "function_call_arguments":
        assert (done["arguments"], done["name"]) == (text, item["name"])
    else:
        assert done["text"] == text
        assert next_event("content_part.done")["part"] == part
    if of == "output_text":
        assert scores == done["logprobs"] == part["logprobs"]
    assert next_event("output_item.done")["item"] == item
    assert set(places) == {0}
    return left
