"""A backend of one file: its facts, and what the compiler asks; nobody else knows its name."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.artifact import backends as known
from specc.artifact.backends import BackendFacts, backend_names, facts_of
from specc.artifact.directory import open_engine
from specc.compiler.backends import registry
from specc.compiler.backends.base import CompilerBackend, Emitted, UnfinishedEngine
from specc.compiler.backends.registry import choose_backend, compiler_backend
from specc.compiler.build import build
from specc.compiler.extend import extend_engine
from specc.config import CompileConfig
from specc.errors import ConfigError, EngineError
from specc.kernels import ops
from specc.passes.pipeline import PHASES, Phases
from specc.passes.rewrite.fuse_rms_norm import FuseRMSNorm
from specc.runtime.backends import registry as runtime
from specc.runtime.backends.base import LoadLimits
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, SpecPlan
from tests.runtime.backends.counted_backend import CountedBackend

# the file


class AbacusBackend(CompilerBackend):
    """Engines with a list of the operators that each model calls."""

    facts = BackendFacts(
        "abacus", ("bfloat16",), "cpu", "flat",
        model_files=("onnx_file",), options=("compute_capability",),
    )  # fmt: skip
    aliases = ("beads",)
    prefill_chunk = 1024

    def check_config(self, config: CompileConfig, dtypes: Sequence[str]) -> None:
        if config.compute_capability not in (None, "1.0"):
            raise ConfigError("another abacus", "1.0", "pass --compute-capability 1.0")

    def phases(self, max_seq_len: int, pass_tokens: int | None = None) -> Phases:
        return (("norms", (FuseRMSNorm,)),)

    def emit(self, engine: UnfinishedEngine) -> Emitted:
        with engine.context.timer.phase("list operators"):
            for model in engine.models:
                calls = [n for n in model.program.graph.nodes if n.op == "call_function"]
                called = sorted({str(node.target) for node in calls})
                engine.writer.write_json(model.entry.onnx_file, called)
        return Emitted(warnings=["an abacus is slow"])

    def probe_refusal(self, manifest: Any) -> str | None:
        return "there is no abacus here"


# its tests

TREE = SpecPlan.from_widths((2, 1))


@pytest.fixture(autouse=True)
def abacus(monkeypatch: pytest.MonkeyPatch) -> CompilerBackend:
    """Registered until the test ends."""
    monkeypatch.setattr(known, "_known", dict(known._known))
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    known.register(AbacusBackend.facts)
    return registry.register(AbacusBackend())


def compile_pair(models: Any, output: Path, **options: Any) -> Any:
    fields = {"plans": (TREE,), "dtype": "bfloat16", "max_seq_len": 64, "backend": "abacus"}
    return build(
        models.target,
        models.draft,
        output,
        CompileConfig(**(fields | options)),
        probe=lambda path: pytest.fail("nobody can try it"),
    )


def test_build_compiles_for_it(tiny_models: Any, tmp_path: Path) -> None:
    compilation = compile_pair(
        tiny_models, tmp_path / "engine", compute_capability="1.0", max_batch_size=16
    )
    manifest = open_engine(tmp_path / "engine")
    assert manifest == compilation.manifest
    assert (manifest.backend, manifest.device) == ("abacus", "cpu")
    assert manifest.limits.prefill_chunk == AbacusBackend.prefill_chunk
    assert {"an abacus is slow", "no probe: there is no abacus here"} <= set(compilation.warnings)
    assert "list operators" in compilation.seconds
    for model in manifest.models:
        assert model.onnx_file in manifest.files
        assert model.onnx_file in manifest.required_files
        called = json.loads((tmp_path / "engine" / model.onnx_file).read_text())
        assert str(ops.rms_norm) in called, "its phase ran"
    ran = {record.phase for record in compilation.records}
    assert ran == {*(name for name, _ in PHASES), "vocabulary", "backend", "norms"}


def test_its_engines_get_other_plans(tiny_models: Any, tmp_path: Path) -> None:
    path = tmp_path / "engine"
    compile_pair(tiny_models, path)
    with extend_engine(path, open_engine(path)) as extension:
        extension.commit([SpecPlan.from_widths((1, 1, 1, 1)), OFF], "fixed", {})
    assert [plan.name for plan in open_engine(path).plans] == ["chain-4", "off"]


@pytest.mark.slow
def test_with_a_file_on_the_other_side_its_engines_run(
    tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_registered", dict(runtime._registered))
    loader = CountedBackend()
    runtime.register("abacus", loader)
    compile_pair(tiny_models, tmp_path / "engine")
    loaded = Engine.load(tmp_path / "engine")
    assert (loaded.backend, loader.limits) == ("abacus", LoadLimits())
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found, wanted = (
        [output.outputs[0].token_ids for output in LLM(engine).generate([[5, 6, 7]], params)]
        for engine in (loaded, Engine.load(tmp_path / "engine", backend="eager"))
    )
    assert found == wanted


@pytest.mark.parametrize(
    ("options", "found", "words"),
    [
        ({"compute_capability": "2.0"}, "another abacus", "1.0"),
        ({"decomposable_attention": True}, "--decomposable-attention with backend abacus", "tenso"),
        ({"dtype": "float32"}, "dtype float32 for the backend abacus", "bfloat16, or one of"),
        ({"backend": "beads"}, "--backend beads", "abacus or cpu"),
    ],
)
def test_what_it_refuses(tiny_models: Any, tmp_path: Path, options: Any, found: str, words: str):
    with pytest.raises(ConfigError) as caught:
        compile_pair(tiny_models, tmp_path / "engine", **options)
    assert caught.value.found == found
    assert words in caught.value.needed
    assert not list(tmp_path.iterdir())


def test_people_s_names_for_it_are_understood() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_backend("beads")
    assert caught.value.do == "say --backend abacus"


def test_an_installation_without_it_refuses_its_engines(
    tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_pair(tiny_models, tmp_path / "engine")
    with pytest.raises(EngineError, match="for backend abacus"):
        open_engine(tmp_path / "engine", backends=("cpu", "eager"))
    monkeypatch.delitem(known._known, "abacus")
    with pytest.raises(EngineError, match="an engine for backend abacus") as caught:
        open_engine(tmp_path / "engine")
    assert "compile the engine again" in caught.value.do


def test_it_is_chosen_by_default_only_if_its_facts_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SPECC_BACKEND", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_backend(None)[0].name in ("cpu", "eager")
    by_default = dataclasses.replace(AbacusBackend.facts, by_default=True)
    monkeypatch.setitem(known._known, "abacus", by_default)
    assert choose_backend(None) == (compiler_backend("abacus"), [])


@pytest.mark.parametrize(
    ("capability", "has_triton", "chosen"),
    [
        ((9, 0), True, ("cuda",)),
        ((9, 0), False, ("cpu", "eager")),
        ((8, 0), True, ("cpu", "eager")),
    ],
)
def test_a_gpu_is_chosen_where_one_like_it_has_run_engines(
    capability: tuple[int, int],
    has_triton: bool,
    chosen: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SPECC_BACKEND", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (object() if has_triton else None) if name == "triton" else find(name),
    )
    plain = CompileConfig(plans=())
    assert choose_backend(None, plain)[0].name in chosen
    other, warnings = choose_backend(None, dataclasses.replace(plain, activation_bits=8))
    assert other.name in ("cpu", "eager")
    found = any("--activation-bits with backend cuda" in x for x in warnings)
    assert found == (chosen == ("cuda",))
    monkeypatch.setenv("SPECC_BACKEND", "eager")
    assert choose_backend(None)[0].name == "eager"


def test_a_gpu_that_cuda_cannot_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.delenv("SPECC_BACKEND", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", fail)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert choose_backend(None)[0].name in ("cpu", "eager")


def test_a_name_is_taken_once_and_known_before() -> None:
    with pytest.raises(ConfigError, match="a second backend abacus"):
        registry.register(AbacusBackend())

    class Unknown(CompilerBackend):
        facts = BackendFacts("unknown", ("float32",), "cpu", "flat")

    with pytest.raises(ConfigError, match="of which nothing is known"):
        registry.register(Unknown())
    with pytest.raises(ConfigError, match="backend 'unknown'"):
        compiler_backend("unknown")


def test_every_backend_is_found_by_its_name() -> None:
    for name in backend_names():
        backend = compiler_backend(name)
        assert (backend.name, backend.facts) == (name, facts_of(name))
