"""Where JSON ends, and where it stops being JSON, beside Python's own reader."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specc.server.parsers.json_scan import JsonScan
from tests.specc.server.parsers.pieces import cut

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
)
KEYS = st.text(max_size=3)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def scan(text: str, sizes: list[int]) -> tuple[int, bool, bool]:
    """Characters taken, and how it ended."""
    value, taken = JsonScan(), 0
    for piece in cut(text, sizes):
        end = value.feed(piece, 0)
        taken += end
        if end < len(piece) or not value.is_open:
            break
    return taken, value.is_done, value.is_bad


def is_json(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


@settings(max_examples=80, deadline=None)
@given(
    JSON, st.booleans(), st.sampled_from([None, 1]), st.lists(st.integers(1, 9), min_size=1),
    st.text(max_size=3),
)  # fmt: skip
def test_values_end_where_they_end(
    value: object, escapes: bool, indent: int | None, sizes: list[int], after: str
) -> None:
    text = json.dumps(value, ensure_ascii=escapes, indent=indent)
    # a number may go on; what follows a closing bracket or a quote does not matter
    after = " " + after if text[-1].isalnum() else after
    assert scan(text + after, sizes) == (len(text), True, False)


ALPHABET = st.sampled_from([*'{}[]",:\\u1-e. a0é\n\x01', "null", "true", '"a":', "\\u00"])


@settings(max_examples=300, deadline=None)
@given(st.lists(ALPHABET, max_size=10).map("".join), st.lists(st.integers(1, 5), min_size=1))
def test_whatever_comes(text: str, sizes: list[int]) -> None:
    found = taken, is_done, is_bad = scan(text, [max(1, len(text))])
    assert scan(text, sizes) == found
    # a word ends where something follows it
    whole = scan(text + " ", [len(text) + 1])
    if whole[1]:
        assert is_json(text[: whole[0]])
    assert is_json(text) <= (whole[1] and whole[0] == len(text.rstrip()))
    assert not (is_done and is_bad)
    assert is_done or is_bad or taken == len(text)


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ('{"a" 1}', 5), ("{a: 1}", 1), ("[1,]", 3), ("[01]", 3), ('"\n"', 1), ('"\\x"', 2),
        ('"\\u12g"', 5), ("{]", 1), ("}", 0), ("[nul]", 4), ("[+1]", 1), ('{"a":}', 5), ("[٣]", 1),
        ("[NaN]", 4), ("[" + "1" * 5000 + "]", 1026),
    ],
)  # fmt: skip
def test_where_it_is_seen_to_be_none(text: str, taken: int) -> None:
    for sizes in ([len(text)], [1], [3], [1000]):
        assert scan(text, sizes) == (taken, False, True)


def test_depth_costs_no_stack() -> None:
    assert scan("[" * 100_000, [7]) == (100_000, False, False)
