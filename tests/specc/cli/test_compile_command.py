"""`specc compile`: what it prints, and how every bad input ends."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from specc.artifact.engine_writer import EngineWriter
from specc.cli import build_engine
from specc.progress import ProgressEvent
from tests.command_line import MAIN, assert_refused, invoke
from tests.tiers import only


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_tokenizers_differ(compile_into, tiny_models, tmp_path):
    path = variant(tiny_models, tmp_path / "draft")
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[7:9]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(tokenizer))
    result = compile_into(draft=path)
    assert result.exit_code == 0, result.output
    assert "the draft proposes 257 of 257 target ids, and reads 0" in result.output


def test_tokenizers_without_known_bytes_differ(compile_into, tiny_models, tmp_path):
    path = variant(tiny_models, tmp_path / "draft")
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"}
    file.write_text(json.dumps(tokenizer | {"model": words, "added_tokens": []}))
    assert_refused(compile_into(draft=path), "WordLevel")
    assert_nothing_left(compile_into)


UNSUPPORTED = {
    "bidirectional": (
        "BertLMHeadModel",
        "layer.0.attention",
        {"model_type": "bert", "num_hidden_layers": 1},
    ),
}


@pytest.mark.parametrize("kind", only(("bidirectional",), UNSUPPORTED))
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


@pytest.mark.slow
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


@pytest.mark.parametrize("full", ["target/program.json", "target/weights.safetensors"])
def test_a_full_disk_leaves_what_was_there(compile_into, monkeypatch, full):
    """Whatever file it is that finds no room: nothing half-written, and the old engine stays."""
    old = compile_into.place / "engine"
    old.mkdir()
    (old / "manifest.json").write_bytes(b"{}")
    path_of = EngineWriter.path

    def on_a_full_disk(self, name: str) -> Path:
        path = path_of(self, name)
        if name == full:
            path.symlink_to("/dev/full")
        return path

    monkeypatch.setattr(EngineWriter, "path", on_a_full_disk)
    result = compile_into("--max-seq-len", 64, "--force")
    assert_refused(result, full, "No space left on device", "free some space")
    assert [path.name for path in compile_into.place.iterdir()] == ["engine"]
    assert (old / "manifest.json").read_bytes() == b"{}"


@pytest.mark.parametrize("phase", ["check models", "write target weights", "probe"])
def test_an_interrupted_compilation_leaves_nothing(compile_into, monkeypatch, phase):
    """Ctrl-C as a phase begins: before there is a file, and when the engine is all but named."""
    make_listener = build_engine.make_listener
    built = []

    class Interrupted:
        def __enter__(self):
            self.told = make_listener().__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.told.__exit__(*error)

        def __call__(self, event: ProgressEvent) -> None:
            self.told(event)
            if event.phase == phase and event.seconds is None:
                built.extend(path.name[:16] for path in compile_into.place.iterdir())
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(build_engine, "make_listener", Interrupted)
    result = compile_into("--max-seq-len", 64)
    assert result.exit_code == 130, result.output
    assert result.stderr.splitlines()[-1] == "interrupted"
    # the directory that it is built in, and its lock
    assert built == [".engine.partial-"] * 2
    assert_nothing_left(compile_into)


def compile_process(tiny_models, output: Path, **options) -> subprocess.Popen:
    args = [*MAIN, "compile", "--target", str(tiny_models.target), "-o", str(output)]
    return subprocess.Popen(args, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.slow
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


@pytest.mark.slow
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
