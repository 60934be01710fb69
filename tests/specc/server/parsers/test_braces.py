"""Arguments as Gemma's models write them: what is JSON of them, and what is no call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specc.server.parsers.calls import CallParser
from specc.server.parsers.formats import CALL_FORMATS
from tests.specc.server.parsers.pieces import Found, found

TOOLS: dict[str, Any] = {
    "add": {
        "properties": {"n": {"type": "integer"}, "s": {"type": "string"}, "a": {"type": "array"}}
    }
}
BEGIN, END, Q = "<|tool_call>call:add", "<tool_call|>", '<|"|>'


def read(text: str, size: int = 0, form: str = "gemma4") -> Found:
    return found(lambda: CallParser(CALL_FORMATS[form], TOOLS), text, (size,) if size else ())


# arguments → JSON of them
WHOLE = {
    "": "{}",
    "x:1": '{"x": 1}',
    " x : 1 ,\n y:-2.5 ": '{"x": 1, "y": -2.5}',
    "x:true,y:false,z:null": '{"x": true, "y": false, "z": null}',
    "x:None,y:nil": '{"x": null, "y": null}',
    "x:1e3,y:108.": '{"x": 1000.0, "y": 108.0}',
    "x:1e999,y:nan,z:1x": '{"x": "1e999", "y": "nan", "z": "1x"}',
    f"x:{'9' * 400}": '{"x": ' + "9" * 400 + "}",
    "x:a word": '{"x": "a word"}',
    "x:,y:": '{"x": "", "y": ""}',
    f"x:{Q}a,b:}}]{Q}": '{"x": "a,b:}]"}',
    f'x:{Q}"\\\n{Q}': '{"x": "\\"\\\\\\n"}',
    f"x:{Q}<|{Q},y:{Q}{Q}": '{"x": "<|", "y": ""}',
    f"{Q}3 x{Q}:1": '{"3 x": 1}',
    "x:{y:{z:1},w:[]},v:2": '{"x": {"y": {"z": 1}, "w": []}, "v": 2}',
    f"x:[1,[2,{Q}]{Q}],{{}},true]": '{"x": [1, [2, "]"], {}, true]}',
    "x:[1,],y:{z:1,},": '{"x": [1], "y": {"z": 1}}',
    # what is declared otherwise is no text
    f"n:{Q}42{Q},s:{Q}42{Q},x:{Q}42{Q}": '{"n": 42, "s": "42", "x": "42"}',
    f"n:{Q}4 2{Q},a:{Q}[1]{Q}": '{"n": "4 2", "a": [1]}',
    f"a:[{Q}1{Q}],x:{{n:{Q}1{Q}}}": '{"a": ["1"], "x": {"n": "1"}}',
}


@pytest.mark.parametrize("arguments", WHOLE)
def test_arguments(arguments: str) -> None:
    text = f"{BEGIN}{{{arguments}}}{END}"
    for size in (*range(1, 9), len(text)):
        assert read(text, size) == Found("", [("add", WHOLE[arguments])], True), size


# text after the tool's name → arguments that are there, and what is text after all
CUT = {
    "x:1}": ('{', 'x:1}'),
    "{x": ("{", "x"),
    "{x:1": ('{"x": ', "1"),
    "{x:1}}": ('{"x": 1}', "}"),
    "{x:1 y:2": ('{"x": ', "1 y:2"),
    "{x}": ("{", "x}"),
    "{:1}": ("{", ":1}"),
    "{,x:1}": ("{", ",x:1}"),
    f"{{x:{Q}a{Q}y:1}}": ('{"x": "a"', "y:1}"),
    f"{{{Q}x{Q}}}": ('{"x": ', "}"),
    "{x:[1}": ('{"x": [1', "}"),
    "{x:{y:1]": ('{"x": {"y": 1', "]"),
    "{x:1,x:2}": ('{"x": 1', "x:2}"),
    "{x:<|b}": ('{"x": ', "<|b}"),
    f"{{x:{Q}a<|": ('{"x": "a<|', ""),
    f"{{n:{Q}4": ('{"n": ', ""),
    f"{{{Q}x": ("{", "x"),
    "{x:" + "[" * 64: ('{"x": ' + "[" * 63, "["),
}  # fmt: skip


@pytest.mark.parametrize("rest", CUT)
def test_what_is_none(rest: str) -> None:
    """A beginning of arguments stays one; the rest is text, and nothing is lost."""
    arguments, content = CUT[rest]
    want = Found(content, [("add", arguments)], rest == "{x:1}}")
    if not rest.startswith("{"):
        want = Found(BEGIN + rest, [], False)
    for size in (*range(1, 9), len(rest)):
        assert read(BEGIN + rest, size) == want, size


def test_strings_come_as_they_are_written() -> None:
    parser = CallParser(CALL_FORMATS["gemma4"], TOOLS)
    parser.feed(f"{BEGIN}{{s:{Q}")
    assert [event.text for event in parser.feed("a<|")] == ["a"]  # type: ignore[union-attr]
    assert [event.text for event in parser.feed("b")] == ["<|b"]  # type: ignore[union-attr]


TEXTS = st.text(st.sampled_from('ab,:{}[]"\\<|> é\n'), max_size=6).filter(lambda t: Q not in t)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3)
    ),
    max_leaves=6,
)


def _written(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_written(v, quote)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(_written(item, quote) for item in value)}]"
    return json.dumps(value)


FORMS = {
    "gemma4": ("<|tool_call>", END, Q),
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
}


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(st.sampled_from("xyz"), VALUES, max_size=3),
    st.sampled_from(sorted(FORMS)),
    st.integers(1, 8),
)
def test_any_value(arguments: dict[str, Any], name: str, size: int) -> None:
    before, after, quote = FORMS[name]
    text = f"{before}call:add{_written(arguments, quote)}{after}"
    whole = read(text, form=name)
    assert whole.is_whole
    assert [json.loads(call[1]) for call in whole.calls] == [arguments]
    assert read(text, size, name) == whole
