"""Kept tokens are those of this engine, these prompts and this code; nothing is computed twice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.gpu import expected, kinds

PROMPTS = [[3, 4], [5]]


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    for name in expected.READ:
        path = tmp_path / "engine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "engine"


@pytest.fixture
def oracle(monkeypatch, engine):
    """The engines that were loaded; the third output is of the first one, and so on."""
    from specc.runtime import llm
    from specc.runtime.engine import Engine

    loaded = []

    def load(path: Path, backend: str) -> SimpleNamespace:
        loaded.append((path, backend))
        return SimpleNamespace()

    monkeypatch.setattr(Engine, "load", load)
    monkeypatch.setattr(llm, "LLM", lambda engine, plan: plan)
    monkeypatch.setattr(kinds, "tokens_of", lambda plan, prompts, n: [[len(loaded)] * n, [7]])
    return loaded


def test_tokens_are_kept_until_something_changes(tmp_path, engine, oracle, monkeypatch):
    def tokens(prompts=PROMPTS, num_tokens=2):
        return expected.expected_tokens(engine, prompts, num_tokens, tmp_path / "kept")

    assert tokens() == tokens() == [[1, 1], [7]]
    assert oracle == [(engine, "eager")]
    assert tokens([[3, 4], [6]])[0] == [2, 2]
    assert tokens(num_tokens=3)[0] == [3, 3, 3]
    for count, name in enumerate(expected.READ, 4):
        (engine / name).write_text("other")
        assert tokens()[0] == [count, count]
    (engine / "manifest.json").write_text("made at another time")
    assert tokens()[0] == [6, 6]
    monkeypatch.setattr(expected, "_code", lambda: [Path(expected.__file__)])
    assert tokens()[0] == [7, 7]


def test_accepted_drafts_are_kept_until_something_changes(tmp_path, engine, oracle, monkeypatch):
    """Those of a plan, whose step and draft models count, too."""
    monkeypatch.setattr(kinds, "accepted_of", lambda plan: [len(oracle), 0])

    def accepted(plan="chain-2"):
        return expected.expected_accepted(engine, plan, PROMPTS, 2, tmp_path / "kept")

    files = [f"steps/{plan}.json" for plan in ("chain-2", "chain-3")]
    files += [name.replace("*", "0") for name in expected.DRAFTS]
    for name in files:
        (engine / name).parent.mkdir(exist_ok=True)
        (engine / name).write_text(name)
    assert accepted() == accepted() == [1, 0]
    assert accepted("chain-3") == [2, 0]
    for count, name in enumerate([files[0], *files[2:]], 3):
        (engine / name).write_text("other")
        assert accepted() == [count, 0]


def test_another_version_of_torch_rounds_otherwise(tmp_path, engine, oracle, monkeypatch):
    kept = tmp_path / "kept"
    expected.expected_tokens(engine, PROMPTS, 2, kept)
    monkeypatch.setattr(torch, "__version__", "0.0")
    expected.expected_tokens(engine, PROMPTS, 2, kept)
    assert len(oracle) == len([*kept.iterdir()]) == 2


def test_no_reader_sees_half_a_file(tmp_path, engine, oracle, monkeypatch):
    """Kinds that share an engine keep the same file, and run at once."""
    kept, placed = tmp_path / "kept", []

    def replace(source: Path, target: Path) -> None:
        placed.append((json.loads(Path(source).read_text()), Path(target).exists()))
        os.rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    assert expected.expected_tokens(engine, PROMPTS, 2, kept) == [[1, 1], [7]]
    assert placed == [([[1, 1], [7]], False)]
    # nothing is left beside it
    assert [file.suffix for file in kept.iterdir()] == [".json"]


def test_the_code_that_counts_is_there():
    names = {f"{path.parent.name}/{path.name}" for path in expected._code()}
    assert {"reference/dense.py", "eager/program.py", "execution/prompts.py"} <= names
