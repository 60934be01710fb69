"""Sampling parameters: defaults, ranges to their ends, and errors of three lines."""

from __future__ import annotations

import dataclasses
import decimal
import math

import pytest
import torch

from specc.errors import RequestError, SpeccError
from specc.sampling.params import MAX_LOGPROBS, SamplingParams
from specc.sampling.rows import RULES, Rule

NUMBERS = (
    "temperature", "top_p", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
LARGEST_INT64 = (1 << 63) - 1
LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def assert_three_lines(error: SpeccError, found: str, needed: str) -> None:
    assert error.found == found
    assert error.needed == needed
    assert error.do
    assert str(error) == f"found:  {error.found}\nneeded: {error.needed}\ndo:     {error.do}"


def test_defaults_change_nothing():
    """The model's own distribution, without filters and penalties, as vLLM has it."""
    params = SamplingParams()
    assert params.temperature == 1.0
    assert not params.is_greedy
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1, 0, 0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (
        1, 0, 0,
    )  # fmt: skip
    assert params.seed is params.rule is params.logprobs is None
    assert params.rule_id == Rule.COUPLED
    assert params.stop_strings == params.stop_token_ids == ()
    assert params.speculative
    assert not params.ignore_eos
    assert params.max_tokens == 16


# --- numbers ---


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (0, 0.0, 1e-9, 0.7, 1, 100.0, LARGEST_FLOAT32)),
        ("top_p", (1e-6, 0.5, 1, 1.0)),
        ("min_p", (0, 0.0, 0.5, 1, 1.0)),
        ("repetition_penalty", (1e-6, 0.5, 1, 1.3, 100)),
        ("presence_penalty", (-2, -2.0, 0, 0.1, 2, 2.0)),
        ("frequency_penalty", (-2, -2.0, 0, 0.1, 2, 2.0)),
    ],
)
def test_numbers_in_their_ranges(name, values):
    for value in values:
        assert getattr(SamplingParams(**{name: value}), name) == value


