"""Calls between tags that have attributes, or names of their own for each parameter."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from specc.server.parsers.bodies import Body
from specc.server.parsers.events import CallArguments, Event, find_marker
from specc.server.parsers.json_scan import skip_white
from specc.server.parsers.schema_part import SchemaPart
from specc.server.parsers.typed_text import ANY_TYPE, as_json, in_string

# what stands before each tag of MiniMax M3, a token of its vocabulary
NAMESPACE = "]<]minimax[>["
# marks of Kimi K3, likewise
OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
# characters of a tag; a name has 128 at most
_MAX_TAG = 320
# levels of lists and objects, as in bodies of requests
_MAX_DEPTH = 64
_ATTRIBUTE = re.compile(r"""\s+(\w+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'<>]+))""")
_ARGUMENT, END_OF_ARGUMENT, _END_OF_CALL = (
    f"{OPEN}argument", f"{CLOSE}argument{SEP}", f"{CLOSE}call{SEP}"
)  # fmt: skip
# tokens of the vocabulary, so that no value has them: where the end of one is missing, they are it
_AFTER_VALUE = (END_OF_ARGUMENT, _ARGUMENT, _END_OF_CALL)


class _At(enum.Enum):
    HEAD = enum.auto()
    BETWEEN = enum.auto()
    TAG = enum.auto()
    VALUE = enum.auto()


class _Tags(Body):
    """A call whose opening tag has been begun; tags are read as wholes.

    Args:
        tools: of the request, with the schemas of their arguments.
    """

    # marks after a call: where that of its own end is missing, they end it
    after: tuple[str, ...] = ()

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__()
        self._tools = tools
        self._at = _At.HEAD
        # of a mark or a text, what has come and is neither handed out nor dropped
        self._part = ""
        self._schema = SchemaPart({})
        self._keys: set[str] = set()

    @property
    def raw(self) -> str:
        # of a call that has begun, what is being read belongs to nothing yet
        return super().raw + (self._part if self.num_calls else "")

    def _take_mark(self, text: str, at: int, *wanted: str) -> tuple[int, str | None]:
        """One character of a mark, which white space may stand before; the mark once it is there.

        None of these marks begins with another.
        """
        if not self._part and (end := skip_white(text, at)) > at:
            return end, None
        part = self._part + text[at]
        if not any(mark.startswith(part) for mark in wanted):
            self.is_bad = True
            return at, None
        self._part = part
        return at + 1, part if part in wanted else None

    def _take_tag(self, text: str, at: int, end: str) -> tuple[int, str | None]:
        """What is between the mark of a tag and its end, once that is there.

        Args:
            at: the first character after the mark.
        """
        limit = at + _MAX_TAG + len(end)
        size = text.find(end, at, limit)
        if size >= 0:
            return size + len(end), text[at:size]
        self.is_bad = len(text) >= limit
        self.is_waiting = not self.is_bad and not self.is_last
        return at if self.is_bad or self.is_waiting else len(text), None

    def _begin_call(self, name: str | None, events: list[Event]) -> bool:
        """Begin a call of one of the tools; False where it is none."""
        if name is None or name not in self._tools:
            self.is_bad = True
            return False
        self._schema = SchemaPart(self._tools[name] or {})
        self._part, self._at = "", _At.BETWEEN
        self._begin(name, events)
        events.append(CallArguments("{"))
        return True

    def _end_call(self, events: list[Event]) -> None:
        events.append(CallArguments("}"))
        self._part, self._has_arguments = "", True
        self._end(events)

    def _is_over(self, text: str, at: int, events: list[Event]) -> bool:
        """Whether what stands between arguments comes after the call, or may do so."""
        part = text[at : at + _MAX_TAG]
        if self._part or not part:
            return False
        if part.startswith(self.after):
            self._end_call(events)
            return True
        self.is_waiting = not self.is_last and any(mark.startswith(part) for mark in self.after)
        return self.is_waiting

    def _add_key(self, key: str | None, events: list[Event], opening: str = "") -> bool:
        """Write a key of the arguments, and how its value begins; False where it is none."""
        if not key or key in self._keys:
            self.is_bad = True
            return False
        comma = ", " if self._keys else ""
        self._keys.add(key)
        events.append(CallArguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: {opening}"))
        self._part, self._at = "", _At.VALUE
        return True


class AttributedCall(_Tags):
    """`<|open|>call tool="name" index="1"<|sep|>` arguments `<|close|>call<|sep|>`, of Kimi K3.

    An argument is `<|open|>argument key="key" type="string"<|sep|>value<|close|>argument<|sep|>`:
    a string as it is, and JSON of any other type. Strings are handed out as they come, others when
    they have ended. Up to `<|open|>call` it has been read.
    """

    after = (f"{OPEN}call ", f"{CLOSE}tools{SEP}")

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__(tools)
        self._is_string = False
        # of a value that is no string, what has come before `_part`
        self._kept: list[str] = []

    @property
    def raw(self) -> str:
        return "".join(self._kept) + super().raw

    def _take(self, text: str, at: int, events: list[Event]) -> int:
        if self._at is _At.VALUE:
            return self._take_value(text, at, events)
        if self._at is _At.BETWEEN:
            if self._is_over(text, at, events):
                return at
            end, mark = self._take_mark(text, at, _ARGUMENT, _END_OF_CALL)
            if mark == _END_OF_CALL:
                self._end_call(events)
            elif mark is not None:
                self._at = _At.TAG
            return end
        is_head = self._at is _At.HEAD
        end, tag = self._take_tag(text, at, SEP)
        if tag is None:
            return end
        found = {
            key: value.replace("&quot;", '"').replace("&amp;", "&")
            for key, value in attributes(tag).items()
        }
        if is_head:
            return end if self._begin_call(found.get("tool"), events) else at
        is_string = found.get("type", "string") == "string"
        if not self._add_key(found.get("key"), events, '"' if is_string else ""):
            return at
        self._is_string = is_string
        return end

    def _take_value(self, text: str, at: int, events: list[Event]) -> int:
        """All of the text, up to the mark that ends the value."""
        size, marker = find_marker(text[at:], *_AFTER_VALUE)
        end = len(text) if marker is None and self.is_last else at + size
        certain = text[at:end]
        if marker is not None:
            value = "".join([*self._kept, certain])
            events.append(CallArguments(as_json(value, None if self._is_string else ANY_TYPE)))
            self._kept.clear()
            self._at = _At.BETWEEN
            return end + len(marker) * (marker == END_OF_ARGUMENT)
        if not self._is_string:
            self._kept.append(certain)
        elif certain:
            events.append(CallArguments(in_string(certain)))
        self.is_waiting = end < len(text)
        return end

    def cut(self, events: list[Event]) -> str:
        if not self.is_bad and self.num_calls:
            self._part = ""
            self._kept.clear()
        return super().cut(events)


class _Element(NamedTuple):
    """One that is open: its name, the texts in it, and JSON of each of the elements in it."""

    name: str
    schema: SchemaPart
    texts: list[str]
    children: list[tuple[str, str]]


class ElementCall(_Tags):
    """`<invoke name="name"><key>value</key> … </invoke>`, each tag after `NAMESPACE`: MiniMax M3.

    A value is text, which is JSON of the types in the tool's schema, or elements: of a list one
    for each of its values, of an object one for each key. Where the schema says neither, elements
    that are all called `item` are a list. Within a value, a key that comes again has a list.
    Strings of arguments are handed out as they come, other values when they have ended. Up to
    `<invoke` it has been read.
    """

    after = (f"{NAMESPACE}<invoke ", f"{NAMESPACE}</tool_call>")

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__(tools)
        self._open: list[_Element] = []
        # of a value, what has come and is not handed out; whether a part of a string is
        self._kept: list[str] = []
        self._is_handed_out = False

    @property
    def raw(self) -> str:
        return "".join(self._kept) + super().raw

    def _take(self, text: str, at: int, events: list[Event]) -> int:
        if self._at is _At.VALUE:
            return self._take_text(text, at, events)
        if self._at is _At.BETWEEN:
            if self._is_over(text, at, events):
                return at
            end, mark = self._take_mark(text, at, NAMESPACE)
            if mark is not None:
                self._at = _At.TAG
            return end
        is_head = self._at is _At.HEAD
        end, tag = self._take_tag(text, at, ">")
        if tag is None:
            return end
        if is_head:
            return end if self._begin_call(attributes(tag).get("name"), events) else at
        is_known = tag.startswith("<") and self._read(tag[1:], events)
        self.is_bad = not is_known
        return end if is_known else at

    def _read(self, tag: str, events: list[Event]) -> bool:
        """What stands between `<` and `>`; False where it can't stand here."""
        if not self._open:
            if tag == "/invoke":
                self._end_call(events)
                return True
            return self._open_first(tag, events)
        self._kept.append(f"{NAMESPACE}<{tag}>")
        is_known = self._close(events) if tag == f"/{self._open[-1].name}" else self._add(tag)
        if is_known:
            self._part = ""
        else:
            # what is held of the tag is told with the rest
            self._kept.pop()
        return is_known

    def _open_first(self, name: str, events: list[Event]) -> bool:
        if not _is_name(name) or not self._add_key(name, events):
            return False
        self._open.append(_Element(name, self._schema.property(name), [], []))
        self._is_handed_out = False
        return True

    def _add(self, name: str) -> bool:
        """Open an element in another one."""
        if not _is_name(name) or self._is_handed_out or len(self._open) == _MAX_DEPTH:
            return False
        schema, index = self._open[-1].schema, len(self._open[-1].children)
        is_item = _container(schema, (name,)) == "array"
        own = schema.item(index) if is_item else schema.property(name)
        self._open.append(_Element(name, own, [], []))
        self._at = _At.VALUE
        return True

    def _close(self, events: list[Event]) -> bool:
        """End the innermost element."""
        element = self._open[-1]
        if element.children and any(text.strip() for text in element.texts):
            return False
        self._open.pop()
        if self._open:
            self._open[-1].children.append((element.name, _json(element)))
            self._at = _At.VALUE
            return True
        events.append(CallArguments('"' if self._is_handed_out else _json(element)))
        self._kept.clear()
        self._at = _At.BETWEEN
        return True

    def _take_text(self, text: str, at: int, events: list[Event]) -> int:
        """All of the text, up to the next tag."""
        num_held = len(self._part)
        held = self._part + text[at:]
        size, marker = find_marker(held, NAMESPACE)
        if size:
            self._say(held[:size], events)
        if marker is None:
            self._part = held[size:]
            return len(text)
        self._part, self._at = marker, _At.TAG
        return at + size + len(marker) - num_held

    def _say(self, text: str, events: list[Event]) -> None:
        """More text of the innermost element."""
        element = self._open[-1]
        is_string = len(self._open) == 1 and element.schema.types is None and not element.children
        if is_string and (self._is_handed_out or text.strip()):
            opening = "" if self._is_handed_out else '"' + in_string("".join(element.texts))
            events.append(CallArguments(opening + in_string(text)))
            self._is_handed_out = True
            self._kept.clear()
            return
        element.texts.append(text)
        self._kept.append(text)

    def cut(self, events: list[Event]) -> str:
        """As of all bodies; what was held back of a string belongs to it."""
        if self.num_calls and not self.is_bad:
            if self._is_handed_out and self._at is _At.VALUE and self._part:
                events.append(CallArguments(in_string(self._part)))
            self._part = ""
            self._kept.clear()
        return super().cut(events)


def attributes(tag: str) -> dict[str, str]:
    """Attributes of a tag, with white space before each; none of one that has anything else."""
    found = list(_ATTRIBUTE.finditer(tag))
    if "".join(one[0] for one in found) != tag.rstrip():
        return {}
    return {one[1]: next(value for value in one.groups()[1:] if value is not None) for one in found}


def _is_name(tag: str) -> bool:
    return bool(tag.strip()) and not tag.startswith("/")


def _container(schema: SchemaPart, names: Collection[str]) -> str:
    """Whether elements of these names are a list or an object."""
    types = schema.types or frozenset(("array", "object"))
    found = types & {"array", "object"}
    if len(found) == 1:
        return next(iter(found))
    return "array" if set(names) == {"item"} else "object"


def _json(element: _Element) -> str:
    if not element.children:
        return _text_json("".join(element.texts), element.schema)
    names = [name for name, _ in element.children]
    if _container(element.schema, names) == "array":
        return _list(value for _, value in element.children)
    values: dict[str, list[str]] = {}
    for name, value in element.children:
        values.setdefault(name, []).append(value)
    pairs = (
        f"{json.dumps(name, ensure_ascii=False)}: {own[0] if len(own) == 1 else _list(own)}"
        for name, own in values.items()
    )
    return f"{{{', '.join(pairs)}}}"


def _text_json(text: str, schema: SchemaPart) -> str:
    types = schema.types
    if types is None:
        return json.dumps(text, ensure_ascii=False)
    # lists and objects without elements
    if not text.strip() and "string" not in types and types & {"array", "object"}:
        return "[]" if "array" in types else "{}"
    return as_json(text, types, schema)


def _list(values: Iterable[str]) -> str:
    return f"[{', '.join(values)}]"
