"""Channels, the form of Kimi K3: thinking, the answer and calls of tools have marks of their own.

`<|open|>think<|sep|>…<|close|>think<|sep|><|open|>response<|sep|>…<|close|>response<|sep|>`, then
`<|open|>tools<|sep|>…<|close|>tools<|sep|>` where there are calls, and `<|close|>message<|sep|>`.
The prompt may have opened the first one. Marks are special tokens around plain words.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from specc.server.parsers.calls import Tools
from specc.server.parsers.events import Blanks, Event, HeldParser, Parser, Text, find_marker
from specc.server.parsers.tags import CLOSE, OPEN, SEP

_THINK, _RESPONSE, TOOLS_OPEN = (f"{OPEN}{name}{SEP}" for name in ("think", "response", "tools"))
_THINK_END, _RESPONSE_END, TOOLS_CLOSE, _END = (
    f"{CLOSE}{name}{SEP}" for name in ("think", "response", "tools", "message")
)


@dataclass(frozen=True)
class ChannelsFormat:
    """As a `ReasoningFormat`; its parser takes the marks off answers, too."""

    @property
    def markers(self) -> tuple[str, ...]:
        return OPEN, CLOSE, SEP

    def parser(self, prompt: str, ends: tuple[str, ...], tools: Tools) -> Parser:
        """For one output.

        Args:
            ends: what ends thinking as well, see `ReasoningParser`.
            tools: of no use here: another parser looks for calls.
        """
        return ChannelsParser(prompt, ends)


class _At(enum.Enum):
    """Where in a message it is."""

    OUTSIDE = enum.auto()
    THINK = enum.auto()
    RESPONSE = enum.auto()
    TOOLS = enum.auto()


_CHANNELS = {_THINK: _At.THINK, _RESPONSE: _At.RESPONSE, TOOLS_OPEN: _At.TOOLS}


class ChannelsParser(HeldParser):
    """Tells thinking from content: the answer, text outside of channels, and calls, marks included.

    Marks of the other channels are no text, nor is white space between channels.

    Args:
        prompt: that the output follows; its end may have opened a channel.
        ends: what ends thinking as well: nothing, or `TOOLS_OPEN`.
    """

    def __init__(self, prompt: str = "", ends: tuple[str, ...] = ()) -> None:
        self._ends = ends
        # before it, outside of channels
        self._blanks = Blanks()
        self._has_channel = False
        self._place = _At.OUTSIDE
        end = prompt.rstrip()
        if end.endswith(_THINK):
            self._place = _At.THINK
        elif end.endswith(_RESPONSE):
            self._place = _At.RESPONSE

    def finish(self) -> list[Event]:
        blanks = self._blanks.pop()
        # white space before the end of a message is none of its text
        is_text = self._held or not self._has_channel
        rest, self._held = (blanks if is_text else "") + self._held, ""
        return [Text(rest, self._place is _At.THINK)] if rest else []

    def _advance(self, events: list[Event]) -> bool:
        """Go on up to the next mark; False where more text is needed for that."""
        marks: tuple[str, ...]
        if self._place is _At.OUTSIDE:
            self._held = self._blanks.take(self._held)
            marks = (_THINK, _RESPONSE, TOOLS_OPEN, _RESPONSE_END, _END)
        elif self._place is _At.THINK:
            marks = (_THINK_END, *self._ends)
        elif self._place is _At.RESPONSE:
            marks = (_RESPONSE_END, TOOLS_OPEN)
        else:
            marks = (TOOLS_CLOSE,)
        size, mark = find_marker(self._held, *marks)
        said, self._held = self._held[:size], self._held[size:].removeprefix(mark or "")
        if self._place is _At.OUTSIDE:
            # white space is text between words, and none before a mark
            words = said.rstrip()
            after, said = said[len(words) :], self._blanks.pop() + words if words else ""
            self._blanks.take(after)
        if said:
            events.append(Text(said, self._place is _At.THINK))
        if mark is None:
            return False
        self._blanks.pop()
        if mark in (TOOLS_OPEN, TOOLS_CLOSE):
            events.append(Text(mark))
        self._has_channel = True
        self._place = _CHANNELS.get(mark, _At.OUTSIDE)
        return True
