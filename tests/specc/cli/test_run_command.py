"""`specc run`: what it prints, and how bad prompts and damaged engines end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.command_line import MAIN, assert_refused, invoke

EIGHT = ("--temperature", 0, "--max-tokens", 8, "--ignore-eos")


def test_run_streams_the_text(tiny_engine):
    result = invoke("run", tiny_engine, "hello", *EIGHT, "--stats")
    assert result.exit_code == 0, result.stderr
    as_json = invoke("run", tiny_engine, "hello", *EIGHT, "--json")
    (output,) = json.loads(as_json.stdout)["outputs"]
    assert result.stdout.rstrip("\n") == output["text"].rstrip("\n")
    assert len(output["token_ids"]) == 8
    assert output["finish_reason"] == "length"
    for word in ("mean acceptance length", "accepted per depth", "target passes saved", "verify"):
        assert word in result.stderr


def test_run_takes_prompts_from_everywhere(tiny_engine, tmp_path):
    file, lines = tmp_path / "prompt.txt", tmp_path / "prompts.jsonl"
    file.write_text("hello\n", encoding="utf-8")
    # U+2028 ends a line for splitlines, not for JSON
    prompts = ["hello\n", "a\u2028b"]
    text = "".join(json.dumps({"prompt": p}, ensure_ascii=False) + "\n" for p in prompts)
    lines.write_text(text, encoding="utf-8")
    options = ("--temperature", 0, "--max-tokens", 6, "--ignore-eos", "--json")
    results = [
        invoke("run", tiny_engine, "hello\n", *options),
        invoke("run", tiny_engine, "--file", file, *options),
        invoke("run", tiny_engine, *options, stdin="hello\n"),
        invoke("run", tiny_engine, "--prompts", lines, *options),
        invoke("run", tiny_engine, "hello\n", "--plan", "off", *options),
    ]
    outputs = [json.loads(result.stdout)["outputs"] for result in results]
    assert [len(x) for x in outputs] == [1, 1, 1, 2, 1]
    assert len({tuple(x[0]["token_ids"]) for x in outputs}) == 1
    assert outputs[3][1]["prompt"] == prompts[1]


def test_run_takes_controls(tiny_engine):
    letters = [ord(letter) - ord("!") for letter in "abcd"]
    allowed = [word for token in (*letters, 256) for word in ("--allowed-token-id", token)]
    options = ("--bad-word", "ab", "--bad-word", "c", "--logit-bias", f"{letters[3]}=-100")
    result = invoke(
        "run", tiny_engine, "hello", *allowed, *options,
        "--min-tokens", 8, "--max-tokens", 8, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    (output,) = json.loads(result.stdout)["outputs"]
    assert output["finish_reason"] == "length"
    # nothing else is left: a alone, or b before it
    assert set(output["text"]) <= set("ab")
    assert "ab" not in output["text"]
    assert len(output["text"]) == 8
    wrong = invoke("run", tiny_engine, "hello", "--logit-bias", "5")
    assert wrong.exit_code != 0
    assert "--logit-bias '5'" in wrong.stderr


def test_run_prints_a_batch(tiny_engine, tmp_path):
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    result = invoke("run", tiny_engine, "--prompts", lines, "--max-tokens", 3)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("--- ") == 2


@pytest.mark.slow
def test_closed_pipe_is_quiet(tiny_engine):
    """`specc run … | head -1` after head has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [*MAIN, "run", str(tiny_engine), "hello"], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert process.stderr == ""
    assert process.returncode == 141


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"caf\xe9 au lait", ("0xe9", "offset 3"), id="not-utf-8"),
        pytest.param(b"", ("empty",), id="empty"),
        pytest.param(None, ("No such file",), id="missing"),
        pytest.param(b"x" * 200, ("200", "--max-seq-len"), id="too-long"),
    ],
)
def test_bad_prompt_files(tiny_engine, tmp_path, content, words):
    file = tmp_path / "prompt.txt"
    if content is not None:
        file.write_bytes(content)
    assert_refused(invoke("run", tiny_engine, "--file", file), *words)


