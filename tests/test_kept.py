"""What tests keep is made again when anything changes that it is made of, and only then."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.artifact.directory import open_engine
from specc.config import CompileConfig
from tests import engines, kept, models
from tests.traces import fingerprint


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Directories that were made, in a repository and a cache of their own."""
    monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "one.py").write_text("1")
    return []


def ask(made: list[Path], path: Path, *key: object) -> str:
    """What is kept for a key, as a run that begins now sees it."""

    def make(directory: Path) -> None:
        (directory / "part").mkdir(parents=True)
        (directory / "part" / "file").write_text(repr(key))
        made.append(directory)

    kept._source_hash.cache_clear()
    kept.environment.cache_clear()
    kept.keep(path, make, *key, sources=("code",))
    return (path / "part" / "file").read_text()


def test_the_same_is_made_once(made: list[Path], tmp_path: Path) -> None:
    assert ask(made, tmp_path / "a", 1, "x") == ask(made, tmp_path / "b", 1, "x") == "(1, 'x')"
    assert len(made) == 1
    assert not made[0].exists()


@pytest.mark.parametrize("change", ["key", "content", "name", "setting"])
def test_whatever_changes_makes_another(
    made: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    ask(made, tmp_path / "a", 1)
    if change == "content":
        (tmp_path / "code" / "one.py").write_text("2")
    elif change == "name":
        (tmp_path / "code" / "one.py").rename(tmp_path / "code" / "two.py")
    elif change == "setting":
        monkeypatch.setenv("SPECC_TENSORRT", "other")
    ask(made, tmp_path / "b", 2 if change == "key" else 1)
    assert len(made) == 2


def test_what_nobody_asked_for_makes_room(tmp_path: Path) -> None:
    for i, name in enumerate(("new", "old", "middle")):
        (tmp_path / f"{name}.tar").write_bytes(bytes(100))
        (tmp_path / f"{name}.tar.sha256").touch()
        os.utime(tmp_path / f"{name}.tar", times=(0, (30, 10, 20)[i]))
    kept.remove_oldest(tmp_path, 300)
    assert len(list(tmp_path.iterdir())) == 6
    kept.remove_oldest(tmp_path, 250)
    assert {path.name.split(".")[0] for path in tmp_path.iterdir()} == {"new", "middle"}


def test_models_that_are_alike_are_traced_once() -> None:
    """Values of parameters are not in a trace; all else that can differ is told apart."""
    model, other = (models.build_model("gemma3", seed=seed) for seed in (0, 1))
    other.config._name_or_path = other.name_or_path = other.model.name_or_path = "elsewhere"
    assert fingerprint(model) == fingerprint(other) is not None
    others = [
        models.build_model("gemma3-tied"),
        models.build_model("gemma3", rms_norm_eps=1e-3),
        models.build_model("gemma3", sliding_window=9),
        models.build_model("gemma3").to(torch.bfloat16),
        models.build_model("gemma3").train(),
    ]
    others[1].config.rms_norm_eps = model.config.rms_norm_eps
    found = [fingerprint(other) for other in (model, *others)]
    assert None not in found
    assert len(set(found)) == len(found)
    buffer = models.build_model("gemma3")
    next(buffer.buffers()).mul_(2)
    assert fingerprint(buffer) not in found


def test_changed_models_are_traced_anew() -> None:
    hooked, patched, other = (models.build_model("llama") for _ in range(3))
    hooked.model.norm.register_forward_hook(lambda *args: None)
    patched.model.norm.forward = lambda x: x
    other.model.norm = type("Norm", (torch.nn.Identity,), {"__module__": __name__})()
    assert [fingerprint(model) for model in (hooked, patched, other)] == [None] * 3


def test_an_engine_names_the_checkpoint_of_now(
    tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was compiled of first may be gone: pytest removes directories of earlier runs."""
    monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path / "cache"))
    config = CompileConfig(max_seq_len=32, max_batch_size=1)
    for name in ("first", "second"):
        checkpoint = shutil.copytree(tiny_models.target, tmp_path / name)
        engine = engines.build(checkpoint, [], tmp_path / f"engine-{name}", config)
        (entry,) = open_engine(engine, True).models
        assert (entry.source, entry.location) == (str(checkpoint), str(checkpoint))
        shutil.rmtree(checkpoint)
