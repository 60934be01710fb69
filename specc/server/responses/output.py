"""Items of one output, as its text comes, and the events that tell them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specc.server.parsers.message import CallDelta, MessageParser
from specc.server.responses.items import Item, item_id

Event = dict[str, Any]
IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


class OutputItems:
    """Thinking, messages and calls of one output, in the order of its text.

    What becomes of a text does not depend on the pieces in which it comes; the events do, since
    each tells what is new.

    Args:
        parser: of the output.
        shows_reasoning: thinking is told.
    Attributes:
        items: all of them; the last one may be in progress.
    """

    def __init__(self, response_id: str, parser: MessageParser, shows_reasoning: bool) -> None:
        self.items: list[Item] = []
        self._thoughts: list[str] = []
        self._response_id = response_id
        self._parser = parser
        self._shows_reasoning = shows_reasoning
        # of the item in progress: its characters, log probabilities that no event has told yet and
        # those that one has, and of a call, which one of the output it is
        self._pieces: list[str] = []
        self._untold: list[Item] = []
        self._told: list[Item] = []
        self._call = -1

    def feed(self, text: str, is_last: bool, logprobs: Sequence[Item] = ()) -> list[Event]:
        """Take a part of the text.

        Args:
            logprobs: of its tokens, where all of an output is its message.
        """
        events: list[Event] = []
        self._untold += logprobs
        for piece in self._parser.feed(text, is_last).pieces:
            if isinstance(piece, CallDelta):
                events += self._take_call(piece)
            elif piece.is_reasoning:
                self._thoughts.append(piece.text)
                if self._shows_reasoning:
                    events += self._take_text("reasoning", piece.text)
            else:
                events += self._take_text("message", piece.text)
        if self._open_kind == "function_call" and self._call < len(self._parser.ended_calls):
            events += self._close(COMPLETED)
        return events

    def finish(self, status: str) -> list[Event]:
        """After all text; an output that says nothing is a message without text.

        Args:
            status: of an item in progress.
        """
        events = []
        if not self.items:
            events += self._open("message", {"role": "assistant", "content": []})
        return [*events, *self.cut(status)]

    def cut(self, status: str = INCOMPLETE) -> list[Event]:
        """End with what there is."""
        return self._close(status)

    @property
    def reasoning(self) -> str:
        """All thinking, shown or not."""
        return "".join(self._thoughts)

    @property
    def _open_kind(self) -> str | None:
        is_open = bool(self.items) and self.items[-1]["status"] == IN_PROGRESS
        return self.items[-1]["type"] if is_open else None

    def _take_text(self, kind: str, text: str) -> list[Event]:
        events = []
        if self._open_kind != kind:
            events += self._close(COMPLETED)
            if kind == "reasoning":
                own: Item = {"summary": [], "content": [], "encrypted_content": None}
            else:
                own = {"role": "assistant", "content": []}
            events += self._open(kind, own)
        self._pieces.append(text)
        return [*events, self._delta(text)]

    def _take_call(self, call: CallDelta) -> list[Event]:
        events = []
        if call.id is not None:
            events += self._close(COMPLETED)
            self._call = call.index
            own = {"arguments": "", "call_id": call.id, "name": call.name}
            events += self._open("function_call", own)
        if call.arguments:
            self._pieces.append(call.arguments)
            events.append(self._delta(call.arguments))
        return events

    def _delta(self, text: str) -> Event:
        kind = self.items[-1]["type"]
        if kind == "function_call":
            return self._event("function_call_arguments.delta", delta=text)
        if kind == "reasoning":
            return self._event("reasoning_text.delta", content_index=0, delta=text)
        told = self._tell()
        return self._event("output_text.delta", content_index=0, delta=text, logprobs=told)

    def _tell(self) -> list[Item]:
        """Log probabilities for the next event; the item keeps them, too."""
        told, self._untold = self._untold, []
        self._told += told
        return told

    def _open(self, kind: str, own: Item) -> list[Event]:
        index = len(self.items)
        name = item_id(kind, self._response_id, "o", index)
        self.items.append({"id": name, "type": kind, "status": IN_PROGRESS} | own)
        self._pieces, self._told = [], []
        events = [self._event("output_item.added", item=dict(self.items[-1]))]
        if kind != "function_call":
            part = self._part("")
            events.append(self._event("content_part.added", content_index=0, part=part))
        return events

    def _close(self, status: str) -> list[Event]:
        """End the item in progress, if there is one."""
        kind = self._open_kind
        if kind is None:
            return []
        item, text = self.items[-1], "".join(self._pieces)
        if kind == "function_call":
            ended = self._parser.ended_calls
            is_whole = self._call < len(ended) and ended[self._call]
            item |= {"arguments": text, "status": COMPLETED if is_whole else INCOMPLETE}
            done = self._event("function_call_arguments.done", arguments=text, name=item["name"])
            return [done, self._event("output_item.done", item=dict(item))]
        events = []
        if kind == "message" and self._untold:
            # of tokens that have no text
            events.append(self._delta(""))
        part = self._part(text)
        item |= {"content": [part], "status": status}
        place = {"content_index": 0}
        if kind == "reasoning":
            events.append(self._event("reasoning_text.done", text=text, **place))
        else:
            own = {"text": text, "logprobs": part["logprobs"]}
            events.append(self._event("output_text.done", **own, **place))
        events.append(self._event("content_part.done", part=part, **place))
        return [*events, self._event("output_item.done", item=dict(item))]

    def _part(self, text: str) -> Item:
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        own = list(self._told)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": own}

    def _event(self, what: str, /, **fields: Any) -> Event:
        index = len(self.items) - 1
        place = {"output_index": index}
        if not what.startswith("output_item"):
            place = {"item_id": self.items[-1]["id"]} | place
        return {"type": f"response.{what}"} | place | fields
