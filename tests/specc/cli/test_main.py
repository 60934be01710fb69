"""The command line: what it prints, and how every bad input ends."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from specc.artifact.manifest import SCHEMA_VERSION
from specc.cli.main import app
from specc.errors import RankError

MAIN = [sys.executable, "-P", "-c", "from specc.cli.main import main; main()"]


def invoke(*args: object, stdin: str | bytes | None = None):
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)


def assert_refused(result, *words: str) -> None:
    """Exit code 2 and three lines, after those of progress; `words` are in them."""
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if " … " not in line]
    assert [line.partition(":")[0] for line in lines] == ["found", "needed", "do"], result.stderr
    for word in words:
        assert word in result.stderr


COMMANDS = {
    "compile", "run", "chat", "serve", "bench", "bench serve", "tune", "triton", "inspect",
    "doctor",
}  # fmt: skip


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_has_options_and_examples(command):
    result = invoke(*command.split(), "--help")
    assert result.exit_code == 0
    assert f"Examples:\n    specc {command}" in result.stdout
    assert "--debug" in result.stdout


def test_help_has_every_command():
    lines = invoke("--help").stdout.partition("Commands:\n")[2].splitlines()
    assert {line.partition("  ")[0] for line in map(str.strip, lines) if line} >= COMMANDS
    assert "Did you mean" in invoke("servee").stderr


def test_a_lost_rank_exits_with_1(monkeypatch):
    """Nothing that the user passed; what starts the process may start it again."""

    def fail(*args: object, **options: object) -> None:
        raise RankError("rank 1 was killed by signal 9", "all ranks", "start it again")

    monkeypatch.setattr("specc.cli.run.run_request", fail)
    result = invoke("run", "engine/", "text")
    assert result.exit_code == 1
    assert result.stderr.startswith("found:  rank 1 was killed")


def test_usage_errors_exit_with_2():
    assert invoke("run").exit_code == 2
    assert invoke("compile", "--no-such-option").exit_code == 2
    assert invoke("no-such-command").exit_code == 2


def test_version():
    assert invoke("--version").stdout.startswith("specc ")


@pytest.fixture
def compile_into(tiny_models, tmp_path) -> Callable:
    """Run `specc compile` with the tiny pair into a directory of its own."""
    place = tmp_path / "engines"
    place.mkdir()

    def run(*options: object, target: object = None, draft: object = None):
        args = ["--target", target or tiny_models.target, "--draft", draft or tiny_models.draft]
        return invoke("compile", *args, "-o", place / "engine", *options)

    run.place = place  # type: ignore[attr-defined]
    return run


def assert_nothing_left(compile_into) -> None:
    assert list(compile_into.place.iterdir()) == []


def variant(tiny_models, path: Path, **options: object) -> Path:
    """A checkpoint directory with a changed configuration; its weights need not fit."""
    shutil.copytree(tiny_models.target, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | options))
    return path


def test_compile_prints_a_summary(compile_into):
    result = compile_into("--tree", "2,1", "--tree", "1,1", "--max-seq-len", 64)
    assert result.exit_code == 0, result.stderr
    for word in ("tree-2-1, the default", "chain-2", "workspace", "probe:", "next: specc run"):
        assert word in result.stdout
    # passes by name only on demand
    assert "target: " in result.stdout
    assert "FuseQKV" not in result.stdout
    assert "trace target … " in result.stderr
    assert all(line.endswith(" s") for line in result.stderr.splitlines() if "…" in line)


def test_a_padded_vocabulary_is_accepted(compile_into, tiny_models, tmp_path, save_llama):
    save_llama(tmp_path / "padded", 3, vocab_size=272)
    result = compile_into("--max-seq-len", 64, "--verbose", draft=tmp_path / "padded")
    assert result.exit_code == 0, result.stderr
    assert "FuseQKV               target" in result.stdout


def test_target_is_absent(compile_into):
    result = compile_into(target="/no/such/model")
    assert_refused(result, "/no/such/model")
    assert_nothing_left(compile_into)


def test_target_is_no_causal_model(compile_into, tiny_models, tmp_path):
    path = variant(
        tiny_models, tmp_path / "bert", model_type="bert", architectures=["BertForMaskedLM"]
    )
    assert_refused(compile_into(target=path), "BertForMaskedLM")
    assert_nothing_left(compile_into)


def test_tokenizers_differ(compile_into, tiny_models, tmp_path):
    path = variant(tiny_models, tmp_path / "draft")
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[7:9]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(tokenizer))
    assert_refused(compile_into(draft=path), f"token 7 is {first!r}")
    assert_nothing_left(compile_into)


UNSUPPORTED = {
    "alibi": (
        "BloomForCausalLM",
        "h.0.self_attention",
        {"model_type": "bloom", "n_layer": 1, "n_head": 4},
    ),
    "bidirectional": (
        "BertLMHeadModel",
        "layer.0.attention",
        {"model_type": "bert", "num_hidden_layers": 1},
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_attention_names_the_layer(compile_into, tiny_models, tmp_path, kind):
    architecture, layer, options = UNSUPPORTED[kind]
    options = options | {"architectures": [architecture], "rope_parameters": None}
    path = variant(tiny_models, tmp_path / kind, **options)
    assert_refused(compile_into(target=path, draft=path), layer)
    assert_nothing_left(compile_into)


def test_rotary_that_depends_on_length(compile_into, tiny_models, tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    path = variant(tiny_models, tmp_path / "dynamic", rope_parameters=rope)
    assert_refused(compile_into("--max-seq-len", 300, target=path), "--rope-length 300")
    # beyond the positions that a draft has
    long = ("--max-seq-len", 300, "--rope-length", 300)
    assert_refused(compile_into(*long, target=path), "the draft 0 model has 128 positions")
    assert_refused(compile_into("--rope-length", 300), "leave out --rope-length")
    assert_nothing_left(compile_into)


@pytest.mark.parametrize("widths", ["3,0,1", "2,-1", "0", "3,x", ""])
def test_tree_widths(compile_into, widths):
    assert_refused(compile_into("--tree", widths), "--tree 3,2,1")
    assert_nothing_left(compile_into)


def test_negative_chain(compile_into):
    assert_refused(compile_into("--num-speculative-tokens", -1))


def test_tree_and_chain(compile_into):
    assert_refused(compile_into("--tree", "2,1", "--num-speculative-tokens", 2), "one of them")


def test_tree_deeper_than_the_window(compile_into, tiny_models, tmp_path):
    path = variant(
        tiny_models,
        tmp_path / "mistral",
        model_type="mistral",
        architectures=["MistralForCausalLM"],
        sliding_window=4,
    )
    result = compile_into("--num-speculative-tokens", 4, target=path)
    assert_refused(result, "sliding window of 4", "depth 4", "layers.0")
    assert_nothing_left(compile_into)


@pytest.mark.parametrize(
    "options",
    [
        ("--dtype", "float16"),
        ("--max-batch-size", 0),
        ("--max-seq-len", 1),
        ("--block-size", -1),
        ("--prefill-chunk", 0),
    ],
    ids=lambda options: options[0],
)
def test_options_out_of_range(compile_into, options):
    assert_refused(compile_into(*options), options[0].strip("-"))
    assert_nothing_left(compile_into)


def test_context_beyond_the_models(compile_into):
    assert_refused(compile_into("--max-seq-len", 129), "129", "128")
    assert_nothing_left(compile_into)


def test_output_exists(compile_into):
    output = compile_into.place / "engine"
    output.mkdir()
    (output / "precious").write_text("text")
    assert_refused(compile_into(), "exists")
    # not even --force replaces what is no engine
    assert_refused(compile_into("--force"), "no engine")
    assert [path.name for path in output.iterdir()] == ["precious"]


def test_debug_shows_the_traceback(compile_into):
    result = compile_into("--debug", target="/no/such/model")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


def compile_process(tiny_models, output: Path, **options) -> subprocess.Popen:
    args = [*MAIN, "compile", "--target", str(tiny_models.target), "-o", str(output)]
    return subprocess.Popen(args, stderr=subprocess.PIPE, text=True, **options)


def test_disk_full(tiny_models, tmp_path):
    """A file that may not grow stands for a disk that is full: the write fails midway."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # noqa: E731
    process = compile_process(tiny_models, tmp_path / "engine", preexec_fn=limit)
    _, stderr = process.communicate()
    assert process.returncode == 2, stderr
    lines = stderr.splitlines()[-3:]
    assert [line.partition(":")[0] for line in lines] == ["found", "needed", "do"]
    assert "free" in stderr
    assert list(tmp_path.iterdir()) == []


