"""Calls of tools in a text: where they begin and end, and what is text all the same."""

from __future__ import annotations

import enum
import secrets
import string
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specc.server.parsers.bodies import Body
from specc.server.parsers.events import Blanks, Event, HeldParser, Text, find_marker

# name of a tool → schema of its arguments
Tools = Mapping[str, Any]
_WHITE = " \t\r\n"


def openai_id() -> str:
    """An id as OpenAI's."""
    return f"call_{uuid.uuid4().hex[:24]}"


def short_id() -> str:
    """Nine letters and digits: templates of Mistral's models refuse any other."""
    letters = string.ascii_letters + string.digits
    return "".join(secrets.choice(letters) for _ in range(9))


@dataclass(frozen=True)
class CallFormat:
    """How a family of models writes calls.

    Args:
        make_body: what comes after the opening marker.
        opening: marker before a call; without one, and without `bare`, all of the text is one body.
        closing: marker after it; none for "".
        other_marks: further pairs of markers that may stand in place of these two.
        starts: what a call begins with itself: models leave the opening marker out.
        bare: the character with which a call begins that stands without a marker, at the
            beginning or after another call; none for "".
        between: characters besides white space between two such calls.
        inner: further markers, inside of a call.
        interrupts: a text with which a call begins in the middle of thinking, and ends it.
        is_in_messages: calls are messages of their own, and read by the parser of thinking.
        is_numbered: ids are `functions.name:0`, as templates want them.
    """

    make_body: Callable[[Tools], Body]
    opening: str = ""
    closing: str = ""
    other_marks: tuple[tuple[str, str], ...] = ()
    starts: tuple[str, ...] = ()
    bare: str = ""
    between: str = ""
    inner: tuple[str, ...] = ()
    interrupts: str = ""
    is_in_messages: bool = False
    make_id: Callable[[], str] = openai_id
    is_numbered: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        closings = (self.closing, *(closing for _, closing in self.other_marks))
        return tuple(m for m in (*self.openings, *closings, *self.inner) if m)

    @property
    def openings(self) -> tuple[str, ...]:
        others = tuple(opening for opening, _ in self.other_marks)
        return (self.opening, *others) if self.opening else ()

    def closing_of(self, opening: str) -> str:
        """The marker after a call that this one, or none of these, stands before."""
        return dict(self.other_marks).get(opening, self.closing)


class _At(enum.Enum):
    """Where in a text it is."""

    BARE = enum.auto()
    TEXT = enum.auto()
    BODY = enum.auto()
    CLOSING = enum.auto()


class CallParser(HeldParser):
    """Finds calls; everything else is text.

    What has the form of a call up to its arguments is one, with what is there of these. Before
    that, anything that is not of the form (no JSON, the name of no tool) makes it text, markers
    included.
    """

    def __init__(self, form: CallFormat, tools: Tools) -> None:
        self._form = form
        self._tools = tools
        self._is_last = False
        self._place = _At.BARE if form.bare else _At.TEXT
        self._between = self._closing = ""
        # before it, where a call may begin or be closed
        self._blanks = Blanks()
        self._body: Body | None = None
        # what came before the body and is text if it is no call
        self._before = ""
        if not form.opening and not form.bare:
            self._begin_body("")

    def finish(self) -> list[Event]:
        events: list[Event] = []
        self._is_last = True
        while self._held and self._advance(events):
            pass
        held, self._held = self._blanks.pop() + self._held, ""
        if self._place is _At.BODY:
            self._end_body(events)
        elif self._between and (self._place is _At.CLOSING or not held.strip(self._between)):
            # white space, and a part of what closes a call
            return events
        if held:
            events.append(Text(held))
        return events

    def _advance(self, events: list[Event]) -> bool:
        """Go on from one place to the next; False where more text is needed for that."""
        if self._place is _At.BODY:
            assert self._body is not None
            self._held = self._held[self._body.feed(self._held, 0, events, self._is_last) :]
            if self._body.is_open:
                return False
            if self._body.is_done:
                self._body, self._before = None, ""
                self._between = _WHITE + self._form.between
                self._place = _At.CLOSING if self._closing else self._after_call()
            else:
                self._end_body(events)
            return True
        if self._place is _At.TEXT:
            size, marker = find_marker(self._held, *self._form.openings, *self._form.starts)
            if size:
                events.append(Text(self._held[:size]))
            self._held = self._held[size:]
            if marker in self._form.openings:
                self._held = self._held.removeprefix(marker)
                self._begin_body(marker)
            elif marker is not None:
                self._begin_body("")
            return marker is not None
        rest = self._held = self._blanks.take(self._held, self._between or _WHITE)
        if self._place is _At.CLOSING:
            return self._close(rest)
        if not rest:
            return False
        if rest[0] != self._form.bare or rest.startswith(self._form.openings):
            self._begin_text()
        elif any(opening.startswith(rest) for opening in self._form.openings):
            return False
        else:
            self._begin_body(self._blanks.pop())
        return True

    def _close(self, rest: str) -> bool:
        closing = self._closing
        if len(rest) < len(closing) and closing.startswith(rest):
            return False
        if rest.startswith(closing):
            self._held = rest.removeprefix(closing)
            self._blanks.pop()
        self._place = self._after_call()
        if self._place is _At.TEXT:
            self._begin_text()
        return True

    def _begin_text(self) -> None:
        """Treat held-back characters, and the white space before them, as content."""
        self._held = self._blanks.pop() + self._held
        self._place = _At.TEXT

    def _after_call(self) -> _At:
        return _At.BARE if self._form.bare else _At.TEXT

    def _begin_body(self, before: str) -> None:
        self._place = _At.BODY
        self._body, self._before = self._form.make_body(self._tools), before
        self._closing = self._form.closing_of(before)

    def _end_body(self, events: list[Event]) -> None:
        """The text has ended in it, or what comes is not of its form."""
        assert self._body is not None
        text = self._body.cut(events)
        if not self._body.num_calls:
            text = self._before + text
        if text:
            events.append(Text(text))
        self._body, self._before, self._place = None, "", _At.TEXT
