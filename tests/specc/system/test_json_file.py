"""JSON of files that anybody may have written."""

from __future__ import annotations

import json

import pytest

from specc.errors import EngineError
from specc.system.json_file import MAX_NESTING, JsonError, parse_json, read_json


def nested(levels: int, kind: str = "list") -> str:
    first, last = {"list": ("[", "]"), "object": ('{"a":', "}")}[kind]
    return first * levels + "1" + last * levels


@pytest.mark.parametrize("kind", ["list", "object"])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_nesting_has_a_bound(kind, as_bytes):
    def text(levels: int) -> str | bytes:
        return nested(levels, kind).encode() if as_bytes else nested(levels, kind)

    assert parse_json(text(MAX_NESTING)) == json.loads(text(MAX_NESTING))
    # one too many, what Python reads and does not write, and what it does not read
    for levels in (MAX_NESTING + 1, 900, 100_000):
        with pytest.raises(JsonError, match="nested more than 64 levels"):
            parse_json(text(levels))


def test_brackets_that_do_not_end():
    for levels in (500, 100_000):
        with pytest.raises(JsonError):
            parse_json("[" * levels)


def test_brackets_in_strings_nest_nothing():
    data = {"a": ["[" * 1000, "{" * 1000, '"['], "[[": 1}
    assert parse_json(json.dumps(data)) == data


@pytest.mark.parametrize("text", ["", "{", b"\xff\xfe", b'{"a": "\xff"}', "1" * 5000, "nan", "{}}"])
def test_what_is_no_json(text):
    with pytest.raises(JsonError):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": NaN}', "NaN is no number"),
        ("[-Infinity]", "-Infinity is no number"),
        ('{"a": {"b": 1, "c": 2, "b": 1}}', "the key 'b' comes twice"),
        (f'{{"{"x" * 99}": 1, "{"x" * 99}": 2}}', "the key 'x{40}' comes twice"),
    ],
)
def test_exactly_json(text, message):
    parse_json(text)
    with pytest.raises(JsonError, match=message):
        parse_json(text, exact=True)


def test_errors_of_a_file(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(EngineError) as caught:
        read_json(path, EngineError, "a file", "make one")
    assert caught.value.found == f"{path} cannot be read: No such file or directory"
    assert (caught.value.needed, caught.value.do) == ("a file", "make one")
    path.write_text(nested(5000))
    with pytest.raises(EngineError, match=r"a\.json is no JSON: nested more than 64 levels deep"):
        read_json(path, EngineError, "a file", "make one")
    path.write_text('{"a": [1.5]}')
    assert read_json(path, EngineError, "a file", "make one", exact=True) == {"a": [1.5]}
