"""Calls of tools are told from text, in every format, however the text comes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import strategies as st

from specc.server.parsers.calls import CallParser
from specc.server.parsers.events import Blanks
from specc.server.parsers.formats import CALL_FORMATS
from specc.server.parsers.message import MessageParser
from specc.server.parsers.names import REASONING_PARSERS, TOOL_CALL_PARSERS
from specc.server.parsers.reasoning import FORMATS
from tests.specc.server.parsers.pieces import Found, check_pieces, counted, found
from tests.specc.server.parsers.writers import WRITERS

TOOLS: dict[str, Any] = {"add": {"type": "object"}, "now": None, "a.b-c/d:e": None}
A = '{"name": "add", "arguments": {"x": 1}}'
B = '{"name":"now","arguments":{}}'
X = ("add", '{"x": 1}')
NOW = ("now", "{}")


def read(form: str, text: str, sizes: tuple[int, ...] = ()) -> Found:
    return found(lambda: CallParser(CALL_FORMATS[form], TOOLS), text, sizes)


def check(form: str, text: str, content: str, calls: list[tuple[str, str]], whole: bool) -> None:
    """At once, and in pieces of each size."""
    want = Found(content, calls, whole)
    assert read(form, text) == want
    for size in range(1, 9):
        assert read(form, text, (size,)) == want, size


# text → content, calls, whether there are calls and none is cut
HERMES = {
    "one": (f"<tool_call>\n{A}\n</tool_call>", "", [X], True),
    "two": (f"<tool_call>{A}</tool_call>\n<tool_call>\n{B}</tool_call>\n", "", [X, NOW], True),
    "text before": (f"I add:\n\n<tool_call>{A}</tool_call>", "I add:\n\n", [X], True),
    "text around": (f"a<tool_call>{A}</tool_call> b\n<tool_call>{B}</tool_call>c", "a b\nc",
                    [X, NOW], True),
    "white space alone": (f"\n\n<tool_call>{A}</tool_call>  \n", "", [X], True),
    "no call": ("  a <tool> b </tool_call> ", "  a <tool> b </tool_call> ", [], False),
    "no text": ("", "", [], False),
    "only white space": (" \n", " \n", [], False),
    "any order": ('<tool_call>{"id": [1, {"name": 2}], "arguments": {"x": 1}, "name": "add"}'
                  "</tool_call>", "", [X], True),
    "as it was written": ('<tool_call>{"name":"add","arguments":{ "x" :[1, "}</tool_call>\\"é"] }}'
                          "</tool_call>", "", [("add", '{ "x" :[1, "}</tool_call>\\"é"] }')], True),
    "escaped name": ('<tool_call>{"name": "\\u0061dd", "arguments": {}}</tool_call>', "",
                     [("add", "{}")], True),
    "no arguments": ('<tool_call>{"name": "now"}</tool_call>', "", [NOW], True),
    "null": ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [NOW], True),
    "in a string": ('<tool_call>{"name": "add", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [X],
                    True),
    "parameters": ('<tool_call>{"name": "add", "parameters": {"x": 1}}</tool_call>', "", [X], True),
    "a brace is missing": (f"<tool_call>{A[:-1]}\n</tool_call>", "", [X], True),
    "a mark is missing": (f"<tool_call>{A}\n<tool_call>{B}", "", [X, NOW], True),
    # no calls: marks and all are content
    "no JSON": ("<tool_call>add(1)</tool_call> ", "<tool_call>add(1)</tool_call> ", [], False),
    "unknown": ('<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
                '<tool_call>{"name": "sub", "arguments": {}}</tool_call>', [], False),
    "no name": ('<tool_call>{"arguments": {"x": 1}}</tool_call>',
                '<tool_call>{"arguments": {"x": 1}}</tool_call>', [], False),
    "a name of another type": ('<tool_call>{"name": {"a": 1}}', '<tool_call>{"name": {"a": 1}}', [],
                               False),
    "arguments of another type": ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
                                  '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', [],
                                  False),
    "no object in a string": ('<tool_call>{"name": "add", "arguments": "[1]"}',
                              '<tool_call>{"name": "add", "arguments": "[1]"}', [], False),
    "no JSON in a string": ('<tool_call>{"name": "add", "arguments": "{1"}',
                            '<tool_call>{"name": "add", "arguments": "{1"}', [], False),
    "two names": ('<tool_call>{"name": "add", "name": "now"}',
                  '<tool_call>{"name": "add", "name": "now"}', [], False),
    "cut in the mark": ("a <tool_ca", "a <tool_ca", [], False),
    "cut in the name": ('<tool_call>\n{"name": "ad', '<tool_call>\n{"name": "ad', [], False),
    "cut before arguments": ('<tool_call>{"name": "add", "arguments": ',
                             '<tool_call>{"name": "add", "arguments": ', [], False),
    "then a good one": (f"<tool_call>oops<tool_call>{A}</tool_call>", "<tool_call>oops", [X], True),
    # calls whose arguments have begun
    "cut in arguments": ('a<tool_call>{"name": "add", "arguments": {"x": "1', "a",
                         [("add", '{"x": "1')], False),
    "cut after arguments": (f"<tool_call>{A[:-1]}", "", [X], True),
    "cut in the second": (f"<tool_call>{A}</tool_call>\n<tool_call>" + B[:27], "",
                          [X, ("now", "{")], False),
    "no JSON any more": ('<tool_call>{"name": "add", "arguments": {"x": 1, y}}</tool_call>',
                         "y}}</tool_call>", [("add", '{"x": 1, ')], False),
    "cut in the last mark": (f"<tool_call>{A}\n</tool_c", "", [X], True),
}  # fmt: skip


@pytest.mark.parametrize("name", HERMES)
def test_hermes(name: str) -> None:
    check("hermes", *HERMES[name])


LLAMA = {
    "bare": (A, "", [X], True),
    "after white space": (f" \n{A}\n", "", [X], True),
    "marked": (f"<|python_tag|>{A}", "", [X], True),
    "text before the mark": (f"Well: <|python_tag|> {A}", "Well: ", [X], True),
    "its own names": ('{"type": "function", "name": "add", "parameters": {"x": 1}}', "", [X], True),
    "several": (f"{A}; {B} ;{A}\n{B}", "", [X, NOW, X, NOW], True),
    "text after": (f"{A}; and so", "; and so", [X], True),
    # not where it could be anything
    "in a text": (f"It is {A}", f"It is {A}", [], False),
    "some other JSON": ('{"name": "now"}', '{"name": "now"}', [], False),
    "another name": ('{"name": "Bob", "arguments": {}} ', '{"name": "Bob", "arguments": {}} ', [],
                     False),
    "code": ('<|python_tag|>search(q="a")', '<|python_tag|>search(q="a")', [], False),
    "cut": (A[:-3], "", [("add", '{"x": ')], False),
    "cut before": (A[:20], A[:20], [], False),
    "cut between": (f"{A};", "", [X], True),
}  # fmt: skip
MISTRAL = {
    "one": (f"[TOOL_CALLS][{A}]", "", [X], True),
    "several": (f"[TOOL_CALLS] [{A}, {B}]", "", [X, NOW], True),
    "text around": (f"a [TOOL_CALLS][{A}] b", "a  b", [X], True),
    "with an id": ('[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdefghi"}]', "", [NOW],
                   True),
    "by name": ('[TOOL_CALLS]add{"x": 1}[TOOL_CALLS]now{}', "", [X, NOW], True),
    "with a mark": ('[TOOL_CALLS]add[ARGS]{"x": 1}[TOOL_CALLS]now[ARGS] {}', "", [X, NOW], True),
    "with both": ('[TOOL_CALLS]add[CALL_ID]a[b[ARGS]{"x": 1}', "", [X], True),
    "any name": ("[TOOL_CALLS]a.b-c/d:e{}", "", [("a.b-c/d:e", "{}")], True),
    # no calls
    "none": ("[TOOL_CALLS][]", "[TOOL_CALLS][]", [], False),
    "unknown": ("[TOOL_CALLS]sub{}", "[TOOL_CALLS]sub{}", [], False),
    "unknown in a list": ('[TOOL_CALLS][{"name": "sub"}]', '[TOOL_CALLS][{"name": "sub"}]', [],
                          False),
    "a part of a name": ("[TOOL_CALLS]ad{}", "[TOOL_CALLS]ad{}", [], False),
    "no object": ("[TOOL_CALLS]add[ARGS][1]", "[TOOL_CALLS]add[ARGS][1]", [], False),
    "two marks": ("[TOOL_CALLS]add[ARGS][ARGS]{}", "[TOOL_CALLS]add[ARGS][ARGS]{}", [], False),
    "text after the mark": ("[TOOL_CALLS]add[ARGS]a{}", "[TOOL_CALLS]add[ARGS]a{}", [], False),
    "cut": ("[TOOL_CALLS]add[AR", "[TOOL_CALLS]add[AR", [], False),
    "cut in arguments": ('[TOOL_CALLS]add{"x": "', "", [("add", '{"x": "')], False),
    "cut in the second": (f'[TOOL_CALLS][{A}, {{"na', ', {"na', [X], True),
    "cut after the first": (f"[TOOL_CALLS][{A}, ", "", [X], True),
    "unknown second": (f'[TOOL_CALLS][{A}, {{"name": "sub"}}]', ', {"name": "sub"}]', [X], True),
    "a brace is missing": (f"[TOOL_CALLS][{A[:-1]}]", "", [X], True),
}  # fmt: skip


@pytest.mark.parametrize("name", LLAMA)
def test_llama(name: str) -> None:
    check("llama3_json", *LLAMA[name])


@pytest.mark.parametrize("name", MISTRAL)
def test_mistral(name: str) -> None:
    check("mistral", *MISTRAL[name])


def test_ids_of_mistral_are_what_its_templates_take() -> None:
    ids = {CALL_FORMATS["mistral"].make_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(len(one) == 9 and one.isalnum() and one.isascii() for one in ids)


def test_names_on_the_command_line_are_those_of_formats() -> None:
    assert tuple(CALL_FORMATS) == TOOL_CALL_PARSERS
    assert tuple(FORMATS) == REASONING_PARSERS


def test_calls_beyond_the_first_may_be_unwanted() -> None:
    parser = MessageParser(
        calls=CallParser(CALL_FORMATS["hermes"], TOOLS), max_calls=1, make_id=counted()
    )
    text = f"<tool_call>{B}</tool_call><tool_call>{A}</tool_call>"
    delta = parser.feed(text, is_last=True)
    assert [(call.name, call.arguments) for call in delta.calls] == [NOW]
    assert parser.has_whole_calls


def test_arguments_come_as_they_are_written() -> None:
    """Name and id first, pieces of arguments as soon as they are there, each of them once."""
    parser = MessageParser(calls=CallParser(CALL_FORMATS["hermes"], TOOLS), make_id=counted())
    seen = []
    for piece in (
        'a<tool_call>{"name": "add", "argu',
        'ments": {"x"',
        ": [1, 2",
        "]}}</tool_call>",
    ):
        delta = parser.feed(piece, is_last=False)
        seen.append((delta.content, [(c.index, c.id, c.name, c.arguments) for c in delta.calls]))
    assert seen == [
        ("a", []),
        ("", [(0, "call_0", "add", '{"x"')]),
        ("", [(0, None, None, ": [1, 2")]),
        ("", [(0, None, None, "]}")]),
    ]


PARTS = {
    "hermes": [
        "<tool_call>", "</tool_call>", "<tool_", "call>", A, B, A[:20], A[20:], B[:-1], "}", "{",
        '"', "a", " ", "\n", "é", '{"name": "add", "arguments": {"t": "<tool_call>"}}', ", ", "[",
    ],
    "llama3_json": [
        "<|python_tag|>", "<|python_", "tag|>", A, B, A[:20], A[20:], B[:-1], ";", "; ", "}", "{",
        '"', "a", " ", "\n", "é",
    ],
    "mistral": [
        "[TOOL_CALLS]", "[TOOL_", "CALLS]", "[ARGS]", "[CALL_ID]", "add", "now", "[", "]", A, B,
        A[:20], A[20:], ", ", "{", "}", '{"x": 1}', '"', "a", " ", "\n", "é",
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", PARTS)
def test_pieces_do_not_matter(form: str) -> None:
    check_pieces(functools.partial(read, form), st.sampled_from(PARTS[form]), 150)


@pytest.mark.parametrize("form", ["llama3_json", "granite", "hermes", "cohere_command3"])
@pytest.mark.parametrize("before", ["", "call"])
def test_blanks_are_read_once(form: str, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come one by one, before calls, after them and around thinking.

    Each character costs its own time where what is held and read again stays short.
    """
    read = 0
    take = Blanks.take

    def counted_take(blanks: Blanks, text: str, *chars: str) -> str:
        nonlocal read
        read += len(text)
        return take(blanks, text, *chars)

    monkeypatch.setattr(Blanks, "take", counted_take)
    thinks = FORMATS["cohere_command3"].parser("", (), {})
    calls = CallParser(CALL_FORMATS[form], TOOLS)
    parser = MessageParser(thinks, calls, make_id=counted())
    call = WRITERS[form]([("now", {})]) if before else ""
    parser.feed(call, is_last=False)
    count = 400
    for i in range(count):
        parser.feed(" \n"[i % 2], is_last=False)
        assert max(len(x._held) for x in (calls, thinks, thinks._answer)) <= 1
    # by thinking, the answer, calls and the message
    assert read <= 4 * (count + len(call))
    assert parser.feed("x", is_last=False).content.endswith(" \nx")
