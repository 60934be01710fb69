"""Calls whose names and parameters stand between markers, without JSON around them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specc.server.parsers.bodies import Body, CallArray, CallObject, NamedArguments
from specc.server.parsers.events import CallArguments, Event, find_marker
from specc.server.parsers.json_scan import JsonScan, skip_white

ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_CONTAINERS = {"object": dict, "array": list, "boolean": bool, "null": type(None)}
# levels of references, each of which may lead to the next
_MAX_REFERENCES = 8


class MistralCalls(Body):
    """After `[TOOL_CALLS]`: `[{"name": …, "arguments": {…}}, …]`, or `name[ARGS]{…}`.

    The latter with or without `[ARGS]`, and with a `[CALL_ID]…` before it.

    Args:
        tools: of the request.
    """

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__()
        self._tools = tools
        self._inner: Body | None = None
        self._name = ""
        # what comes between the name and the arguments
        self._mark = ""
        self._has_mark = False

    @property
    def raw(self) -> str:
        return super().raw + (self._inner.raw if self._inner else "")

    def feed(self, text: str, at: int, events: list[Event]) -> int:
        """As of all bodies."""
        while at < len(text) and self.is_open:
            if self._inner is None:
                begin, at = at, self._take(text, at, events)
                self._raw.append(text[begin:at])
                continue
            at = self._inner.feed(text, at, events)
            self.num_calls = self._inner.num_calls
            self.is_done, self.is_bad = self._inner.is_done, self._inner.is_bad
            if self.num_calls:
                self._raw.clear()
        return at

    def cut(self, events: list[Event]) -> str:
        """As of all bodies."""
        if self._inner is not None:
            self._inner.cut(events)
        return self.raw

    def _take(self, text: str, at: int, events: list[Event]) -> int:
        """One character, or white space, before the arguments."""
        char = text[at]
        if self._mark:
            return at + self._take_mark(char)
        if not self._name or self._has_mark:
            end = skip_white(text, at)
            if end > at:
                return end
        if char == "[" and not self._name:
            self._inner = CallArray(lambda: CallObject(self._tools))
            return at
        if char == "{" and self._name in self._tools:
            self._inner = NamedArguments(self._name)
            return at
        if char == "[":
            return at + self._take_mark(char)
        self._name += char
        is_known = any(name.startswith(self._name) for name in self._tools)
        self.is_bad = self._has_mark or not is_known
        return at + (not self.is_bad)

    def _take_mark(self, char: str) -> int:
        """A character of `[ARGS]` or of `[CALL_ID]…`; returns how many were taken."""
        self._mark += char
        mark = self._mark
        if mark.startswith(CALL_ID):
            if mark.endswith(ARGS):
                self._mark, self._has_mark = "", True
        elif mark == ARGS:
            self._mark, self._has_mark = "", True
        elif self._has_mark or not (ARGS.startswith(mark) or CALL_ID.startswith(mark)):
            self.is_bad = True
        return not self.is_bad


class MarkedParameters(Body):
    """`<function=name> <parameter=key> value </parameter> … </function>`, as Qwen3-Coder's.

    Values are texts: what they are as JSON follows from the tool's schema. Those of strings are
    handed out as they come, others when they have ended; a line break after the opening marker and
    one before the closing marker are not theirs.

    Args:
        tools: of the request, with the schemas of their arguments.
    """

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__()
        self._tools = tools
        # what may come next, and how much of it is there; then the name after it
        self._wanted: tuple[str, ...] = (_FUNCTION,)
        self._mark = ""
        self._title: str | None = None
        self._schema: Mapping[str, Any] = {}
        self._keys: set[str] = set()
        # of the value that is read: its type, None for text; what is not handed out yet
        self._types: tuple[str, ...] | None = None
        self._value: str | None = None

    @property
    def raw(self) -> str:
        # of a call that has begun, the marker that is being read belongs to nothing yet
        return super().raw + (self._mark + (self._title or "") if self.num_calls else "")

    def _take(self, text: str, at: int, events: list[Event]) -> int:
        if self._value is not None:
            return self._take_value(text, at, events)
        if self._title is not None:
            return at + self._take_title(text[at], events)
        if not self._mark:
            at = skip_white(text, at)
        return at + self._take_mark(text[at], events) if at < len(text) else at

    def _take_mark(self, char: str, events: list[Event]) -> int:
        mark = self._mark + char
        if not any(wanted.startswith(mark) for wanted in self._wanted):
            self.is_bad = True
            return 0
        self._mark = mark
        if mark == _FUNCTION_END:
            events.append(CallArguments("}"))
            self._has_arguments = True
            self._end(events)
        elif mark in self._wanted:
            self._title = ""
        return 1

    def _take_title(self, char: str, events: list[Event]) -> int:
        """A character of a function's name, or of a parameter's."""
        assert self._title is not None
        if char != ">":
            self._title += char
            is_function = self._mark == _FUNCTION
            is_known = any(name.startswith(self._title) for name in self._tools)
            self.is_bad = char in "<\n" or (is_function and not is_known)
            return not self.is_bad
        title = self._title
        if self._mark == _FUNCTION:
            if title not in self._tools:
                self.is_bad = True
                return 0
            self._schema = self._tools[title] or {}
            self._begin(title, events)
            events.append(CallArguments("{"))
            self._wanted = (_PARAMETER, _FUNCTION_END)
        else:
            if title in self._keys:
                self.is_bad = True
                return 0
            comma = ", " if self._keys else ""
            self._keys.add(title)
            self._types = types_of(self._schema, title)
            self._value = ""
            self._is_first = True
            quote = "" if self._types else '"'
            key = json.dumps(title, ensure_ascii=False)
            events.append(CallArguments(f"{comma}{key}: {quote}"))
        self._mark, self._title = "", None
        return 1

    _is_first = False

    def _take_value(self, text: str, at: int, events: list[Event]) -> int:
        """All of the text, up to the marker that ends the value."""
        assert self._value is not None
        num_held = len(self._value)
        held = self._value + text[at:]
        size, marker = find_marker(held, _PARAMETER_END)
        if self._is_first and held:
            # the line break after the opening marker
            self._is_first = False
            if held[0] == "\n":
                num_held -= 1
                size -= size > 0
                held = held[1:]
        if marker is not None:
            value = held[:size].removesuffix("\n")
            events.append(CallArguments(_as_json(value, self._types)))
            self._value = None
            return at + size + len(marker) - num_held
        # a line break may be the last before the marker
        certain = held[:size].removesuffix("\n") if not self._types else ""
        if certain:
            events.append(CallArguments(_in_string(certain)))
        self._value = held[len(certain) :]
        return len(text)

    def cut(self, events: list[Event]) -> str:
        """As of all bodies; what was held back of a text belongs to it."""
        if self._value and not self._types:
            events.append(CallArguments(_in_string(self._value)))
        self._value = None
        return super().cut(events)


def types_of(schema: Mapping[str, Any], key: str) -> tuple[str, ...] | None:
    """Types that an argument may have, in the schema's order; None where it is text."""
    properties = schema.get("properties")
    own = properties.get(key) if isinstance(properties, Mapping) else None
    found = tuple(dict.fromkeys(_types(own, schema, _MAX_REFERENCES)))
    return None if found in ((), ("string",)) else found


