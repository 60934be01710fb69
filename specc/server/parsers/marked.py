"""Calls whose names and parameters stand between markers, without JSON around them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specc.server.parsers.bodies import Body, CallArray, CallObject, NamedArguments
from specc.server.parsers.events import CallArguments, Event
from specc.server.parsers.json_scan import skip_white
from specc.server.parsers.schema_part import SchemaPart
from specc.server.parsers.typed_text import ANY_TYPE, as_json, can_be, in_string
from specc.server.parsers.value_end import MAX_TAG, Follows, Marks, ValueEnd

ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"


class MistralCalls(Body):
    """After `[TOOL_CALLS]`: `[{"name": …, "arguments": {…}}, …]`, or `name[ARGS]{…}`.

    The latter with or without `[ARGS]`, and with a `[CALL_ID]…` before it.
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

    def feed(self, text: str, at: int, events: list[Event], is_last: bool = False) -> int:
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


QWEN_MARKS = Marks("<function=", "</function>", "<parameter=", ">", "</parameter>")


class MarkedParameters(Body):
    """`<function=name> <parameter=key> value </parameter> … </function>`, or with other marks.

    Values are texts: what they are as JSON follows from the tool's schema. Those of strings are
    handed out as they come, others when they have ended. A call begins with its first parameter, or
    its end: a name alone may be spoken of.

    Args:
        tools: of the request, with the schemas of their arguments.
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
        self._schema = SchemaPart({})
        self._keys: set[str] = set()
        # of the value that is read: where it ends, what its schema says and its types, None for
        # text; what has come of it, where it is no text
        self._value: ValueEnd | None = None
        self._part = SchemaPart({})
        self._types: frozenset[str] | None = None
        self._kept: list[str] = []
        self._is_first = False
        self._between = ValueEnd(marks, tools, lambda _: False, None)

    @property
    def raw(self) -> str:
        # of a call that has begun, the marker that is being read belongs to nothing yet
        return super().raw + (self._mark + (self._title or "") if self.num_calls else "")

    def _take(self, text: str, at: int, events: list[Event]) -> int:
        if self._value is not None:
            return self._take_value(self._value, text, at, events)
        if self._title is not None:
            if not self._has_name and not self._marks.function:
                return self._take_bare_name(text, at)
            return at + self._take_title(text[at], events)
        if not self._mark:
            at = skip_white(text, at)
            found = self._is_over(text, at)
            self.is_waiting = found is Follows.MAYBE
            if found is not Follows.NO:
                if found is Follows.YES and not self.is_bad:
                    self._end_call(events)
                return at
        return at + self._take_mark(text[at], events) if at < len(text) else at

    def _is_over(self, text: str, at: int) -> Follows:
        """Whether what stands there comes after the call: models leave the mark of its end out."""
        if self._marks.end not in self._wanted or at == len(text):
            return Follows.NO
        found = self._between.closes(text, at, self.is_last)
        if found is not Follows.NO:
            return found
        found = self._between.opens(text[at : at + MAX_TAG], not self.is_last)
        # a name that no arguments follow is only spoken of
        self.is_bad = found is Follows.YES and not self.num_calls
        return found

    def _end_call(self, events: list[Event]) -> None:
        if self._name is not None:
            self._begin_call(self._name, events)
        events.append(CallArguments("}"))
        self._has_arguments = True
        self._end(events)

    def _take_mark(self, char: str, events: list[Event]) -> int:
        mark = self._mark + char
        if not any(wanted.startswith(mark) for wanted in self._wanted):
            self.is_bad = True
            return 0
        self._mark = mark
        if mark not in self._wanted:
            return 1
        if mark == self._marks.end:
            self._end_call(events)
        elif mark == self._marks.value:
            self._begin_value()
        elif mark == self._marks.name_end:
            self._mark, self._wanted = "", (self._marks.parameter, self._marks.end)
        else:
            if mark == self._marks.parameter and self._name is not None:
                self._begin_call(self._name, events)
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
            return self._end_name(self._title)
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

    def _end_name(self, title: str) -> int:
        name, _ = self._marks.unquoted(title)
        if name is None or name not in self._tools:
            self.is_bad = True
            return 0
        self._name, self._has_name = name, True
        self._wanted = (self._marks.parameter, self._marks.end)
        self._mark, self._title = "", None
        return 1

    def _begin_call(self, name: str, events: list[Event]) -> None:
        self._name = None
        self._schema = SchemaPart(self._tools[name] or {})
        self._begin(name, events)
        events.append(CallArguments("{"))

    def _end_key(self, title: str, events: list[Event]) -> int:
        key, is_text = self._marks.unquoted(title)
        if key is None or key in self._keys:
            self.is_bad = True
            return 0
        comma = ", " if self._keys else ""
        self._keys.add(key)
        self._part = self._schema.property(key)
        self._types = self._part.types
        if is_text is not None:
            self._part = SchemaPart({})
            self._types = None if is_text else self._types or ANY_TYPE
        quote = "" if self._types else '"'
        events.append(CallArguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: {quote}"))
        self._mark, self._title = "", None
        if self._marks.value:
            self._wanted = (self._marks.value,)
        else:
            self._begin_value()
        return 1

    def _begin_value(self) -> None:
        types = self._types
        fits = None if types is None else lambda value: can_be(value, types)
        self._value = ValueEnd(self._marks, self._tools, self._may_follow, fits)
        self._mark = ""
        self._is_first = self._marks.has_lines
        self._wanted = (self._marks.parameter, self._marks.end)

    def _may_follow(self, key: str) -> bool:
        """Whether a parameter of that name is a further one of the call."""
        known = self._schema.keys
        return key not in self._keys and (not known or key in known)

    def _take_value(self, value: ValueEnd, text: str, at: int, events: list[Event]) -> int:
        """As much of it as is certain, and the mark that ends it, if any does."""
        if self._is_first:
            # the line break after the opening marker
            self._is_first = False
            if text[at] == "\n":
                return at + 1
        end, is_over = value.find(text, at, self._kept, self.is_last)
        has_mark = is_over and text.startswith(self._marks.value_end, end)
        # a line break may be the last before the mark that ends it; without one, that after it, too
        num_lines = self._marks.has_lines + (not has_mark)
        certain = text[at:end]
        if is_over or not self.is_last:
            certain = certain[: max(len(certain.rstrip("\n")), len(certain) - num_lines)]
        if is_over:
            found = "".join([*self._kept, certain])
            events.append(CallArguments(as_json(found, self._types, self._part)))
            self._value = None
            self._kept.clear()
            return end + len(self._marks.value_end) * has_mark
        value.take(certain)
        if self._types:
            self._kept.append(certain)
        elif certain:
            events.append(CallArguments(in_string(certain)))
        self.is_waiting = at + len(certain) < len(text)
        return at + len(certain)

    def cut(self, events: list[Event]) -> str:
        self._value = None
        self._kept.clear()
        return super().cut(events)
