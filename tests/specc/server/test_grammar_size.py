"""Grammars that are too long for a server: refused before anything else looks at them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specc.errors import ConfigError
from specc.server.config import ServeConfig
from specc.server.errors import ApiError
from specc.server.grammar import check_grammar_size
from tests.specc.server.serving import assert_error, serve

LIMIT = 1000
SCHEMA = {"type": "object", "properties": {"a" * 500: {"enum": ["b" * 300, "c" * 300]}}}
TOO_LONG: dict[str, Any] = {
    "guided_regex": "a" * LIMIT,
    "guided_grammar": "a" * LIMIT,
    "guided_json": SCHEMA,
    "guided_choice": [f"item {i}" for i in range(100)],
    "guided_whitespace_pattern": " " * LIMIT,
    "structured_outputs": {"choice": ["a" * 499, "b" * 499]},
    "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_what_is_too_long(name: str) -> None:
    with pytest.raises(ApiError, match=f"{name} of more than 1000 .*--max-grammar-chars"):
        check_grammar_size({name: TOO_LONG[name]}, LIMIT)
    check_grammar_size({name: TOO_LONG[name]}, 3 * LIMIT)


@pytest.mark.parametrize(
    "value",
    [None, 5, True, "a" * 900, ["a" * 100] * 9, {"a" * 300: ["b" * 300, {"c" * 100: 5}]}, [[[]]]],
)
@pytest.mark.parametrize("name", TOO_LONG)
def test_what_is_not(name: str, value: Any) -> None:
    """Whatever it is: others refuse what is wrong with it."""
    check_grammar_size({"prompt": "a" * 5000, "stop": ["b" * 5000], name: value}, LIMIT)


def test_no_more_is_looked_at_than_that() -> None:
    class Items(list):  # type: ignore[type-arg]
        num_read = 0

        def __iter__(self) -> Any:
            for item in super().__iter__():
                Items.num_read += 1
                yield item

    with pytest.raises(ApiError):
        check_grammar_size({"guided_choice": Items(["a"] * 100_000)}, LIMIT)
    assert Items.num_read <= LIMIT


def test_a_text_of_json_counts_no_more_than_its_characters_and_a_few_for_each_value() -> None:
    choices = [f"item {i}" for i in range(500)]
    size = len(json.dumps(choices))
    check_grammar_size({"guided_choice": choices}, size + 4)
    with pytest.raises(ApiError):
        check_grammar_size({"guided_choice": choices}, size - 4)


def test_over_http() -> None:
    with serve(max_grammar_chars=LIMIT) as server:
        small = {"prompt": "ab", "max_tokens": 3, "temperature": 0}
        for name, value in TOO_LONG.items():
            error = assert_error(server.post("/v1/completions", small | {name: value}), 400)
            assert error["param"] == name
        chat = {"messages": [{"role": "user", "content": "a" * 20}], "max_tokens": 3}
        form = {"guided_choice": TOO_LONG["guided_choice"]}
        assert_error(server.post("/v1/chat/completions", chat | form), 400)
        answer = server.complete(**small | {"guided_choice": ["abba", "ba"], "max_tokens": 8})
        assert answer["choices"][0]["text"] in ("abba", "ba")


def test_the_limit() -> None:
    with pytest.raises(ConfigError, match="max_grammar_chars=0"):
        ServeConfig(model_names=("m",), max_grammar_chars=0)
