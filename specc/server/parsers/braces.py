"""Arguments between braces as Gemma's models write them: JSON but for its quotes."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from typing import Any

from specc.server.parsers.bodies import Body
from specc.server.parsers.events import CallArguments, Event, find_marker
from specc.server.parsers.schema_part import SchemaPart
from specc.server.parsers.typed_text import as_json, in_string

_WHITE = " \t\r\n"
_CLOSINGS = {"{": "}", "[": "]"}
# levels of lists and objects, as in bodies of requests
_MAX_DEPTH = 64
_NULLS = ("null", "none", "nil")


class _Next(enum.Enum):
    OPENING = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    MORE_OR_END = enum.auto()


class BracedArguments(Body):
    """`{key:value,other:{key:[value,…]}}`, arguments of a tool whose name is known.

    Keys and words stand alone, strings between two marks of one kind, which nothing escapes.
    Words are numbers, `true`, `false` and `null`; another one is text. Strings are handed out as
    they come, words when they have ended.

    Args:
        schema: of its arguments: a string of one that may be no string is what it can be there.
        quote: the mark before and after a string.
    """

    def __init__(self, name: str, schema: Mapping[str, Any], quote: str) -> None:
        super().__init__()
        self._name, self._schema, self._quote = name, SchemaPart(schema), quote
        self._next = _Next.OPENING
        # what closes each level, and how many keys or values it has
        self._open: list[str] = []
        self._counts: list[int] = []
        self._keys: set[str] = set()
        # a key, a word or a mark that is read; of a string, what is not handed out yet
        self._part = ""
        self._is_mark = self._is_string = False
        self._types: frozenset[str] | None = None

    @property
    def raw(self) -> str:
        return super().raw + (self._part if self.num_calls else "")

    def cut(self, events: list[Event]) -> str:
        """As of all bodies; what was held back of a string belongs to it."""
        if self._is_string and self._next is _Next.VALUE:
            if self._types is None:
                events.append(CallArguments(in_string(self._part)))
            self._part = ""
        return super().cut(events)

    def _take(self, text: str, at: int, events: list[Event]) -> int:
        if self._is_string:
            return self._take_string(text, at, events)
        char = text[at]
        if self._is_mark:
            return at + self._take_mark(char, events)
        if not self._part and char in _WHITE:
            return at + 1
        if not self._part and char == self._quote[0] and self._next in (_Next.KEY, _Next.VALUE):
            self._is_mark = True
            return at + self._take_mark(char, events)
        return at + self._take_structure(char, events)

    def _take_mark(self, char: str, events: list[Event]) -> int:
        mark = self._part + char
        if not self._quote.startswith(mark):
            self.is_bad = True
            return 0
        self._part = mark
        if mark == self._quote:
            self._part, self._is_mark, self._is_string = "", False, True
            if self._next is _Next.VALUE:
                self._begin_value(events, "" if self._types else '"')
        return 1

    def _take_structure(self, char: str, events: list[Event]) -> int:
        """A character of a key, of a word, or around them; returns how many were taken."""
        wanted = self._next
        if wanted is _Next.OPENING and char == "{":
            self._begin(self._name, events)
            self._open_level(char, events)
        elif wanted is _Next.KEY and char == ":" and self._part:
            self._end_key(self._part.strip(_WHITE), events)
            self._next = _Next.VALUE
        elif wanted is _Next.COLON and char == ":":
            self._next = _Next.VALUE
        elif wanted is _Next.VALUE and char in _CLOSINGS and not self._part:
            self._begin_value(events)
            self._open_level(char, events)
        elif wanted is _Next.VALUE and char in ",}]" and (self._part or not self._may_close(char)):
            self._end_word(events)
            return 0
        elif wanted is _Next.MORE_OR_END and char == ",":
            self._next = _Next.KEY if self._open[-1] == "}" else _Next.VALUE
        elif not self._part and self._may_close(char):
            self._close_level(char, events)
        elif wanted is _Next.VALUE or (wanted is _Next.KEY and char not in "{}[],"):
            self._part += char
        else:
            self.is_bad = True
        return not self.is_bad

    def _may_close(self, char: str) -> bool:
        """Whether the innermost level may end with it here: no key waits for its value."""
        waits = self._next is _Next.COLON or (self._next is _Next.VALUE and self._open[-1] == "}")
        return bool(self._open) and char == self._open[-1] and not waits

    def _open_level(self, char: str, events: list[Event]) -> None:
        self.is_bad = len(self._open) == _MAX_DEPTH
        if self.is_bad:
            return
        events.append(CallArguments(char))
        self._open.append(_CLOSINGS[char])
        self._counts.append(0)
        self._next = _Next.KEY if char == "{" else _Next.VALUE
        self._types = None

    def _close_level(self, char: str, events: list[Event]) -> None:
        events.append(CallArguments(char))
        self._open.pop()
        self._counts.pop()
        self._next = _Next.MORE_OR_END
        if not self._open:
            self._has_arguments = True
            self._end(events)

    def _comma(self) -> str:
        self._counts[-1] += 1
        return ", " if self._counts[-1] > 1 else ""

    def _end_key(self, key: str, events: list[Event]) -> None:
        is_own = len(self._open) == 1
        if is_own and key in self._keys:
            self.is_bad = True
            return
        if is_own:
            self._keys.add(key)
        types = self._schema.property(key).types if is_own else None
        # what the model has put in quotes is text wherever it may be
        self._types = None if types is None or "string" in types else types
        events.append(CallArguments(f"{self._comma()}{json.dumps(key, ensure_ascii=False)}: "))
        self._part = ""

    def _begin_value(self, events: list[Event], opening: str = "") -> None:
        """Write what comes before a value: of a list, the comma after the last one."""
        comma = self._comma() if self._open[-1] == "]" else ""
        if comma + opening:
            events.append(CallArguments(comma + opening))

    def _end_word(self, events: list[Event]) -> None:
        self._begin_value(events)
        events.append(CallArguments(_word_json(self._part.strip(_WHITE))))
        self._part, self._next = "", _Next.MORE_OR_END

    def _take_string(self, text: str, at: int, events: list[Event]) -> int:
        """All of the text, up to the mark that ends the string."""
        num_held = len(self._part)
        held = self._part + text[at:]
        size, marker = find_marker(held, self._quote)
        is_key = self._next is _Next.KEY
        if marker is not None:
            self._is_string = False
            if is_key:
                self._part = ""
                self._end_key(held[:size], events)
                self._next = _Next.COLON
            else:
                events.append(CallArguments(as_json(held[:size], self._types)))
                self._part, self._next = "", _Next.MORE_OR_END
            return at + size + len(marker) - num_held
        certain = held[:size] if not is_key and self._types is None else ""
        if certain:
            events.append(CallArguments(in_string(certain)))
        self._part = held[len(certain) :]
        return len(text)


def _word_json(word: str) -> str:
    """A word as JSON: what is no number and no constant is text."""
    if word in ("true", "false"):
        return word
    if word.lower() in _NULLS:
        return "null"
    try:
        number = float(word) if "." in word or "e" in word.lower() else int(word)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    is_number = isinstance(number, int) or math.isfinite(number)
    return json.dumps(number if is_number else word)
