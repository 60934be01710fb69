"""Calls as Python writes them: `name(key=value, …)`. Nothing of them is ever run."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Collection
from typing import Any

from specc.server.parsers.bodies import Body, CallArray
from specc.server.parsers.events import CallArguments, Event

_WHITE = " \t\r\n"
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
# levels of lists and dicts in a value, as in bodies of requests
_MAX_DEPTH = 64
# as JSON has them: models see their tools in JSON
_WORDS = {"true": True, "false": False, "null": None}


class PythonCall(Body):
    """`name(key=value, …)`: values are literals, and handed out when they have ended.

    A call begins with its first `=`, or with `)` where it has no arguments; so what has arguments
    without names is text.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._name: str | None = None
        self._keys: set[str] = set()
        # what is read, and belongs to no call yet: the name, or a key and its value
        self._part = ""
        self._value: PythonValue | None = None
        self._may_end = True

    @property
    def raw(self) -> str:
        return super().raw + (self._part if self.num_calls else "")

    def _take(self, text: str, at: int, events: list[Event]) -> int:
        if self._value is None:
            return at + self._take_structure(text[at], events)
        end = self._value.feed(text, at)
        self._part += text[at:end]
        if self._value.is_bad:
            self.is_bad = True
        elif self._value.is_done:
            self._end_value(self._value.text, events)
        return end

    def _take_structure(self, char: str, events: list[Event]) -> int:
        """A character of a name, or between arguments; returns how many were taken."""
        word = self._part.strip(_WHITE)
        if self._name is None:
            self._take_name(char, word)
        elif char == ")" and not word and self._may_end:
            if not self.num_calls:
                self._begin(self._name, events)
                events.append(CallArguments("{"))
            events.append(CallArguments("}"))
            self._has_arguments = True
            self._end(events)
        elif char == "=":
            self._begin_value(word, events)
        elif char in _WHITE or (self._part + char).strip(_WHITE).isidentifier():
            self._part += char
        else:
            self.is_bad = True
        return not self.is_bad

    def _take_name(self, char: str, word: str) -> None:
        if char == "(":
            self._name, self._part = word, ""
            self.is_bad = word not in self._names
        elif char in _WHITE and not word:
            self._part += char
        else:
            self.is_bad = not any(name.startswith(word + char) for name in self._names)
            if not self.is_bad:
                self._part += char

    def _begin_value(self, key: str, events: list[Event]) -> None:
        self.is_bad = not key.isidentifier() or key in self._keys
        if self.is_bad:
            return
        if not self.num_calls:
            assert self._name is not None
            part = self._part
            self._begin(self._name, events)
            self._part = part
            events.append(CallArguments("{"))
        self._keys.add(key)
        self._part += "="
        self._value = PythonValue()

    def _end_value(self, value: str, events: list[Event]) -> None:
        written = literal_json(value)
        if written is None:
            self.is_bad = True
            return
        key = json.dumps(self._part.split("=", 1)[0].strip(_WHITE), ensure_ascii=False)
        comma = ", " if len(self._keys) > 1 else ""
        events.append(CallArguments(f"{comma}{key}: {written}"))
        self._part, self._value = "", None


class PythonValue:
    """Finds where a value ends: at a comma, or at a bracket that it has not opened.

    A comma is taken, and belongs to no value; a bracket is left. Where it ends depends on the
    characters alone, not on how they are cut.
    """

    def __init__(self) -> None:
        self.is_done = self.is_bad = False
        self._text: list[str] = []
        self._open: list[str] = []
        # what ends the string that is read; quotes that may become a longer one
        self._end = self._quotes = ""
        self._is_escaped = False

    @property
    def text(self) -> str:
        """What was read, without the comma."""
        return "".join(self._text)

    def feed(self, text: str, at: int) -> int:
        """Take characters from a place on; returns the first one that was not taken."""
        while at < len(text) and not (self.is_done or self.is_bad):
            char = text[at]
            if self._end:
                self._take_in_string(char)
            elif not self._take_quote(char):
                if self._ends(char):
                    self.is_done = True
                    return at + (char == ",")
                if self.is_bad:
                    return at
            self._text.append(char)
            at += 1
        return at

    def _take_in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped, self._quotes = False, ""
        elif char == "\\":
            self._is_escaped, self._quotes = True, ""
        else:
            self._quotes = (self._quotes + char)[-len(self._end) :]
            if self._quotes == self._end:
                self._end = self._quotes = ""

    def _take_quote(self, char: str) -> bool:
        """Whether a string begins, or may: three quotes begin a long one, two are an empty one."""
        quotes = self._quotes
        if quotes:
            if char == quotes[0] and len(quotes) < 2:
                self._quotes = quotes + char
                return True
            self._quotes = ""
            if len(quotes) == 2:
                self._end = quotes[0] * 3 if char == quotes[0] else ""
                return bool(self._end)
            self._end = quotes
            self._take_in_string(char)
            return True
        if char in "\"'":
            self._quotes = char
        return bool(self._quotes)

    def _ends(self, char: str) -> bool:
        if char in _BRACKETS:
            self._open.append(_BRACKETS[char])
            self.is_bad = len(self._open) > _MAX_DEPTH
        elif not self._open:
            return char in ",)]}"
        elif char in ")]}":
            self.is_bad = self._open.pop() != char
        return False


class CallLines(CallArray):
    """Calls one after the other, with white space or commas between them, up to a marker."""

    def _take_between(self, text: str, at: int) -> int:
        end = at
        while end < len(text) and text[end] in _WHITE + ",":
            end += 1
        self._raw.append(text[at:end])
        if end < len(text):
            if text[end] == "<" and self.num_calls:
                self.is_done = True
            else:
                self._call = self._make_call()
        return end


def literal_json(text: str) -> str | None:
    """A Python literal as JSON; None where it is none, or where JSON has no such value."""
    try:
        with warnings.catch_warnings():
            # of escapes that Python does not know, which stay as they are
            warnings.simplefilter("ignore")
            node = ast.parse(text.strip(), mode="eval").body
        value = _value(node)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        # half of a character of two parts is no text that could be sent
        is_text = not any("\ud800" <= char <= "\udfff" for char in written)
        return written if is_text else json.dumps(value, allow_nan=False)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    """Raises ValueError: it is no literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {_key(key): _value(value) for key, value in pairs}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _value(node.operand)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number if isinstance(node.op, ast.USub) else number
    raise ValueError(node)


def _key(node: ast.expr | None) -> str:
    key = None if node is None else _value(node)
    if not isinstance(key, str):
        raise ValueError(node)
    return key
