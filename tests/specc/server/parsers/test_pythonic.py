"""Calls as Python writes them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specc.server.parsers.calls import CallParser
from specc.server.parsers.formats import CALL_FORMATS
from specc.server.parsers.pythonic import literal_json
from tests.specc.server.parsers.pieces import Found, found

TOOLS = {"add": None, "now": None, "a.b-c": None}


def read(text: str, sizes: tuple[int, ...] = (), form: str = "pythonic") -> Found:
    return found(lambda: CallParser(CALL_FORMATS[form], TOOLS), text, sizes)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("1", 1), (" -1.5 ", -1.5), ("+2", 2), ("1_000", 1000), ("0x10", 16), ("True", True),
        ("None", None), ("true", True), ("null", None), ("'a'", "a"), ('"a\\n\\u00e9"', "a\né"),
        ("'it\\'s'", "it's"), ("'a' 'b'", "ab"), ("r'\\d'", "\\d"), ("'\\d'", "\\d"),
        ("'''a\n'b'''", "a\n'b"), ("[]", []), ("[1, (2, 'x]'),]", [1, [2, "x]"]]),
        ("{'a': {'b': [None]}}", {"a": {"b": [None]}}), ("('a')", "a"), ("'\\ud83d'", "\ud83d"),
    ],
)  # fmt: skip
def test_literals(text: str, want: object) -> None:
    written = literal_json(text)
    assert written is not None
    assert json.loads(written) == want
    # it can be sent
    written.encode()


@pytest.mark.parametrize(
    "text",
    [
        "", "a", "f()", "__import__('os')", "a.b", "1 + 1", "[x for x in 'a']", "lambda: 1", "{1}",
        "b'a'", "1j", "...", "1e999", "f'{1}'", "{**{}}", "[*'a']", "{1: 2}", "-'a'", "- True",
        "not 1", "1 if 1 else 2", "'a", "[1", "x := 1", "'a'; 1", "-" * 100000 + "1",
        "[" * 500 + "]" * 500, "9" * 5000, "1+" * 100000 + "1", "\x00",
    ],
)  # fmt: skip
def test_what_is_no_literal(text: str) -> None:
    """Names, calls and operations are never run, and nothing is too deep."""
    assert literal_json(text) is None


X = ("add", '{"x": 1}')
DEEP = f"x={'[' * 65}{']' * 65}"
CASES = {
    "one": ("[add(x=1)]", "", [X], True),
    "several": (" [add(x=1), now( ), add(x=1)]\n", "", [X, ("now", "{}"), X], True),
    "spaces": ("[\n  add( x = 1 ,\n  y = [ 2 ] , )\n]", "", [("add", '{"x": 1, "y": [2]}')], True),
    "any name": ("[a.b-c(x=1)]", "", [("a.b-c", '{"x": 1}')], True),
    "brackets in strings": ("[add(x='a)], now(', y=\"'\")]", "",
                            [("add", '{"x": "a)], now(", "y": "\'"}')], True),
    "escapes": (r"[add(x='\'\\', y='\\')]", "", [("add", r'{"x": "' + r"'\\" + r'", "y": "\\"}')],
                True),
    "empty and long strings": ("[add(x='', y='''a,'b''', z=\"\")]", "",
                               [("add", '{"x": "", "y": "a,\'b", "z": ""}')], True),
    "JSON's words": ("[add(x=true, y={'a': null})]", "", [("add", '{"x": true, "y": {"a": null}}')],
                     True),
    "text after": ("[add(x=1)] is done", " is done", [X], True),
    "cut after a call": ("[add(x=1), ", "", [X], True),
    "cut in a value": ("[add(x=1, y='a", " y='a", [("add", '{"x": 1')], False),
    "cut in a key": ("[add(x=1, y", " y", [("add", '{"x": 1')], False),
    "no list end": ("[add(x=1) and", "and", [X], True),
    # no calls
    "in a text": ("so [add(x=1)]", "so [add(x=1)]", [], False),
    "unknown": ("[sub(x=1)]", "[sub(x=1)]", [], False),
    "a part of a name": ("[ad(x=1)]", "[ad(x=1)]", [], False),
    "no list": ("add(x=1)", "add(x=1)", [], False),
    "no call": ("[1, 2]", "[1, 2]", [], False),
    "an empty list": ("[]", "[]", [], False),
    "no names of arguments": ("[add(1, x=2)]", "[add(1, x=2)]", [], False),
    "a link": ("[add](now)", "[add](now)", [], False),
    "cut before": ("[add(", "[add(", [], False),
    # calls that end early
    "no literal": ("[add(x=1, y=f(2))]", " y=f(2))]", [("add", '{"x": 1')], False),
    "a key twice": ("[add(x=1, x=2)]", " x=2)]", [("add", '{"x": 1')], False),
    "a comma alone": ("[add(x=1, , )]", ", )]", [("add", '{"x": 1')], False),
    "brackets that do not fit": ("[add(x=[1}, y=2)]", "x=[1}, y=2)]", [("add", "{")], False),
    "too deep": (f"[add({DEEP})]", f"{DEEP})]", [("add", "{")], False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_calls(name: str) -> None:
    text, content, calls, whole = CASES[name]
    for size in (*range(1, 9), len(text)):
        assert read(text, (size,)) == Found(content, calls, whole), size


def test_markers_of_others() -> None:
    """A list after a text needs its marker; lines end with the marker after them."""
    calls = [X, ("now", "{}")]
    for form, text, content in (
        ("llama4_pythonic", "[add(x=1), now()]", ""),
        ("llama4_pythonic", "a <|python_start|>[add(x=1), now()]<|python_end|>b", "a b"),
        ("lfm2", "a<|tool_call_start|>[add(x=1), now()]<|tool_call_end|>b", "ab"),
        ("olmo3", "a<function_calls>add(x=1)\nnow()</function_calls>b", "ab"),
        ("olmo3", "<function_calls>add(x=1)\nnow()", ""),
        ("olmo3", "<function_calls>add(x=1)\nnow()\nthen", "then"),
    ):
        for size in (1, 2, 5, len(text)):
            assert read(text, (size,), form) == Found(content, calls, True), (text, size)
    for form, text in (("lfm2", "[now()]"), ("olmo3", "<function_calls></function_calls>")):
        assert read(text, form=form) == Found(text, [], False)


PARTS = [
    "[", "]", "add(", "now()", "x=", "y=", "1", "'a'", '"', "'", "'''", "\\", ",", ", ", ")", "{",
    "}", "(", "True", "-", " ", "\n", "é", "add(x=1)", "{'k': [1]}",
]  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.sampled_from(PARTS), max_size=12).map("".join),
    st.lists(st.integers(1, 9), min_size=1, max_size=9).map(tuple),
)
def test_pieces_do_not_matter(text: str, sizes: tuple[int, ...]) -> None:
    text = "[add(" + text
    whole = read(text)
    assert read(text, sizes) == whole
    if whole.is_whole:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole.calls)
    if not whole.calls:
        assert whole.content == text


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(-1e9, 1e9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(["x", "y", "z"]), _VALUES), st.integers(1, 9))
def test_any_values_come_through(arguments: dict[str, object], size: int) -> None:
    """As Python's own repr writes them."""
    text = f"[add({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"
    ((name, written),) = read(text, (size,)).calls
    assert (name, json.loads(written)) == ("add", arguments)
