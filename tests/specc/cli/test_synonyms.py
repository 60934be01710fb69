"""Names that other programs use, and advice that fits the command line."""

from __future__ import annotations

import pytest

from specc.cli.app import in_words_of, synonym
from specc.errors import ConfigError, RequestError
from tests.command_line import assert_refused, invoke


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


@pytest.mark.parametrize(
    ("field", "do", "says"),
    [
        ("port", "choose another --port", "choose another --port"),
        ("port", "choose another --port, or end the other process", None),
        ("plan", "choose one, or compile the engine with this plan", None),
        ("plan", "leave plan out", "leave --plan out"),
        ("policy", "pass policy, or another policy", "pass --policy, or another policy"),
        ("max_num_seqs", "lower max_num_seqs: --max-num-seqs", None),
        ("seed", "raise seed", "raise --seed"),
    ],
)
def test_words_of_advice_that_are_no_field_stay(field, do, says):
    option = "--" + field.replace("_", "-")
    error = in_words_of({field: option}, ConfigError(f"{field} 9", "another", do))
    if field == "max_num_seqs":
        says = "lower --max-num-seqs: --max-num-seqs"
    assert error.do == (do if says is None else says)


@pytest.mark.parametrize("port", [99999, -1])
def test_advice_about_a_port_has_two_dashes(tiny_engine, port):
    result = invoke("serve", tiny_engine, "--port", port)
    assert_refused(result, f"--port {port}", "do:     choose another --port\n")


def test_a_plan_that_there_is_not_is_no_option_of_compile(tiny_engine):
    result = invoke("run", tiny_engine, "hello", "--plan", "tree-2-2")
    assert_refused(result, "--plan tree-2-2", "do:     did you mean tree-2-1?\n")
    far = invoke("run", tiny_engine, "hello", "--plan", "zzzzzz")
    assert_refused(far, "choose one of them, or compile the engine again\n")


COMPILE = ("compile", "--target", "T", "-o", "x")
NAMES = [
    (COMPILE, "--draft", "sufix", "--draft suffix"),
    (COMPILE, "--draft", "lookp:5", "--draft lookup:5"),
    (COMPILE, "--draft", "ngram", "--draft lookup:3"),
    (COMPILE, "--draft", "mpt", "--draft mtp"),
    (COMPILE, "--draft", "slef:window=9", "--draft self:window=9"),
    (COMPILE, "--draft", "self:windw=9", "window"),
    (COMPILE, "--draft", "self:layer=0-1", "layers"),
    (COMPILE, "--draft", "self:int", "int8"),
    (COMPILE, "--combine", "merg", "merge"),
    (COMPILE, "--backend", "egaer", "eager"),
    (COMPILE, "--dtype", "blfoat16", "bfloat16"),
    (COMPILE, "--quantize", "int88", "int8"),
    (COMPILE, "--kv-cache-dtype", "in8", "int8"),
    (COMPILE, "--mla-cache", "latnt", "latent"),
    (COMPILE, "--draft-kv", "windw=8", "window"),
    ((*COMPILE, "--draft", "D"), "--draft-assume", "tap_conventon=entering", "tap_convention"),
    (("run", "E", "hello"), "--policy", "adaptve", "adaptive"),
    (("run", "E", "hello"), "--backend", "eagr", "eager"),
    (("run", "E", "hello"), "--rule", "couplet", "coupled"),
    (("serve", "E"), "--log-level", "debg", "debug"),
    (("serve", "E"), "--reasoning-parser", "deepseek_r", "deepseek_r1"),
    (("serve", "E"), "--tool-call-parser", "hermse", "hermes"),
    (("bench", "E"), "--plan", "chain-33", "chain-3"),
    (("bench", "E"), "--against", "transformer", "transformers"),
    (("bench",), "--synthetic", "llama-3.1-8", "llama-3.1-8b"),
    (("bench serve", "E"), "--policies", "goodputt", "goodput"),
    (("bench serve", "E"), "--goodput", "tft:200", "ttft"),
    (("inspect", "E"), "--pass", "FuseQKW", "FuseQKV"),
    (("inspect", "E", "--tree", "t.svg"), "--plan", "tree-2-3", "tree-2-1"),
    (("triton", "E", "-o", "x"), "--plan", "tree-2-3", "tree-2-1"),
    (("triton", "E", "-o", "x"), "--kind", "gppu", "gpu"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "option", "value", "meant"), NAMES)
def test_a_name_with_a_slip_is_answered_with_the_one_that_was_meant(
    tiny_engine, tiny_models, tmp_path, command, option, value, meant
):
    """For every option whose value is a name."""
    places = {
        "E": tiny_engine,
        "T": tiny_models.target,
        "D": tiny_models.draft,
        "x": tmp_path / "out",
        "t.svg": tmp_path / "t",
    }
    result = invoke(*(places.get(word, word) for word in command), option, value)
    assert result.exit_code == 2, result.output
    (do,) = [line for line in result.stderr.splitlines() if line.startswith("do:")]
    assert meant in do, result.stderr


@pytest.mark.parametrize("found", ["top_p=2", "prompt 0 has no tokens"])
def test_what_is_no_option_stays_as_it_is(found):
    error = RequestError(found, "another", "correct it")
    assert in_words_of({"top_k": "--top-k", "prompt": "--prompt"}, error) is error
