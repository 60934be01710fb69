"""Harmony, the form of gpt-oss: thinking, calls of tools and the answer are messages of their own.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>`; a
call is one to a tool: `<|channel|>commentary to=functions.name <|constrain|>json<|message|>…`.
OpenAI describes the form in the repository of its own reader, which takes tokens of one vocabulary,
loads that vocabulary from elsewhere, and raises on what is malformed; so it is read here, as text.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from specc.server.parsers.bodies import NamedArguments
from specc.server.parsers.calls import CallFormat, Tools
from specc.server.parsers.events import Blanks, Event, HeldParser, Parser, Text, find_marker

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
# a message that the model has not ended ends where the next one begins
_BEGINS = (_START, _CHANNEL)
_HEADERS = (*_BEGINS, _MESSAGE, "<|constrain|>", "to=")
_ROLE = f"{_START}assistant"
# characters between the marks of a message's head; a name has 128 at most
_MAX_HEAD = 320
_FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_NAME_OF_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
# between messages of one kind
_BETWEEN = "\n"


@dataclass(frozen=True)
class HarmonyFormat:
    """As a `ReasoningFormat`; its parser finds calls, too."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*_BEGINS, _MESSAGE, "<|constrain|>", *_ENDS)

    def parser(self, prompt: str, ends: tuple[str, ...], tools: Tools) -> Parser:
        """For one output.

        Args:
            ends: of no use here.
            tools: that it may call.
        """
        return HarmonyParser(tools, prompt)


class _At(enum.Enum):
    """Where in a text it is."""

    HEAD = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()
    AFTER = enum.auto()


class HarmonyParser(HeldParser):
    """Tells thinking (channel analysis), calls of known tools, and content (all else) apart.

    Marks and heads are no text, but where a message is for a tool that the request has not, or does
    not begin as arguments do: then its head is content, too.

    Args:
        tools: of the request; without any, there are no calls.
        prompt: that the output follows, which may have begun a message.
    """

    def __init__(self, tools: Tools, prompt: str = "") -> None:
        self._tools = tools
        self._place = _At.HEAD
        # before it, after a call
        self._blanks = Blanks()
        # of a head, what the prompt has of it
        self._given = ""
        self._call: NamedArguments | None = None
        # the head of the call, while it may be none
        self._before = ""
        self._is_reasoning = False
        # a message has begun; there was text of a kind; a message has begun since that
        self._has_begun = False
        self._has_text: set[bool] = set()
        self._is_new = True
        _, found, begun = prompt.rpartition(_ROLE)
        if found:
            self.feed(begun)
            if self._place is _At.HEAD:
                self._given, self._held = self._held, ""
            self._has_text.clear()
            self._is_new = True

    def finish(self) -> list[Event]:
        events: list[Event] = []
        held, self._held = self._held, ""
        if self._place is _At.CALL:
            self._end_call(events)
        elif self._place is _At.TEXT:
            self._say(held, events)
        elif self._place is _At.HEAD and self._is_text(held):
            self._begin_text(is_reasoning=False)
            self._say(held, events)
        return events

    def _is_text(self, held: str) -> bool:
        """Whether what is left where a head was looked for is no part of one."""
        # whom a call is for comes first
        is_head = held.lstrip().startswith("to=functions.")
        if is_head or any(mark in held for mark in (*_BEGINS, _MESSAGE)):
            return False
        return bool(held.strip()) or not self._has_begun

    def _advance(self, events: list[Event]) -> bool:
        """Go on from one place to the next; False where more text is needed for that."""
        if self._place is _At.HEAD:
            return self._take_head(events)
        if self._place is _At.AFTER:
            return self._take_after()
        if self._place is _At.CALL:
            assert self._call is not None
            self._held = self._held[self._call.feed(self._held, 0, events) :]
            if self._call.is_open:
                return False
            if self._call.is_done:
                self._call, self._place = None, _At.AFTER
            else:
                self._end_call(events)
            return True
        size, marker = find_marker(self._held, *_ENDS, *_BEGINS)
        self._say(self._held[:size], events)
        self._held = self._held[size:]
        if marker is None:
            return False
        self._end_message(marker)
        return True

    def _take_after(self) -> bool:
        """After a call: white space and the mark that ends it."""
        rest = self._held = self._blanks.take(self._held)
        marker = next((mark for mark in (*_ENDS, *_BEGINS) if rest.startswith(mark)), None)
        if marker is not None:
            self._blanks.pop()
            self._end_message(marker)
        elif any(mark.startswith(rest) for mark in (*_ENDS, *_BEGINS)):
            return False
        else:
            self._held = self._blanks.pop() + rest
            self._begin_text(is_reasoning=False)
        return True

    def _end_message(self, marker: str) -> None:
        """A mark stands at the beginning of what is held."""
        if marker in _ENDS:
            self._held = self._held.removeprefix(marker)
        self._place = _At.HEAD

    def _take_head(self, events: list[Event]) -> bool:
        begin = self._held.lstrip()
        if not any(begin.startswith(mark) or mark.startswith(begin) for mark in _HEADERS):
            self._begin_text(is_reasoning=False)
            return True
        size, marker = find_marker(self._held, _MESSAGE, *_ENDS)
        if size > _MAX_HEAD:
            # a mark at the beginning would be taken for one again
            num_said = len(self._held) - len(begin) + 1
            self._begin_text(is_reasoning=False)
            self._say(self._held[:num_said], events)
            self._held = self._held[num_said:]
            return True
        if marker is None:
            return False
        self._has_begun = True
        head = self._given + self._held[:size]
        self._held, self._given = self._held[size + len(marker) :], ""
        if marker == _MESSAGE:
            self._begin_message(head, events)
        return True

    def _begin_message(self, head: str, events: list[Event]) -> None:
        channel, recipient = _NAME_OF_CHANNEL.search(head), _RECIPIENT.search(head)
        is_reasoning = channel is not None and channel[1] == "analysis"
        name = recipient[1] if recipient else None
        if name is not None and name not in self._tools:
            name = name.removeprefix(_FUNCTIONS)
        if name is not None and name in self._tools:
            self._call, self._place = NamedArguments(name), _At.CALL
            self._before = head.strip().removeprefix(_ROLE) + _MESSAGE
            return
        self._begin_text(is_reasoning)
        if name is not None and not is_reasoning:
            self._say(head.strip().removeprefix(_ROLE) + _MESSAGE, events)

    def _begin_text(self, is_reasoning: bool) -> None:
        self._has_begun = True
        self._place, self._is_reasoning, self._is_new = _At.TEXT, is_reasoning, True

    def _end_call(self, events: list[Event]) -> None:
        """The output has ended in it, or what comes is not of its form."""
        assert self._call is not None
        text = self._call.cut(events)
        if not self._call.num_calls:
            text = self._before + text
        self._call = None
        self._begin_text(is_reasoning=False)
        self._say(text, events)

    def _say(self, text: str, events: list[Event]) -> None:
        if not text:
            return
        if self._is_new and self._is_reasoning in self._has_text:
            text = _BETWEEN + text
        self._is_new = False
        self._has_text.add(self._is_reasoning)
        events.append(Text(text, self._is_reasoning))


def _no_body(_: Tools) -> NamedArguments:
    raise AssertionError("HarmonyParser reads these calls")


HARMONY = HarmonyFormat()
HARMONY_CALLS = CallFormat(_no_body, is_in_messages=True)
