"""Backends are found by name: those of specc when an engine needs them, others once registered."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from specc import LLM, SamplingParams
from specc.artifact import backends as known
from specc.artifact.manifest import MANIFEST_FILE
from specc.errors import ConfigError, EngineError
from specc.runtime.backends import registry
from specc.runtime.backends.base import LoadLimits, RuntimeBackend
from specc.runtime.engine import Engine
from tests.runtime.backends.counted_backend import FACTS, CountedBackend

PROMPTS = ["hello world", "ab"]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> CountedBackend:
    """The backend of one file, registered for a test."""
    monkeypatch.setattr(known, "_known", dict(known._known))
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    backend = CountedBackend()
    known.register(FACTS)
    registry.register(FACTS.name, backend)
    return backend


@pytest.fixture
def engine_of_it(tiny_engine: Path, tmp_path: Path) -> Path:
    """An engine whose manifest names the backend."""
    path = shutil.copytree(tiny_engine, tmp_path / "engine")
    manifest = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
    manifest["backend"] = FACTS.name
    (path / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")
    return path


def generate(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.default("tree-2-1")
@pytest.mark.parametrize("plan", ["tree-2-1", "chain-3", "off"])
def test_an_engine_of_another_backend_says_what_eager_says(
    counted: CountedBackend, tiny_engine: Path, engine_of_it: Path, plan: str
) -> None:
    engine = Engine.load(engine_of_it, max_num_seqs=2)
    assert (engine.backend, engine.facts) == (FACTS.name, FACTS)
    assert counted.limits == LoadLimits(max_num_seqs=2)
    llm = LLM(engine, plan)
    assert generate(llm) == generate(LLM(Engine.load(tiny_engine, backend="eager"), plan))
    # one for each iteration: prompts are fed before the first step
    assert engine.target.num_passes == llm._core.num_iterations  # type: ignore[attr-defined,union-attr]
    # as its facts and its steps say
    assert not llm._runner.shares_pass
    assert not llm._scheduler._looks_ahead


def test_facts_alone_do_not_share_a_pass(
    counted: CountedBackend, engine_of_it: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that run as a whole cannot, whatever the facts of their backend are."""
    monkeypatch.setitem(known._known, FACTS.name, replace(FACTS, shares_pass=True))
    llm = LLM(engine_of_it)
    assert llm.engine.facts.shares_pass
    assert not llm._runner.shares_pass


def test_eager_runs_engines_of_every_backend(counted: CountedBackend, engine_of_it: Path) -> None:
    assert Engine.load(engine_of_it, backend="eager").backend == "eager"
    assert counted.limits is None


def test_an_engine_of_no_known_backend_is_refused(engine_of_it: Path) -> None:
    with pytest.raises(EngineError, match="backend counted") as caught:
        Engine.load(engine_of_it)
    assert "cpu, cuda, eager, onnx, tensorrt" in caught.value.needed


def test_a_name_stands_for_one_backend(counted: CountedBackend) -> None:
    with pytest.raises(ConfigError, match="a second backend counted"):
        registry.register(FACTS.name, CountedBackend())
    with pytest.raises(ConfigError, match="backend 'nobody'"):
        registry.register("nobody", CountedBackend())
    with pytest.raises(ConfigError, match="backend 'nobody'"):
        registry.backend_of("nobody")


@pytest.mark.parametrize("name", known.backend_names())
def test_every_known_backend_is_found(name: str) -> None:
    assert isinstance(registry.backend_of(name), RuntimeBackend)
    assert registry.backend_of(name) is registry.backend_of(name)


LAZY = """
import json, sys
import specc.runtime.core, specc.runtime.llm, specc.runtime.service.service
from specc.runtime.engine import Engine

engine = Engine.load(sys.argv[1], backend="eager")
heavy = ("triton", "onnx", "onnxruntime", "tensorrt", "tensorrt_rtx")
own = [m for m in sys.modules if m.startswith("specc.runtime.backends.") and m.endswith(".backend")]
print(json.dumps([[m for m in heavy if m in sys.modules], own]))
"""


@pytest.mark.slow
def test_only_the_backend_of_an_engine_is_imported(tiny_engine: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", LAZY, str(tiny_engine)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], ["specc.runtime.backends.eager.backend"]]
