"""Calls between markers of their own, with further markers around all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from specc.server.parsers.bodies import Body, CallsInTurn, NamedArguments
from specc.server.parsers.events import Event
from specc.server.parsers.json_scan import skip_white

# in the head of a call: where its name stands
NAME = ""
_NAME_CHARS = re.compile(r"[\w.:/-]*", re.ASCII)
# of a name as the model writes it, with a prefix and a number
_MAX_NAME = 192
_NUMBERED = re.compile(r"(?:functions\.)?(.+):\d+")


class Section(CallsInTurn):
    """`before call after before call after … closing`, at least one call.

    What opens it has been read. White space may stand between all of these. Where `after` is
    missing, the next mark does; where `closing` is, other text.

    Args:
        before: marker before each call.
        closing: marker after the last one.
        after: marker after each call; none for "".
    """

    def __init__(
        self, make_call: Callable[[], Body], before: str, closing: str, after: str = ""
    ) -> None:
        super().__init__(make_call)
        self._before, self._after, self._closing = before, after, closing
        self._wanted: tuple[str, ...] = (before,)
        self._mark = ""

    @property
    def raw(self) -> str:
        return super().raw + self._mark + (self._call.raw if self._call else "")

    def cut(self, events: list[Event]) -> str:
        """As of all bodies; a part of a marker after a call is no text where the output ends."""
        raw = super().cut(events)
        return "" if self._call is None and self.num_calls and not self.is_bad else raw

    def _end_call(self) -> None:
        marks = (self._after, self._before, self._closing)
        self._wanted = tuple(mark for mark in marks if mark)

    def _take_between(self, text: str, at: int) -> int:
        if not self._mark:
            end = skip_white(text, at)
            if end > at:
                self._raw.append(text[at:end])
                return end
        mark = self._mark + text[at]
        if not any(wanted.startswith(mark) for wanted in self._wanted):
            self.is_bad = True
            return at
        self._mark = mark
        if mark in self._wanted:
            self._raw.append(mark)
            self._mark = ""
            if mark == self._before:
                self._call = self._make_call()
            elif mark == self._closing:
                self.is_done = True
            else:
                self._raw.clear()
                self._wanted = (self._before, self._closing)
        return at + 1


class HeadedCall(Body):
    """A head that holds the tool's name, and then its arguments, which are a JSON object mostly.

    Args:
        head: markers and other words, in their order; `NAME` where the name stands. White space may
            stand between them.
        is_numbered: the name is written as `functions.name:0`, which is the id of the call.
        make_body: what follows the head, of the name in it and the id.
        tail: a character after the arguments; none for "".
    """

    def __init__(
        self,
        names: Collection[str],
        head: tuple[str, ...],
        is_numbered: bool = False,
        make_body: Callable[[str, str | None], Body] = NamedArguments,
        tail: str = "",
    ) -> None:
        super().__init__()
        self._names = names
        self._tail = tail
        self._head = list(head)
        self._is_numbered = is_numbered
        self._make_body = make_body
        # what is there of the next part of the head
        self._part = ""
        self._name = ""
        self._call_id: str | None = None
        self._arguments: Body | None = None

    @property
    def raw(self) -> str:
        return super().raw + (self._arguments.raw if self._arguments else "")

    def feed(self, text: str, at: int, events: list[Event], is_last: bool = False) -> int:
        self.is_waiting = False
        while at < len(text) and self.is_open and not self.is_waiting:
            if self._arguments is None:
                begin, at = at, self._take(text, at, events)
                self._raw.append(text[begin:at])
                continue
            if self._arguments.is_done:
                at = self._take_tail(text, at)
                continue
            at = self._arguments.feed(text, at, events, is_last)
            self.is_bad, self.is_waiting = self._arguments.is_bad, self._arguments.is_waiting
            self.is_done = self._arguments.is_done and not self._tail
            if self._arguments.num_calls > self.num_calls:
                self.num_calls = self._arguments.num_calls
                self._raw.clear()
        return at

    def cut(self, events: list[Event]) -> str:
        if self._arguments is not None:
            self._arguments.cut(events)
        return self.raw

    def _take(self, text: str, at: int, events: list[Event]) -> int:
        if not self._part:
            end = skip_white(text, at)
            if end > at:
                return end
        if not self._head:
            self._arguments = self._make_body(self._name, self._call_id)
            return at
        if self._head[0] == NAME:
            return self._take_name(text, at)
        part = self._part + text[at]
        if not self._head[0].startswith(part):
            self.is_bad = True
            return at
        self._part = part
        if part == self._head[0]:
            del self._head[0]
            self._part = ""
        return at + 1

    def _take_tail(self, text: str, at: int) -> int:
        at = skip_white(text, at)
        if at == len(text):
            return at
        self.is_done = text[at] == self._tail
        self.is_bad = not self.is_done
        return at + self.is_done

    def _take_name(self, text: str, at: int) -> int:
        match = _NAME_CHARS.match(text, at, at + _MAX_NAME + 1 - len(self._part))
        end = match.end() if match else at
        self._part += text[at:end]
        self.is_bad = len(self._part) > _MAX_NAME
        if end < len(text) and not self.is_bad:
            self._end_name(self._part)
            del self._head[0]
            self._part = ""
        return end

    def _end_name(self, written: str) -> None:
        self._name = written
        if self._is_numbered:
            found = _NUMBERED.fullmatch(written)
            self._name, self._call_id = (found[1], written) if found else ("", None)
        self.is_bad = self._name not in self._names