def test_interrupted_compile(tiny_models, tmp_path):
    process = compile_process(tiny_models, tmp_path / "engine")
    assert process.stderr is not None
    seen = ""
    while "trace target" not in seen:
        seen += process.stderr.read(1)
    # the directory that it is built in, and its lock
    assert {path.name[:8] for path in tmp_path.iterdir()} == {".engine."}
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait() == 130, rest
    assert rest.splitlines()[-1] == "interrupted"
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []


def test_run_streams_the_text(tiny_engine):
    result = invoke("run", tiny_engine, "hello", "--max-tokens", 8, "--ignore-eos", "--stats")
    assert result.exit_code == 0, result.stderr
    as_json = invoke("run", tiny_engine, "hello", "--max-tokens", 8, "--ignore-eos", "--json")
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
    options = ("--max-tokens", 6, "--ignore-eos", "--json")
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
    # weights are mapped, not read, unless somebody asks
    assert invoke("run", engine, "a", "--max-tokens", "1").exit_code == 0
    flip_byte(engine / "target" / "program.json")
    assert_refused(invoke("run", engine, "a"), "sha256", "program.json")
    flip_byte(engine / "target" / "program.json")
    # inspect reads the bytes only when asked to
    assert invoke("inspect", engine).exit_code == 0
    result = invoke("inspect", engine, "--verify")
    assert_refused(result, "sha256", "weights.safetensors")
    assert "plan tree-2-1" in result.stdout


