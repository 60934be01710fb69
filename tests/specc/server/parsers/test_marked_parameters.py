"""Calls as Qwen3-Coder writes them, whose values are texts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specc.server.parsers.calls import CallParser
from specc.server.parsers.events import Text
from specc.server.parsers.formats import CALL_FORMATS
from specc.server.parsers.message import MessageParser
from specc.server.parsers.reasoning import FORMATS, ReasoningParser
from tests.specc.server.parsers.pieces import Found, counted, found

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "deep": {"type": "boolean"},
        "items": {"type": "array"},
        "more": {"$ref": "#/$defs/more"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["integer", "string"]},
        "any": {},
        "loop": {"$ref": "#/properties/loop"},
    },
    "$defs": {"more": {"type": "object"}},
}
TOOLS = {"edit": SCHEMA, "now": None}


def read(text: str, sizes: tuple[int, ...] = ()) -> Found:
    return found(lambda: CallParser(CALL_FORMATS["qwen3_coder"], TOOLS), text, sizes)


def call(*values: tuple[str, str], name: str = "edit") -> str:
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values)
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def check(text: str, content: str, calls: list[tuple[str, str]], whole: bool) -> None:
    want = Found(content, calls, whole)
    assert read(text) == want
    for size in range(1, 9):
        assert read(text, (size,)) == want, size


@pytest.mark.parametrize(
    ("key", "value", "want"),
    [
        ("text", "a\n  b\n", "a\n  b\n"), ("text", "", ""), ("text", "\n", "\n"),
        ("text", "5", "5"),
        ("text", 'say "é\\n" 🙂 </para', 'say "é\\n" 🙂 </para'), ("text", "null", "null"),
        ("count", "5", 5), ("count", " -7 ", -7), ("count", "1.0", 1.0), ("count", "1.5", "1.5"),
        ("count", "five", "five"), ("count", "true", "true"), ("count", "1" * 400, int("1" * 400)),
        ("ratio", "1.5", 1.5), ("ratio", "2", 2), ("ratio", "NaN", "NaN"), ("ratio", "", ""),
        ("deep", "true", True), ("deep", "False", False), ("deep", "yes", "yes"),
        ("items", '[1, "a"]', [1, "a"]), ("items", "[1", "[1"), ("items", "{}", "{}"),
        ("more", '{"a": [null]}', {"a": [None]}), ("more", "a", "a"),
        ("maybe", "null", None), ("maybe", "None", None), ("maybe", "nothing", "nothing"),
        ("either", "5", 5), ("either", "a", "a"), ("any", "5", "5"), ("unknown", "5", "5"),
        ("loop", "5", "5"),
    ],
)  # fmt: skip
def test_values(key: str, value: str, want: object) -> None:
    text = call((key, value))
    ((name, arguments),) = read(text).calls
    assert (name, json.loads(arguments)) == ("edit", {key: want})
    for size in range(1, 6):
        assert read(text, (size,)) == read(text)


PAIR = '{"text": "a", "count": 5}'
CASES = {
    "two values": (call(("text", "a"), ("count", "5")), "", [("edit", PAIR)], True),
    "none": (call(name="now"), "", [("now", "{}")], True),
    "two calls": (f"a {call(name='now')}\n{call(('any', 'b'))}", "a ",
                  [("now", "{}"), ("edit", '{"any": "b"}')], True),
    "on one line": ("<tool_call><function=edit><parameter=any>a</parameter></function></tool_call>",
                    "", [("edit", '{"any": "a"}')], True),
    "a mark in a value": (call(("text", "<tool_call><function=now></function>")), "",
                          [("edit", '{"text": "<tool_call><function=now></function>"}')], True),
    "JSON": ('<tool_call>\n{"name": "now"}</tool_call>', '<tool_call>\n{"name": "now"}</tool_call>',
             [], False),
    "unknown": ("<tool_call><function=ed></function>", "<tool_call><function=ed></function>", [],
                False),
    "cut in the name": ("a <tool_call><function=edi", "a <tool_call><function=edi", [], False),
    "cut in a text": ("<tool_call><function=edit><parameter=text>\nab", "",
                      [("edit", '{"text": "ab')], False),
    "cut in a number": ("<tool_call><function=edit><parameter=count>\n5", "",
                        [("edit", '{"count": ')], False),
    "twice": ("<tool_call><function=edit><parameter=any>a</parameter><parameter=any>b",
              "<parameter=any>b", [("edit", '{"any": "a"')], False),
    "something else": ("<tool_call><function=edit>\n<para>", "<tool_call><function=edit>\n<para>",
                       [], False),
    "something else after a value": (call(("any", "a"))[:-len("</function>\n</tool_call>")]
                                     + "<para>", "<para>", [("edit", '{"any": "a"')], False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_calls(name: str) -> None:
    check(*CASES[name])


PARTS = [
    "<tool_call>", "</tool_call>", "<function=edit>", "<function=now>", "</function>", "\n",
    "<parameter=text>", "<parameter=count>", "<parameter=any>", "</parameter>", "</para", "<", "5",
    "a", " ", "é", "=", ">", call(("text", "x\ny"), ("deep", "true")),
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(PARTS), max_size=10).map("".join),
    st.lists(st.integers(1, 9), min_size=1, max_size=9).map(tuple),
)
def test_pieces_do_not_matter(text: str, sizes: tuple[int, ...]) -> None:
    whole = read(text)
    assert read(text, sizes) == whole
    if whole.is_whole:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole.calls)
    if not whole.calls:
        assert whole.content == text


def test_texts_come_as_they_are_written() -> None:
    parser = MessageParser(calls=CallParser(CALL_FORMATS["qwen3_coder"], TOOLS), make_id=counted())
    pieces = ["<tool_call><function=edit><parameter=text>\nab", "c\n", "d\n</par", "ameter>"]
    seen = [parser.feed(piece, is_last=False).calls[0].arguments for piece in pieces]
    assert seen == ['{"text": "ab', "c", "\\nd", '"']


def test_a_call_ends_thinking() -> None:
    """Only one of this form: the mark alone may be what the model thinks about."""
    form = CALL_FORMATS["qwen3_coder"]
    text = "I <tool_call>\n or " + call(name="now")
    parser = MessageParser(
        ReasoningParser(FORMATS["qwen3"], "<think>", (form.interrupts,)), CallParser(form, TOOLS)
    )
    delta = parser.feed(text, is_last=True)
    assert (delta.reasoning, delta.content) == ("I <tool_call>\n or ", "")
    assert [one.name for one in delta.calls] == ["now"]
    plain = ReasoningParser(FORMATS["qwen3"], "<think>")
    assert plain.feed(text) + plain.finish() == [Text(text, True)]