def _types(part: Any, root: Mapping[str, Any], depth: int) -> list[str]:
    if not isinstance(part, Mapping) or not depth:
        return []
    declared = part.get("type")
    types = [declared] if isinstance(declared, str) else []
    if isinstance(declared, list):
        types += [item for item in declared if isinstance(item, str)]
    for name in ("anyOf", "oneOf"):
        choices = part.get(name)
        for choice in choices if isinstance(choices, list) else ():
            types += _types(choice, root, depth - 1)
    reference = part.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found: Any = root
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        types += _types(found, root, depth - 1)
    return types


def _as_json(value: str, types: tuple[str, ...] | None) -> str:
    """A value as JSON: of the first of the types that it can have, else text."""
    if types is None:
        return _in_string(value) + '"'
    text = value.strip()
    # templates write Python's None
    if "null" in types and text in ("null", "None"):
        return "null"
    for name in types:
        if name == "string":
            break
        if name == "boolean" and text.lower() in ("true", "false"):
            return text.lower()
        if _is_of(text, name):
            return text
    return json.dumps(value, ensure_ascii=False)


def _is_of(text: str, name: str) -> bool:
    scan = JsonScan()
    # what follows a number ends it
    if scan.feed(text + " ", 0) != len(text) or not scan.is_done:
        return False
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if name in ("integer", "number"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (name == "number" or isinstance(value, int) or value.is_integer())
    return isinstance(value, _CONTAINERS.get(name, ()))


def _in_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