def test_missing_file(engine):
    (engine / "steps" / "off.json").unlink()
    assert_refused(invoke("run", engine, "a"), "off.json")
    assert_refused(invoke("inspect", engine), "off.json is missing")


def test_newer_schema(engine):
    edit_manifest(engine, schema_version=SCHEMA_VERSION + 1)
    assert_refused(invoke("run", engine, "a"), "schema")
    assert_refused(invoke("inspect", engine), "schema")


def test_other_torch(engine):
    edit_manifest(engine, torch_version="1.0.0")
    assert_refused(invoke("run", engine, "a"), "1.0.0", torch.__version__.split("+")[0])
    result = invoke("inspect", engine)
    assert result.exit_code == 0
    assert "specc run refuses it" in result.stdout


def test_no_engine(tmp_path):
    for command in (("run", tmp_path, "a"), ("inspect", tmp_path), ("inspect", tmp_path / "no")):
        assert_refused(invoke(*command), "specc compile")


def test_inspect_shows_everything(tiny_engine):
    result = invoke("inspect", tiny_engine, "--verify")
    assert result.exit_code == 0, result.stderr
    for word in (
        "LlamaForCausalLM",
        "plan tree-2-1 (default)",
        "├── 1 ─ 3",
        "root ─ 1 ─ 2 ─ 3",
        "RewriteTreeAttention",
        "workspace",
        "all hashes agree",
        "steps/off.json",
    ):
        assert word in result.stdout


def test_inspect_one_pass(tiny_engine):
    result = invoke("inspect", tiny_engine, "--pass", "FuseQKV", "--why")
    assert result.exit_code == 0
    assert "FuseQKV" in result.stdout
    assert "SelectLogits" not in result.stdout
    assert_refused(invoke("inspect", tiny_engine, "--pass", "Nope"), "FuseQKV")


def test_inspect_json(tiny_engine):
    data = json.loads(invoke("inspect", tiny_engine, "--json").stdout)
    assert data["manifest"]["default_plan"] == "tree-2-1"
    assert {"pass", "rewrites", "declined", "seconds"} <= set(data["report"]["passes"][0])
    assert data["errors"] == []


def test_doctor():
    result = invoke("doctor", "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["cpu"]["usable_cores"] >= 1
    assert data["memory"]["total"] > 2**20
    checks = {check["name"]: check for check in data["checks"]}
    assert checks["torch"]["state"] == "ok"
    for check in checks.values():
        assert check["state"] == "ok" or check["how"], check
    text = invoke("doctor")
    assert "C++ compiler" in text.stdout