NEEDED = {
    "temperature": "a finite number at least 0",
    "top_p": "a finite number above 0 and at most 1",
    "min_p": "a finite number at least 0 and at most 1",
    "repetition_penalty": "a finite number above 0",
    "presence_penalty": "a finite number at least -2 and at most 2",
    "frequency_penalty": "a finite number at least -2 and at most 2",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1e-9),
        ("temperature", -1),
        ("top_p", 0),
        ("top_p", 0.0),
        ("top_p", -0.1),
        ("top_p", 1.0000001),
        ("top_p", 2),
        ("min_p", -1e-9),
        ("min_p", 1.0000001),
        ("repetition_penalty", 0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", -2.0000001),
        ("presence_penalty", 2.0000001),
        ("frequency_penalty", -2.0000001),
        ("frequency_penalty", 2.0000001),
    ],
)
def test_numbers_next_to_their_ranges(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert_three_lines(caught.value, f"{name}={value!r}", NEEDED[name])


@pytest.mark.parametrize(
    "value",
    [
        math.nan, -math.nan, math.inf, -math.inf, True, False, "0.5", "nan", b"1", None, [0.5],
        1j, torch.tensor(0.5), decimal.Decimal("0.5"),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("name", NUMBERS)
def test_no_numbers(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert_three_lines(caught.value, f"{name}={value!r}", NEEDED[name])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # a row of float32 would hold infinity
        pytest.param("temperature", 1e39, id="temperature"),
        pytest.param("temperature", 10**400, id="temperature-integer"),
        pytest.param("repetition_penalty", 3.5e38, id="repetition"),
        # and 0
        pytest.param("repetition_penalty", 1e-46, id="repetition-small"),
        pytest.param("top_p", 1e-46, id="top-p-small"),
    ],
)
def test_numbers_that_float32_cannot_hold(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert_three_lines(caught.value, f"{name}={value!r}", NEEDED[name])


# --- integers ---

INTEGERS = {
    "max_tokens": (1, 10**9),
    "top_k": (-1, 0, 1, 50, LARGEST_INT64),
    "seed": (None, 0, 1, LARGEST_INT64),
    "logprobs": (None, 0, 1, MAX_LOGPROBS),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_in_their_ranges(name):
    for value in INTEGERS[name]:
        assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "needed", "values"),
    [
        ("max_tokens", "1 or more", (0, -1)),
        ("top_k", "an integer: 1 or more, 0 or -1 for all", (-2, LARGEST_INT64 + 1, None)),
        ("seed", f"an integer in 0 … {LARGEST_INT64}, or None", (-1, LARGEST_INT64 + 1)),
        ("logprobs", f"an integer in 0 … {MAX_LOGPROBS}, or None", (-1, MAX_LOGPROBS + 1)),
    ],
)
def test_integers_outside_their_ranges(name, needed, values):
    for value in values:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        assert_three_lines(caught.value, f"{name}={value!r}", needed)


@pytest.mark.parametrize(
    "value", [True, False, 1.0, math.nan, math.inf, "1", [1], torch.tensor(1)], ids=repr
)
@pytest.mark.parametrize("name", INTEGERS)
def test_no_integers(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.found == f"{name}={value!r}"
    assert "an integer" in caught.value.needed
    assert caught.value.do


# --- rules ---


def test_rules():
    ids = {rule: SamplingParams(rule=rule).rule_id for rule in RULES}
    assert ids == {"coupled": 0, "delta": 1, "mss": 2, "swor": 3}
    assert set(ids.values()) == set(Rule)


@pytest.mark.parametrize("rule", ["", "Coupled", "MSS", "greedy", 2, Rule.MSS, True, ["mss"]])
def test_no_rules(rule):
    with pytest.raises(RequestError) as caught:
        SamplingParams(rule=rule)
    assert_three_lines(
        caught.value, f"rule={rule!r}", "one of coupled, delta, mss, swor, or None"
    )  # fmt: skip


# --- ends ---


@pytest.mark.parametrize(
    ("stop", "strings"),
    [
        pytest.param("end", ("end",), id="string"),
        pytest.param(["a", "bc"], ("a", "bc"), id="list"),
        pytest.param(("a",), ("a",), id="tuple"),
        pytest.param((), (), id="none"),
        pytest.param([], (), id="empty-list"),
        pytest.param("\n\n", ("\n\n",), id="newlines"),
    ],
)
def test_stop_strings(stop, strings):
    assert SamplingParams(stop=stop).stop_strings == strings


def test_stop_strings_are_a_copy():
    stop = ["a"]
    params = SamplingParams(stop=stop)
    stop.append("")
    assert params.stop_strings == ("a",)


@pytest.mark.parametrize("stop", ["", ["a", ""], ("",)], ids=repr)
def test_empty_stop_strings(stop):
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop=stop)
    assert_three_lines(caught.value, "an empty stop string", "non-empty stop strings")


@pytest.mark.parametrize(
    "stop", [None, 5, 0.5, True, b"end", [5], ["a", None], [b"a"], {"a"}], ids=repr
)
def test_no_stop_strings(stop):
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop=stop)
    assert_three_lines(caught.value, f"stop={stop!r}", "a string or a list of strings")


def test_stop_tokens():
    for tokens in ((), [], (5,), [5, 6]):
        assert SamplingParams(stop_token_ids=tokens).stop_token_ids == tokens


@pytest.mark.parametrize("tokens", [None, 5, "5", {5}, range(3)], ids=repr)
def test_no_stop_tokens(tokens):
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop_token_ids=tokens)
    assert_three_lines(
        caught.value, f"stop_token_ids={tokens!r}", "a list of token ids: integers, 0 or more"
    )


@pytest.mark.parametrize("token", ["5", 5.0, True, -1, None], ids=repr)
def test_stop_tokens_that_are_no_ids(token):
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop_token_ids=[4, token])
    assert_three_lines(
        caught.value, f"stop_token_ids=[…, {token!r}, …]", "token ids: integers, 0 or more"
    )


# --- what follows ---


def test_greedy_is_temperature_zero():
    assert SamplingParams(temperature=0, top_p=0.5, top_k=3, rule="mss").is_greedy
    assert SamplingParams(temperature=-0.0).is_greedy
    assert not SamplingParams(temperature=1e-9).is_greedy


def test_an_option_is_checked_when_it_is_assigned():
    """As vLLM's examples change those of `get_default_sampling_params`."""
    params = SamplingParams(min_tokens=3)
    params.max_tokens, params.temperature, params.stop = 5, 0.5, "a"
    assert params == SamplingParams(min_tokens=3, max_tokens=5, temperature=0.5, stop="a")
    assert params.stop_strings == ("a",)
    before = dataclasses.replace(params)
    for name, value in (("temperature", -1), ("max_tokens", 2), ("rule", "best")):
        with pytest.raises(RequestError):
            setattr(params, name, value)
    for name in ("stop_strings", "maxtokens", "best_of"):
        with pytest.raises(AttributeError, match=name):
            setattr(params, name, 3)
    assert params == before
    del before
    with pytest.raises(dataclasses.FrozenInstanceError):
        del params.top_k
