"""Parsers of a tool call's body: the name and arguments between its markers, or without them."""

from __future__ import annotations

import abc
import enum
import json
from collections.abc import Callable, Collection

from specc.server.parsers.events import CallArguments, CallBegin, CallEnd, Event
from specc.server.parsers.json_scan import JsonScan, skip_white

# keys of the arguments in the JSON of different models
_ARGUMENTS = ("arguments", "parameters")
# separators that may be left after the last complete call, and are no content
_REST = " \t\r\n,;]"


class Body(abc.ABC):
    """Incremental parser of one call format; its result does not depend on how the text is split.

    A call begins once its name is one of the request's tools and its arguments have begun. Until
    then the text may still turn out to be content; after that, deltas of the call are emitted.
    """

    def __init__(self) -> None:
        self.is_done = self.is_bad = False
        # nothing is consumed until more text disambiguates it, or the text ends
        self.is_waiting = self.is_last = False
        self.num_calls = 0
        self._raw: list[str] = []
        # inside a call whose arguments have begun
        self._is_in_call = self._has_arguments = False

    @property
    def is_open(self) -> bool:
        return not (self.is_done or self.is_bad)

    @property
    def raw(self) -> str:
        """Consumed characters that belong to no call."""
        return "".join(self._raw)

    def feed(self, text: str, at: int, events: list[Event], is_last: bool = False) -> int:
        """Consume characters from `at` on, appending to `events`.

        Args:
            is_last: the text is complete.
        Returns:
            Index of the first character that was not consumed. While the body is open, the next
            call has to pass the text from there on again.
        """
        begin = at
        self.is_waiting, self.is_last = False, is_last
        while at < len(text) and self.is_open and not self.is_waiting:
            at = self._take(text, at, events)
        if not self.num_calls:
            self._raw.append(text[begin:at])
        if self.is_bad and self._is_in_call and self._has_arguments:
            # everything a call needs is present
            self.is_bad = False
            self._end(events)
        return at

    def cut(self, events: list[Event]) -> str:
        """End the body early, or on a mismatch; returns the text that is content after all."""
        if self._is_in_call:
            self._is_in_call = False
            events.append(CallEnd(self._has_arguments))
        return self.raw

    @abc.abstractmethod
    def _take(self, text: str, at: int, events: list[Event]) -> int:
        """Consume one element of the format, or a prefix of one; returns the index after it."""

    def _begin(self, name: str, events: list[Event], call_id: str | None = None) -> None:
        self._is_in_call = True
        self.num_calls += 1
        self._raw.clear()
        events.append(CallBegin(name, call_id))

    def _end(self, events: list[Event]) -> None:
        """The call is complete, and with it the body."""
        self._is_in_call, self.is_done = False, True
        events.append(CallEnd(True))


class _Next(enum.Enum):
    OPENING = enum.auto()
    KEY = enum.auto()
    KEY_OR_END = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    MORE_OR_END = enum.auto()


class CallObject(Body):
    """`{"name": …, "arguments": {…}}`, in any order, with any further fields.

    Arguments may be called parameters, be null, or be written as a string, as OpenAI's API does.

    Args:
        needs_arguments: an object without arguments is no call.
        name_key: key of the tool's name.
        id_key: key of the call id, used if it precedes the arguments; "" is none.
    """

    def __init__(
        self,
        names: Collection[str],
        needs_arguments: bool = False,
        name_key: str = "name",
        id_key: str = "",
    ) -> None:
        super().__init__()
        self._names = names
        self._needs_arguments = needs_arguments
        self._parts = {name_key: "name"} | ({id_key: "id"} if id_key else {})
        self._name_key = name_key
        self._next = _Next.OPENING
        self._value: JsonScan | None = None
        # the key or value being read: its kind, and its text where all of it is needed at once
        self._part = ""
        self._text: list[str] = []
        self._key = ""
        self._name: str | None = None
        self._call_id: str | None = None
        # arguments that precede the name
        self._early: str | None = None

    def _take(self, text: str, at: int, events: list[Event]) -> int:
        value = self._value
        if value is not None:
            end = value.feed(text, at)
            self._read(text[at:end], events)
            if value.is_bad:
                self.is_bad = True
            elif value.is_done:
                self._value = None
                self._end_part("".join(self._text), events)
            return end
        at = skip_white(text, at)
        return at + self._take_structure(text[at], events) if at < len(text) else at

    def _read(self, text: str, events: list[Event]) -> None:
        if self._part == "object" and self._name is not None:
            events.append(CallArguments(text))
        elif self._part != "other":
            self._text.append(text)

    def _take_structure(self, char: str, events: list[Event]) -> int:
        """Consume a separator of keys and values; returns the number of characters."""
        wanted = self._next
        if wanted in (_Next.KEY, _Next.KEY_OR_END) and char == '"':
            self._begin_part("key")
            return 0
        if wanted is _Next.VALUE:
            self._begin_value(char, events)
            return 0
        if wanted is _Next.OPENING and char == "{":
            self._next = _Next.KEY_OR_END
        elif wanted is _Next.COLON and char == ":":
            self._next = _Next.VALUE
        elif wanted is _Next.MORE_OR_END and char == ",":
            self._next = _Next.KEY
        elif wanted in (_Next.MORE_OR_END, _Next.KEY_OR_END) and char == "}" and self._is_call:
            if not self._has_arguments:
                self._give("{}", events)
            self._end(events)
        else:
            self.is_bad = True
        return not self.is_bad

    @property
    def _is_call(self) -> bool:
        return self._name is not None and (self._has_arguments or not self._needs_arguments)

    def _begin_part(self, part: str) -> None:
        self._part, self._value = part, JsonScan()
        self._text.clear()

    def _begin_value(self, char: str, events: list[Event]) -> None:
        if self._key not in _ARGUMENTS:
            self._begin_part(self._parts.get(self._key, "other"))
        elif char == "{":
            self._begin_part("object")
            if self._name is not None:
                self._begin(self._name, events, self._call_id)
        elif char in ('"', "n"):
            self._begin_part("string")
        else:
            self.is_bad = True

    def _end_part(self, text: str, events: list[Event]) -> None:
        self._next = _Next.MORE_OR_END
        if self._part == "key":
            self._key = json.loads(text)
            self._next = _Next.COLON
            is_name = self._key == self._name_key
            has_it = self._name is not None if is_name else self._has_arguments
            self.is_bad = (is_name or self._key in _ARGUMENTS) and has_it
        elif self._part == "name":
            name = json.loads(text)
            if not isinstance(name, str) or name not in self._names:
                self.is_bad = True
                return
            self._name = name
            if self._early is not None:
                self._give(self._early, events)
        elif self._part == "id":
            written = json.loads(text)
            self._call_id = (written or None) if isinstance(written, str) else None
        elif self._part == "object":
            self._has_arguments = True
            if self._name is None:
                self._early = text
        elif self._part == "string":
            self._end_string(json.loads(text), events)

    def _end_string(self, value: str | None, events: list[Event]) -> None:
        """Arguments given as null, or as JSON in a string."""
        inner = "{}" if value is None else value
        scan = JsonScan()
        is_object = inner.lstrip().startswith("{")
        end = skip_white(inner, scan.feed(inner, 0)) if is_object else 0
        if not scan.is_done or end < len(inner):
            self.is_bad = True
        elif self._name is None:
            self._early, self._has_arguments = inner, True
        else:
            self._give(inner, events)

    def _give(self, arguments: str, events: list[Event]) -> None:
        """Begin the call and emit all of its arguments."""
        assert self._name is not None
        self._begin(self._name, events, self._call_id)
        self._has_arguments = True
        events.append(CallArguments(arguments))


