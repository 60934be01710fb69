"""Names that other programs use, and advice that fits the command line."""

from __future__ import annotations

import pytest

from specc.cli.app import in_words_of, synonym
from specc.errors import ConfigError, RequestError
from tests.command_line import invoke


@pytest.mark.parametrize(
    ("option", "meant"),
    [("--model", "--target"), ("--max-model-len", "--max-seq-len"), ("--torch-dtype", "--dtype")],
)
def test_another_name_of_an_option(option, meant):
    result = invoke("compile", option, "x", "-o", "out")
    assert result.exit_code == 2
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == [
        "found", "needed", "do",
    ]  # fmt: skip
    assert f"do:     pass {meant} instead of {option}" in result.stderr


def test_other_options_are_still_unknown():
    result = invoke("compile", "--nope", "x")
    assert result.exit_code == 2
    assert "No such option: --nope" in result.stderr
    # compile's names are not those of run
    assert synonym("--model", {"--plan"}) is None


@pytest.mark.parametrize(
    ("options", "found", "do"),
    [
        (("--top-p", "2"), "--top-p 2.0", "correct this value"),
        (("--max-tokens", "0"), "--max-tokens 0", "raise --max-tokens"),
        (("--rule", "best"), "--rule best", "correct this value"),
    ],
)
def test_a_sampling_option_is_named_as_it_was_typed(options, found, do):
    result = invoke("run", "engine", "hello", *options)
    assert result.exit_code == 2
    assert f"found:  {found}\n" in result.stderr
    assert do in result.stderr.splitlines()[-1]
    assert "SamplingParams" not in result.stderr


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ("num_threads 99", "--threads 99"),
        ("num_threads=99", "--threads 99"),
        ("plan='none of these'", "--plan none of these"),
    ],
)
def test_a_field_is_named_as_the_option_that_it_is(found, says):
    options = {"num_threads": "--threads", "plan": "--plan"}
    error = in_words_of(options, ConfigError(found, "another", "leave num_threads out"))
    assert isinstance(error, ConfigError)
    assert error.found == says
    assert error.do == ("leave --threads out" if "99" in found else "leave num_threads out")


@pytest.mark.parametrize("found", ["top_p=2", "prompt 0 has no tokens"])
def test_what_is_no_option_stays_as_it_is(found):
    error = RequestError(found, "another", "correct it")
    assert in_words_of({"top_k": "--top-k", "prompt": "--prompt"}, error) is error
