"""Calls whose names and parameters stand between markers, without JSON around them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specc.server.parsers.bodies import Body, CallArray, CallObject, NamedArguments
from specc.server.parsers.events import CallArguments, Event, find_marker
from specc.server.parsers.json_scan import JsonScan, skip_white
from specc.server.parsers.schema_part import types_of

ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
# a name in an attribute, and DeepSeek's next one
_QUOTED = re.compile(r"""\s*(["'])([^"']*)\1(?:\s+string=(["'])(true|false)\3)?\s*""")
# of a value that is JSON, whatever the schema says
ANY_TYPE = ("null", "boolean", "number", "array", "object")
_CONTAINERS = {"object": dict, "array": list, "boolean": bool, "null": type(None)}


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


@dataclass(frozen=True)
class Marks:
    """What stands around names and values of a call.

    Args:
        function: before the name of the tool, which `title_end` ends; where there is none, the name
            comes first, and white space or a mark ends it.
        end: after the last value.
        name_end: after the name of the tool where `function` is "": nothing else ends it then.
        parameter: before the name of a parameter.
        title_end: after it.
        value: before its value, which begins with `title_end` where there is no such mark.
        value_end: after its value.
        is_quoted: names stand in quotes. After a parameter's, `string="true"` may say that its
            value is text, and `string="false"` that it is JSON.
        has_lines: a value stands on lines of its own: a line break after the mark before it, and
            one before the mark after it, are not a part of it.
    """

    function: str
    end: str
    parameter: str
    title_end: str
    value_end: str
    value: str = ""
    is_quoted: bool = False
    has_lines: bool = True
    name_end: str = ""


QWEN_MARKS = Marks("<function=", "</function>", "<parameter=", ">", "</parameter>")


class MarkedParameters(Body):
    """`<function=name> <parameter=key> value </parameter> … </function>`, or with other marks.

    Values are texts: what they are as JSON follows from the tool's schema. Those of strings are
    handed out as they come, others when they have ended.

    Args:
        tools: of the request, with the schemas of their arguments.
        marks: around names and values.
        is_open: the mark before the tool's name has been read.
    """

    def __init__(
        self, tools: Mapping[str, Any], marks: Marks = QWEN_MARKS, is_open: bool = False
    ) -> None:
        super().__init__()
        self._tools = tools
        self._marks = marks
        # of the tool, while the call has not begun
        self._name: str | None = None
        # what may come next, and how much of it is there; then the name after it
        self._wanted: tuple[str, ...] = (marks.function,)
        self._mark = ""
        self._title: str | None = "" if is_open or not marks.function else None
        self._has_name = False
        self._schema: Mapping[str, Any] = {}
        self._keys: set[str] = set()
        # of the value that is read: its type, None for text; what has come before the rest of it,
        # where it is no text, and that rest, in which its end may have begun
        self._types: tuple[str, ...] | None = None
        self._kept: list[str] = []
        self._value: str | None = None
        self._is_first = False

    @property
    def raw(self) -> str:
        # of a call that has begun, the marker that is being read belongs to nothing yet
        return super().raw + (self._mark + (self._title or "") if self.num_calls else "")

    def _take(self, text: str, at: int, events: list[Event]) -> int:
        if self._value is not None:
            return self._take_value(text, at, events)
        if self._title is not None:
            if not self._has_name and not self._marks.function:
                return self._take_bare_name(text, at)
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
        if mark not in self._wanted:
            return 1
        if self._name is not None:
            self._begin_call(self._name, events)
        if mark == self._marks.end:
            events.append(CallArguments("}"))
            self._has_arguments = True
            self._end(events)
        elif mark == self._marks.value:
            self._begin_value()
        elif mark == self._marks.name_end:
            self._mark, self._wanted = "", (self._marks.parameter, self._marks.end)
        else:
            self._title = ""
        return 1

    def _after_name(self) -> tuple[str, ...]:
        """Marks that may follow a name that no mark stands before."""
        marks = self._marks
        return (marks.name_end,) if marks.name_end else (marks.parameter, marks.end)

    def _take_bare_name(self, text: str, at: int) -> int:
        """A name that no mark stands before, up to white space or a mark."""
        assert self._title is not None
        if not self._title:
            at = skip_white(text, at)
            if at == len(text):
                return at
        char = text[at]
        if char in " \t\r\n<":
            self._name, self._title, self._has_name = self._title, None, True
            self.is_bad = self._name not in self._tools
            self._wanted = self._after_name()
            return at
        self._title += char
        self.is_bad = not any(name.startswith(self._title) for name in self._tools)
        return at + (not self.is_bad)

    def _take_title(self, char: str, events: list[Event]) -> int:
        """A character of a function's name, or of a parameter's."""
        assert self._title is not None
        title, end = self._title + char, self._marks.title_end
        if not self._has_name and char == ">":
            return self._end_name(self._title, events)
        if self._has_name and title.endswith(end):
            return self._end_key(title.removesuffix(end), events)
        # of a mark, only the one that ends it
        mark_at = title.find("<")
        self.is_bad = char == "\n" or (mark_at >= 0 and not end.startswith(title[mark_at:]))
        if not self._has_name:
            begin = title.lstrip(" \"'") if self._marks.is_quoted else title
            begin = begin.rstrip(" \"'") if self._marks.is_quoted else begin
            self.is_bad |= not any(name.startswith(begin) for name in self._tools)
        if not self.is_bad:
            self._title = title
        return not self.is_bad

    def _end_name(self, title: str, events: list[Event]) -> int:
        name, _ = self._unquoted(title)
        if name is None or name not in self._tools:
            self.is_bad = True
            return 0
        self._begin_call(name, events)
        self._has_name = True
        self._wanted = (self._marks.parameter, self._marks.end)
        self._mark, self._title = "", None
        return 1

    def _begin_call(self, name: str, events: list[Event]) -> None:
        self._name = None
        self._schema = self._tools[name] or {}
        self._begin(name, events)
        events.append(CallArguments("{"))

    def _end_key(self, title: str, events: list[Event]) -> int:
        key, is_text = self._unquoted(title)
        if key is None or key in self._keys:
            self.is_bad = True
            return 0
        comma = ", " if self._keys else ""
        self._keys.add(key)
        self._types = types_of(self._schema, key)
        if is_text is not None:
            self._types = None if is_text else self._types or ANY_TYPE
        quote = "" if self._types else '"'
        events.append(CallArguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: {quote}"))
        self._mark, self._title = "", None
        if self._marks.value:
            self._wanted = (self._marks.value,)
        else:
            self._begin_value()
        return 1

    def _unquoted(self, title: str) -> tuple[str | None, bool | None]:
        """The name, None where it is malformed, and what is said about its value."""
        if not self._marks.is_quoted:
            return title, None
        found = _QUOTED.fullmatch(title)
        if found is None:
            return None, None
        return found[2], None if found[4] is None else found[4] == "true"

    def _begin_value(self) -> None:
        self._mark, self._value = "", ""
        self._is_first = self._marks.has_lines
        self._wanted = (self._marks.parameter, self._marks.end)

    def _take_value(self, text: str, at: int, events: list[Event]) -> int:
        """All of the text, up to the marker that ends the value."""
        assert self._value is not None
        num_held = len(self._value)
        held = self._value + text[at:]
        size, marker = find_marker(held, self._marks.value_end)
        if self._is_first and held:
            # the line break after the opening marker
            self._is_first = False
            if held[0] == "\n":
                num_held -= 1
                size -= size > 0
                held = held[1:]
        last = "\n" if self._marks.has_lines else ""
        if marker is not None:
            value = "".join([*self._kept, held[:size]]).removesuffix(last)
            events.append(CallArguments(as_json(value, self._types)))
            self._value = None
            self._kept.clear()
            return at + size + len(marker) - num_held
        # a line break may be the last before the marker
        certain = held[:size].removesuffix(last)
        if self._types:
            self._kept.append(certain)
        elif certain:
            events.append(CallArguments(in_string(certain)))
        self._value = held[len(certain) :]
        return len(text)

    def cut(self, events: list[Event]) -> str:
        """As of all bodies; what was held back of a text belongs to it."""
        if self._value and not self._types:
            events.append(CallArguments(in_string(self._value)))
        self._value = None
        self._kept.clear()
        return super().cut(events)


def as_json(value: str, types: tuple[str, ...] | None) -> str:
    """A value as JSON: of the first of the types that it can have, else text.

    Args:
        value: as the model wrote it.
        types: see `types_of`; None is a text, whose opening quote has been written.
    """
    if types is None:
        return in_string(value) + '"'
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


def in_string(text: str) -> str:
    """A text, or a part of one, as it stands between quotes in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