class NamedArguments(Body):
    """A JSON object: arguments of a tool whose name is known.

    Args:
        call_id: that the model has given to the call.
    """

    def __init__(self, name: str, call_id: str | None = None) -> None:
        super().__init__()
        self._name = name
        self._call_id = call_id
        self._value: JsonScan | None = None

    def _take(self, text: str, at: int, events: list[Event]) -> int:
        if self._value is None:
            at = skip_white(text, at)
            if at == len(text):
                return at
            if text[at] != "{":
                self.is_bad = True
                return at
            self._value = JsonScan()
            self._begin(self._name, events, self._call_id)
        end = self._value.feed(text, at)
        events.append(CallArguments(text[at:end]))
        self.is_bad = self._value.is_bad
        if self._value.is_done:
            self._has_arguments = True
            self._end(events)
        return end


class CallsInTurn(Body):
    """A sequence of calls, each parsed by its own body."""

    def __init__(self, make_call: Callable[[], Body]) -> None:
        super().__init__()
        self._make_call = make_call
        self._call: Body | None = None

    def feed(self, text: str, at: int, events: list[Event], is_last: bool = False) -> int:
        """See `Body.feed`; characters inside a call go to the body of that call."""
        self.is_waiting, self.is_last = False, is_last
        while at < len(text) and self.is_open and not self.is_waiting:
            at = self._take(text, at, events)
        return at

    def cut(self, events: list[Event]) -> str:
        if self._call is not None:
            self._call.cut(events)
        return self.raw

    def _take(self, text: str, at: int, events: list[Event]) -> int:
        if self._call is None:
            return self._take_between(text, at)
        had_calls = self._call.num_calls
        end = self._call.feed(text, at, events, self.is_last)
        self.is_bad, self.is_waiting = self._call.is_bad, self._call.is_waiting
        if self._call.num_calls > had_calls:
            self.num_calls += 1
            self._raw.clear()
        if self._call.is_done:
            self._call = None
            self._end_call()
        return end

    @abc.abstractmethod
    def _take_between(self, text: str, at: int) -> int:
        """Consume separators up to the next call; see `_take`."""

    @abc.abstractmethod
    def _end_call(self) -> None:
        """A call has ended: set what may follow."""


class CallArray(CallsInTurn):
    """`[call, …]`, at least one; see `CallsInTurn`."""

    def __init__(self, make_call: Callable[[], Body]) -> None:
        super().__init__(make_call)
        self._wanted = "["

    @property
    def raw(self) -> str:
        text = super().raw + (self._call.raw if self._call else "")
        return "" if self.num_calls and not text.strip(_REST) else text

    def _end_call(self) -> None:
        self._wanted = ",]"

    def _take_between(self, text: str, at: int) -> int:
        end = skip_white(text, at)
        if end < len(text):
            char = text[end]
            if char not in self._wanted:
                self.is_bad = True
            else:
                end += 1
                self.is_done = char == "]"
                if not self.is_done:
                    self._call = self._make_call()
        self._raw.append(text[at:end])
        return end
