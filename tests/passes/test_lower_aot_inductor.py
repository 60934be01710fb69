"""What is handed to Inductor: programs without their weights."""

from __future__ import annotations

import threading

import pytest
import torch

from specc.errors import CompilerError
from specc.passes import lower_aot_inductor
from specc.passes.lower_aot_inductor import BoundProgram, _content_key, turn
from specc.runtime.program import read_json


@pytest.fixture
def program(tiny_engine):
    return read_json(tiny_engine / "target/program.json")


def test_inductor_has_nothing_to_copy(program) -> None:
    """It clones buffers, which costs as much memory as the checkpoint, and takes parameters."""
    module = BoundProgram(program)
    kinds = [entry["kind"] for entry in program["inputs"]]
    num_weights = kinds.count("weight") + kinds.count("constant")
    assert list(module.buffers()) == []
    assert [name for name, _ in module.named_parameters()] == [f"w{i}" for i in range(num_weights)]
    assert not any(weight.requires_grad for weight in module.parameters())


def test_the_cache_knows_all_that_a_package_is_made_of(program, monkeypatch, tmp_path) -> None:
    compiler = lower_aot_inductor.native.find_compiler()
    key = _content_key(program, compiler)
    assert key == _content_key(program, compiler)
    assert key != _content_key(program | {"name": "draft_0"}, compiler)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.13.1")
        assert key != _content_key(program, compiler)
    # the same compiler by way of a script with other arguments
    monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path))
    keys = set()
    for flags in ("-g0", "-O1"):
        monkeypatch.setenv("CXX", f"{compiler} {flags}")
        keys.add(_content_key(program, lower_aot_inductor.native.find_compiler()))
    assert len(keys | {key}) == 3


def test_who_compiles_the_same_waits_for_its_turn(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    same, other = threading.Event(), threading.Event()

    def enter(name: str, event: threading.Event) -> None:
        with turn(name):
            event.set()

    with turn("a"):
        threads = [
            threading.Thread(target=enter, args=args) for args in (("a", same), ("b", other))
        ]
        for thread in threads:
            thread.start()
        assert other.wait(10), "another name is no obstacle"
        assert not same.wait(0.2)
    assert same.wait(10)
    for thread in threads:
        thread.join()


def test_a_temporary_directory_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(CompilerError, match="writing") as caught, turn("a"):
        pass
    assert "TMPDIR" in caught.value.do
