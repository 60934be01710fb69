"""`specc compile`: what it prints, and how every bad input ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from specc.artifact.engine_writer import EngineWriter
from specc.cli import build_engine
from specc.progress import ProgressEvent
from tests.command_line import assert_refused, invoke


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


def test_rotary_that_depends_on_length(compile_into, tiny_models, tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    path = variant(tiny_models, tmp_path / "dynamic", rope_parameters=rope)
    assert_refused(compile_into("--max-seq-len", 300, target=path), "--rope-length 300")
    # beyond the positions that a draft has
    long = ("--max-seq-len", 300, "--rope-length", 300)
    assert_refused(compile_into(*long, target=path), "the draft 0 model has 128 positions")
    assert_refused(compile_into("--rope-length", 300), "leave out --rope-length")
    assert_nothing_left(compile_into)


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