def test_bad_standard_input(tiny_engine):
    assert_refused(invoke("run", tiny_engine, stdin=b""), "standard input is empty")
    assert_refused(invoke("run", tiny_engine, stdin=b"\xff"), "0xff", "offset 0")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param("{", ("line 2", "no JSON"), id="no-json"),
        pytest.param('{"text": "a"}', ("line 2", "prompt"), id="no-prompt"),
        pytest.param('["a"]', ("line 2", "prompt"), id="no-object"),
        pytest.param('{"prompt": ""}', ("line 2", "empty"), id="empty"),
    ],
)
def test_bad_prompt_lines(tiny_engine, tmp_path, line, words):
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    assert_refused(invoke("run", tiny_engine, "--prompts", file), *words)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        pytest.param(
            ("a", "--confidence-threshold", 0.5),
            ("--confidence-threshold 0.5", "DSpark drafter"),
            id="confidence-threshold",
        ),
        pytest.param(("",), ("empty",), id="empty-prompt"),
        pytest.param(("a", "--file", "x"), ("PROMPT and --file",), id="two-sources"),
        pytest.param(("a", "--max-tokens", 0), ("--max-tokens 0",), id="max-tokens"),
        pytest.param(("a", "--plan", "nope"), ("tree-2-1",), id="plan"),
        pytest.param(("a", "--stop", ""), ("stop",), id="stop"),
    ],
)
def test_bad_requests(tiny_engine, args, words):
    assert_refused(invoke("run", tiny_engine, *args), *words)


@pytest.fixture
def engine(tiny_engine, tmp_path) -> Path:
    """A copy that a test may break."""
    return shutil.copytree(tiny_engine, tmp_path / "engine")


def edit_manifest(engine: Path, **values: object) -> None:
    file = engine / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_flipped_byte(engine):
    flip_byte(engine / "target" / "weights.safetensors")
    assert_refused(invoke("run", engine, "a", "--verify"), "sha256", "weights.safetensors")
    # and their checksums, unless somebody asks for nothing
    assert_refused(invoke("run", engine, "a"), "crc32", "weights.safetensors")
    unchecked = invoke("run", engine, "a", "--max-tokens", "1", "--no-check-weights")
    assert unchecked.exit_code == 0
    flip_byte(engine / "target" / "program.json")
    assert_refused(invoke("run", engine, "a"), "sha256", "program.json")
    flip_byte(engine / "target" / "program.json")
    # inspect reads the bytes only when asked to
    assert invoke("inspect", engine).exit_code == 0
    result = invoke("inspect", engine, "--verify")
    assert_refused(result, "sha256", "weights.safetensors")
    assert "plan tree-2-1" in result.stdout


def test_other_instructions(engine):
    edit_manifest(engine, instructions=9)
    assert_refused(invoke("run", engine, "a"), "an engine of instructions 9")
    result = invoke("inspect", engine)
    assert result.exit_code == 0
    assert "specc run refuses it" in result.stdout


def test_an_engine_that_is_data_runs_with_other_versions(engine):
    edit_manifest(engine, torch_version="1.0.0", specc_version="0.0.9")
    assert invoke("run", engine, "a", "--max-tokens", "1").exit_code == 0
    assert "refuses" not in invoke("inspect", engine).stdout


def test_an_end_of_the_tokenizer_alone(engine):
    """What no configuration names is marked."""
    ends = {"eos_token_ids": [1, 2], "tokenizer_eos": [2]}
    tokenizer = json.loads((engine / "manifest.json").read_text())["tokenizer"]
    edit_manifest(engine, tokenizer=tokenizer | ends)
    assert "EOS ids: 1, 2 (2 by the tokenizer alone" in invoke("inspect", engine).stdout


def test_no_engine(tmp_path):
    for command in (("run", tmp_path, "a"), ("inspect", tmp_path), ("inspect", tmp_path / "no")):
        assert_refused(invoke(*command), "specc compile")
