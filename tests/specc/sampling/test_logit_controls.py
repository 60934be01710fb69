"""Options of what an output may hold: their ranges, their limits, and how they are written."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specc.errors import RequestError
from specc.sampling.logit_controls import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS, parse_bias
from specc.sampling.params import SamplingParams


def test_defaults_control_nothing() -> None:
    params = SamplingParams()
    assert not params.has_controls
    assert (params.min_tokens, params.logit_bias) == (0, None)
    assert params.allowed_token_ids is params.bad_words is None
    for nothing in ({"logit_bias": {}}, {"bad_words": []}, {"min_tokens": 0}):
        assert not SamplingParams(**nothing).has_controls


@pytest.mark.parametrize(
    "options",
    [
        {"min_tokens": 16},
        {"logit_bias": {0: -100, 5: 100.0}},
        {"allowed_token_ids": (3,)},
        {"bad_words": ["x"] * MAX_BAD_WORDS},
        {"bad_words": ("x" * MAX_BAD_WORD_CHARACTERS,)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_values_up_to_their_limits(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    assert params.has_controls
    assert all(getattr(params, name) == value for name, value in options.items())


def test_a_bias_may_name_its_tokens_by_strings() -> None:
    assert SamplingParams(logit_bias={"7": 1, 8: -2}).logit_bias == {7: 1.0, 8: -2.0}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("min_tokens", (-1, 17, 1.0, True, "1", None, 10**400)),
        (
            "logit_bias",
            (
                [1], "1", {-1: 1}, {1.0: 1}, {True: 1}, {"x": 1}, {"01": 1}, {"١": 1},
                {1: 100.1}, {1: -math.inf}, {1: math.nan}, {1: "1"}, {1: True}, {1: 10**400},
                {1: 1, "1": 2},
            ),
        ),
        ("allowed_token_ids", ([], [-1], [1.0], [True], ["1"], 1, "1", {1}, [None])),
        (
            "bad_words",
            (
                "word", [1], [""], ["  "], ["\ud800"], {"a"},
                ["x"] * (MAX_BAD_WORDS + 1),
                ["x" * (MAX_BAD_WORD_CHARACTERS + 1)],
            ),
        ),
    ],
)  # fmt: skip
def test_wrong_values(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        # the server names the field by it
        assert caught.value.found.startswith(f"{name}="), value
        assert len(caught.value.found) < 200
        assert caught.value.needed
        assert caught.value.do


def test_a_command_line_writes_biases_as_pairs() -> None:
    assert parse_bias(["5=-3", "0=1.5"]) == {"5": -3.0, "0": 1.5}
    assert SamplingParams(logit_bias=parse_bias(["5=-3"])).logit_bias == {5: -3.0}


@pytest.mark.parametrize("text", ["5", "=1", "5=", "5=x", "-5=1", "5=nan", "5=101", "a=1", "5=1=2"])
def test_no_pairs(text: str) -> None:
    with pytest.raises(RequestError, match="--logit-bias"):
        parse_bias([text])


def test_a_token_has_one_bias() -> None:
    with pytest.raises(RequestError, match="twice"):
        parse_bias(["5=1", "5=2"])
