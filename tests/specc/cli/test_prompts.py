"""Prompts of files, their own options, and what `specc run` says of options without effect."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specc.artifact.directory import read_manifest
from specc.cli.prompts import read_prompt_lines
from specc.errors import SpeccError
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from tests.command_line import assert_refused, invoke

IDS = [104, 101, 108, 108, 111]


@pytest.fixture
def no_tokenizer(tiny_engine: Path, tmp_path: Path) -> Path:
    """The tiny engine, as if it had been compiled from a model without a tokenizer."""
    path = Path(shutil.copytree(tiny_engine, tmp_path / "bare"))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"].pop(manifest["tokenizer"]["file"])
    manifest["tokenizer"]["file"] = None
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


GREEDY = ("--temperature", 0)


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_line_has_options_of_its_own(tiny_engine, tmp_path):
    """They are over those of the command line, for this prompt alone."""
    file = write(
        tmp_path / "p.jsonl",
        {"prompt": "hello", "max_tokens": 3},
        {"prompt": "hello"},
        {"prompt": "hello", "temperature": 5.0, "seed": 3},
        {"prompt_token_ids": IDS, "logprobs": 2, "source": "a book"},
    )
    options = ("--temperature", 0, "--max-tokens", 6, "--ignore-eos", "--json")
    result = invoke("run", tiny_engine, "--prompts", file, *options)
    assert result.exit_code == 0, result.stderr
    outputs = json.loads(result.stdout)["outputs"]
    assert [len(output["token_ids"]) for output in outputs] == [3, 6, 6, 6]
    assert outputs[0]["token_ids"] == outputs[1]["token_ids"][:3]
    assert outputs[2]["token_ids"] != outputs[1]["token_ids"]
    params = SamplingParams(max_tokens=6, temperature=5.0, seed=3, ignore_eos=True)
    (drawn,) = LLM(tiny_engine).generate("hello", params)
    assert outputs[2]["token_ids"] == drawn.outputs[0].token_ids
    assert ["logprobs" in output for output in outputs] == [False, False, False, True]
    assert result.stderr.count("\n") == 1
    assert "ignored here: source" in result.stderr


def test_json_has_the_log_probabilities(tiny_engine):
    options = ("--temperature", 0, "--max-tokens", 4, "--logprobs", 3, "--json")
    result = invoke("run", tiny_engine, "hello", *options)
    (output,) = json.loads(result.stdout)["outputs"]
    (want,) = LLM(tiny_engine).generate(
        "hello", SamplingParams(temperature=0, max_tokens=4, logprobs=3)
    )
    assert output["cumulative_logprob"] == pytest.approx(want.outputs[0].cumulative_logprob)
    assert len(output["logprobs"]) == 4
    for row, token in zip(output["logprobs"], output["token_ids"], strict=True):
        assert row[0]["token_id"] == token
        assert {entry["rank"] for entry in row} >= {1, 2, 3}


def test_log_probabilities_need_a_place(tiny_engine, tmp_path):
    assert_refused(invoke("run", tiny_engine, "hello", "--logprobs", 2), "--logprobs", "--json")
    file = write(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b", "logprobs": 0})
    assert_refused(invoke("run", tiny_engine, "--prompts", file), "--logprobs", "--json")


@pytest.mark.default(
    "options0---seed has no effect at temperature 0",
    "options2---top-p has no effect",
    "options4-None",
)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--seed", 1, *GREEDY), "--seed has no effect at temperature 0"),
        (("--seed", 1, "--rule", "mss", *GREEDY), "--seed, --rule have no effect"),
        (("--top-p", 0.5, *GREEDY), "--top-p has no effect"),
        (("--top-k", 3, "--min-p", 0.1, *GREEDY), "--top-k, --min-p have no effect"),
        (("--seed", 1, "--temperature", 0.5), None),
        (("--seed", 1), None),
        (GREEDY, None),
    ],
)
def test_options_without_effect_are_named(tiny_engine, options, words):
    result = invoke("run", tiny_engine, "hello", "--max-tokens", 2, "--json", *options)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == "" if words is None else words in result.stderr


def test_an_output_that_was_cut_is_announced_where_nobody_asked_for_its_length(
    tiny_engine, tmp_path
):
    """The one cause that it has."""
    most = read_manifest(tiny_engine).limits.max_seq_len
    once = invoke("run", tiny_engine, "hello", "--ignore-eos")
    end = f"where prompt and output fill the engine's {most} tokens"
    assert f"note: the output ends {end}" in once.stderr
    limit = ("--override-generation-config", '{"max_new_tokens": 3}')
    short = invoke("run", tiny_engine, "hello", "--ignore-eos", *limit)
    assert "note: the output ends after 3 tokens: --max-tokens allows more" in short.stderr
    lines = [{"prompt": "a"}, {"prompt": "hello"}, {"prompt": "bb", "max_tokens": most - 1}]
    lines += [{"prompt": "asked for", "max_tokens": 2}]
    file = write(tmp_path / "p.jsonl", *lines)
    batch = invoke("run", tiny_engine, "--prompts", file, "--ignore-eos", *limit)
    assert "note: 2 of 4 outputs end after 3 tokens: --max-tokens allows more" in batch.stderr
    assert f"note: 1 of 4 outputs end {end}" in batch.stderr
    asked = invoke("run", tiny_engine, "--prompts", file, "--max-tokens", 4, "--ignore-eos")
    assert asked.stderr.count("note: ") == 1
    assert f"note: 1 of 4 outputs end {end}" in asked.stderr
    greedy = ("--temperature", 0, "--max-tokens", 8)
    (output,) = LLM(tiny_engine).generate(
        "hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    )
    ended = invoke("run", tiny_engine, "hello", "--stop", output.outputs[0].text[:4], *greedy)
    assert ended.stderr == ""


@pytest.mark.slow
def test_more_tokens_than_any_output_can_have_are_refused(tiny_engine, tmp_path):
    most = read_manifest(tiny_engine).limits.max_seq_len
    words = (f"--max-tokens {most}", f"at most {most - 1}", "--max-seq-len")
    assert_refused(invoke("run", tiny_engine, "hello", "--max-tokens", most), *words)
    file = write(tmp_path / "p.jsonl", {"prompt": "a", "max_tokens": most})
    assert_refused(invoke("run", tiny_engine, "--prompts", file), *words[1:])
    # what a checkpoint says is of no engine in particular
    default = ("--override-generation-config", f'{{"max_new_tokens": {2 * most}}}')
    assert invoke("run", tiny_engine, "hello", *default).exit_code == 0


def test_an_engine_without_a_tokenizer_takes_and_gives_ids(no_tokenizer, tiny_engine, tmp_path):
    (want,) = LLM(tiny_engine).generate(
        [IDS], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    )
    ids = " ".join(map(str, want.outputs[0].token_ids))
    options = ("--temperature", 0, "--max-tokens", 5, "--ignore-eos")
    file = write(tmp_path / "one.jsonl", {"prompt_token_ids": IDS})
    one = invoke("run", no_tokenizer, "--prompts", file, *options)
    assert one.exit_code == 0, one.stderr
    assert one.stdout.strip() == ids
    file = write(tmp_path / "two.jsonl", {"prompt_token_ids": IDS}, {"prompt_token_ids": [7]})
    two = invoke("run", no_tokenizer, "--prompts", file, *options)
    assert ids in two.stdout
    assert_refused(invoke("run", no_tokenizer, "hello"), "without a tokenizer", "prompt_token_ids")


@pytest.mark.slow
def test_bench_has_prompts_for_an_engine_without_a_tokenizer(no_tokenizer, tmp_path):
    options = ("--tokens", 4, "--rounds", 1, "--warmup", 0, "--json", tmp_path / "r.json")
    built_in = invoke("bench", no_tokenizer, *options, "--num-prompts", 2)
    assert built_in.exit_code == 0, built_in.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["settings"]["num_prompts"] == 2
    assert any("random token ids" in note for note in report["notes"])
    file = write(tmp_path / "p.jsonl", {"prompt_token_ids": IDS})
    given = invoke("bench", no_tokenizer, *options, "--prompts", file)
    assert given.exit_code == 0, given.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["settings"]["num_prompt_tokens"] == len(IDS)
    assert not any("random" in note for note in report["notes"])
    text = write(tmp_path / "t.jsonl", {"prompt": "a"})
    assert_refused(invoke("bench", no_tokenizer, *options, "--prompts", text), "prompt_token_ids")


@pytest.mark.slow
def test_loads_of_token_ids(no_tokenizer, tmp_path):
    file = write(tmp_path / "p.jsonl", {"prompt_token_ids": IDS}, {"prompt_token_ids": [7, 8]})
    options = ("--num-requests", 4, "--output-tokens", 3, "--warmup", 0)
    for prompts in (("--prompts", file), (), ("--prompt-tokens", 6)):
        result = invoke("bench serve", no_tokenizer, *options, *prompts)
        assert result.exit_code == 0, result.stderr
        assert "Successful requests:                    4" in result.stdout


@pytest.mark.slow
def test_several_outputs_of_a_prompt(tiny_engine, tmp_path):
    options = ("--max-tokens", 4, "--ignore-eos", "--temperature", 3.0, "--seed", 5)
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=3.0, seed=5, n=3)
    (want,) = LLM(tiny_engine).generate("hello", params)
    wanted = [completion.token_ids for completion in want.outputs]
    assert len({tuple(ids) for ids in wanted}) == 3
    result = invoke("run", tiny_engine, "hello", "--n", 3, *options, "--json")
    (output,) = json.loads(result.stdout)["outputs"]
    assert [completion["token_ids"] for completion in output["outputs"]] == wanted
    assert output["token_ids"] == wanted[0]
    text = invoke("run", tiny_engine, "hello", "--n", 3, *options)
    assert [f"--- 1.{i}: 4 tokens" in text.stdout for i in (1, 2, 3)] == [True] * 3
    assert text.stderr == ""


def test_prompt_log_probabilities_of_a_line(tiny_engine, tmp_path):
    file = write(tmp_path / "p.jsonl", {"prompt_token_ids": IDS, "prompt_logprobs": 1})
    result = invoke("run", tiny_engine, "--prompts", file, "--max-tokens", 2, "--json")
    (output,) = json.loads(result.stdout)["outputs"]
    assert output["prompt_logprobs"][0] is None
    assert [row[0]["token_id"] for row in output["prompt_logprobs"][1:]] == IDS[1:]
    assert_refused(invoke("run", tiny_engine, "--prompts", file), "prompt_logprobs", "--json")


def test_an_output_that_cannot_go_on_is_announced(tiny_engine):
    """The first token may come, the second may not."""
    (token,) = LLM(tiny_engine).tokenizer.encode("h").ids
    result = invoke(
        "run", tiny_engine, "hello", "--allowed-token-id", token, "--bad-word", "hh",
        "--max-tokens", 5, "--ignore-eos",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "note: the output cannot go on" in result.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a", "temperature": -1}', ("line 1", "temperature=-1")),
        ('{"prompt": "a", "max_tokens": "many"}', ("line 1", "max_tokens='many'")),
        ('{"prompt": "a", "prompt_token_ids": [1]}', ("prompt and prompt_token_ids",)),
        ('{"prompt_token_ids": "abc"}', ("line 1", "no integers")),
        ('{"prompt_token_ids": [1, true]}', ("line 1", "no integers")),
        ('{"prompt_token_ids": []}', ("line 1", "empty")),
        ('{"prompt": "a", "structured_outputs": {"rgex": "a"}}', ("line 1", "rgex", "regex")),
        ('{"prompt": "a", "structured_outputs": 3}', ("line 1", "structured_outputs")),
    ],
)
def test_bad_lines(tmp_path, line, words):
    file = tmp_path / "p.jsonl"
    file.write_text(line)
    with pytest.raises(SpeccError) as caught:
        [entry.params({"max_tokens": 4}) for entry in read_prompt_lines(file)]
    for word in words:
        assert word in str(caught.value)


def test_a_line_may_ask_for_a_structure(tmp_path):
    file = write(tmp_path / "p.jsonl", {"prompt": "a", "structured_outputs": {"choice": ["x"]}})
    (line,) = read_prompt_lines(file)
    assert line.params({}).structured_outputs.choice == ["x"]
