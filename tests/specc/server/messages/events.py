"""Streams of Anthropic's API: their events, their order, and what clients make of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
# kind of a block → kinds of what is new about it, the last of which comes once
_DELTAS = {
    "text": ("text_delta",),
    "thinking": ("thinking_delta", "signature_delta"),
    "tool_use": ("input_json_delta",),
}


def events_of(data: bytes) -> list[dict[str, Any]]:
    """All events; each has the name that its data says."""
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        name, line = block.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def check_order(events: Sequence[dict[str, Any]]) -> None:
    """What the API's description says of the order of events."""
    plain = [event for event in events if event["type"] != "ping"]
    kinds = [event["type"] for event in plain]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert plain[0]["message"]["content"] == []
    assert plain[0]["message"]["stop_reason"] is None
    open_kind, index, deltas = None, -1, []
    for event in plain[1:-2]:
        if event["type"] == "content_block_start":
            assert open_kind is None
            index += 1
            open_kind, deltas = event["content_block"]["type"], []
            assert open_kind in _DELTAS
        elif event["type"] == "content_block_delta":
            assert open_kind is not None
            deltas.append(event["delta"]["type"])
            assert deltas[-1] in _DELTAS[open_kind]
        else:
            assert event["type"] == "content_block_stop"
            assert open_kind is not None
            assert deltas.count("signature_delta") == (open_kind == "thinking")
            assert open_kind != "thinking" or deltas[-1] == "signature_delta"
            open_kind = None
        assert event["index"] == index
    assert open_kind is None


def final_of(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The message that Anthropic's client puts together; the types of all events are theirs."""
    snapshot, buffers = None, {}
    for event in events:
        if event["type"] == "ping":
            continue
        read = _EVENT.validate_python(event)
        assert read.to_dict(mode="json") == event
        snapshot = accumulate_event(event=read, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    return snapshot.to_dict(mode="json")
