"""Which backend an engine gets, the compiler that it takes, and engines that cannot run here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specc.artifact import directory as artifact
from specc.artifact.manifest import MANIFEST_FILE
from specc.compiler import build as compiler
from specc.compiler.backends.registry import choose_backend
from specc.compiler.build import Compilation
from specc.config import CompileConfig
from specc.errors import CompilerError, ConfigError, EngineError
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import fake_compiler as fakes
from tests.command_line import invoke
from tests.conftest import TinyModels
from tests.models import DRAFT_NOISE, save_tiny

PLANS = (SpecPlan.from_widths((2, 1)),)
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 2, 3], [65] * 20]


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As users have it: conftest's choice of the backend is for other tests."""
    monkeypatch.delenv("SPECC_BACKEND", raising=False)
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """A pair of one shape, whose program other tests compile, too: tests/runtime/backends/cpu."""
    root = tmp_path_factory.mktemp("opt")
    return TinyModels(
        save_tiny("opt", root / "target"),
        save_tiny("opt", root / "draft", noise=DRAFT_NOISE["opt"]),
    )


@pytest.fixture
def fake_compiler(tmp_path: Path) -> Callable[..., Path]:
    return partial(fakes.fake_compiler, tmp_path / "bin")


def compile_pair(tiny_models: Any, output: Path, backend: str | None) -> Compilation:
    config = CompileConfig(
        plans=PLANS, max_seq_len=64, max_batch_size=2, backend=backend, probe=False
    )
    return compiler.build(tiny_models.target, tiny_models.draft, output, config)


@pytest.fixture(scope="module")
def built(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine for the backend cpu; read only."""
    path = tmp_path_factory.mktemp("backend") / "engine"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SPECC_BACKEND", raising=False)
        compile_pair(tiny_models, path, None)
    return path


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "engine"))


def generate(engine: Path, **options: Any) -> list[list[int]]:
    outputs = LLM(engine, **options).generate(PROMPTS, PARAMS)
    return [output.outputs[0].token_ids for output in outputs]


def edit_manifest(engine: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = engine / MANIFEST_FILE
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def choose(wanted: str | None) -> tuple[str, list[str]]:
    """The name of the backend, and warnings."""
    backend, warnings = choose_backend(wanted)
    return backend.name, warnings


def assert_complete(error: CompilerError | ConfigError | EngineError) -> None:
    assert all((error.found, error.needed, error.do))


class TestChoice:
    def test_the_environment_chooses_where_the_user_does_not(self, monkeypatch):
        monkeypatch.setenv("SPECC_BACKEND", "eager")
        assert choose(None) == ("eager", [])
        monkeypatch.setenv("SPECC_BACKEND", "cpu")
        assert choose("eager") == ("eager", [])
        assert choose(None) == ("cpu", [])

    @pytest.mark.parametrize("value", ["CPU", "gpu", "cpu ", "0"])
    def test_no_such_backend(self, value, monkeypatch):
        for wanted, variable in ((value, ""), (None, value)):
            monkeypatch.setenv("SPECC_BACKEND", variable)
            with pytest.raises(ConfigError, match="cpu or cuda or eager") as caught:
                choose(wanted)
            assert value in caught.value.found
            assert_complete(caught.value)


class TestCompile:
    def test_no_compiler_is_needed(self, tiny_models, tmp_path, monkeypatch):
        monkeypatch.setenv("CXX", "/nonexistent/g++")
        monkeypatch.setenv("SPECC_CACHE_DIR", "/nonexistent/cache")
        compilation = compile_pair(tiny_models, tmp_path / "engine", None)
        assert compilation.warnings == []
        assert compilation.manifest.backend == "cpu"
        assert Engine.load(tmp_path / "engine").backend == "cpu"

    def test_an_engine_of_graphs(self, tiny_models, tmp_path):
        compile_pair(tiny_models, tmp_path / "engine", "eager")
        assert Engine.load(tmp_path / "engine").backend == "eager"
        with pytest.raises(EngineError, match="backend cpu and an engine for backend eager") as e:
            Engine.load(tmp_path / "engine", backend="cpu")
        assert "--backend cpu" in e.value.do

    def test_what_an_engine_for_cpu_holds(self, built):
        manifest = artifact.open_engine(built)
        assert manifest.backend == "cpu"
        assert {Path(name).suffix for name in manifest.files} <= {".json", ".safetensors"}
        report = (built / "report.json").read_text()
        assert '"LowerLinear"' in report

    def test_eager_graphs_of_an_engine_for_cpu(self, built):
        found = generate(built)
        assert found == generate(built, backend="eager") == generate(built, backend="cpu")


class TestOpen:
    def test_another_version_of_the_instructions(self, engine):
        edit_manifest(engine, lambda data: data.update(instructions=999))
        for backend in (None, "eager"):
            with pytest.raises(EngineError, match="an engine of instructions 999") as caught:
                Engine.load(engine, backend=backend)
            assert "compile the engine again" in caught.value.do

    def test_another_version_of_torch_and_of_specc(self, engine, built):
        edit_manifest(engine, lambda data: data.update(torch_version="2.11.0", specc_version="9"))
        assert generate(engine) == generate(built)

    def test_a_file_that_was_altered(self, engine):
        name = "target/program.json"
        data = (engine / name).read_bytes()
        (engine / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(EngineError, match="sha256"):
            Engine.load(engine)


class TestCommandLine:
    def compile(self, tiny_models: Any, output: Path, *options: str) -> Any:
        pair = "--target", tiny_models.target, "--draft", tiny_models.draft, "-o", output
        return invoke("compile", *pair, "--max-seq-len", 64, "--no-probe", *options)

    @pytest.fixture(autouse=True)
    def no_compiler(self, monkeypatch) -> None:
        monkeypatch.setenv("CXX", "/nonexistent/g++")

    def test_backend_eager(self, tiny_models, tmp_path):
        result = self.compile(tiny_models, tmp_path / "engine", "--backend", "eager")
        assert result.exit_code == 0, result.stderr
        assert "warning" not in result.stderr
        assert "backend eager on cpu" in invoke("inspect", tmp_path / "engine").stdout

    def test_no_backend_and_no_compiler(self, tiny_models, tmp_path):
        result = self.compile(tiny_models, tmp_path / "engine")
        assert result.exit_code == 0, result.stderr
        assert "warning" not in result.stderr

    def test_refused(self, tiny_models, tmp_path):
        result = self.compile(tiny_models, tmp_path / "engine", "--backend", "gpu")
        assert result.exit_code == 2, result.output
        lines = [line.partition(":")[0] for line in result.stderr.splitlines()]
        assert lines == ["found", "needed", "do"]
        assert "cpu or cuda or eager" in result.stderr
        assert list(tmp_path.iterdir()) == []

    def test_an_engine_for_cpu(self, built):
        assert "backend cpu on cpu" in invoke("inspect", built).stdout
        result = invoke("run", built, "hello", "--max-tokens", 4, "--ignore-eos")
        assert result.exit_code == 0, result.stderr


def test_without_operators_for_this_processor(tmp_path, monkeypatch) -> None:
    """Another backend, with a warning that says how to get them; doctor says the same."""
    from specc.cli.doctor import examine

    def state(name: str) -> dict[str, str]:
        (check,) = (c for c in examine()["checks"] if c["name"] == name)
        return check

    assert state("CPU operators")["state"] == "ok"
    monkeypatch.setenv("SPECC_LIBRARY_DIR", str(tmp_path))
    assert state("CPU operators")["state"] == "missing"
    assert "pip install -e ." in state("CPU operators")["how"]
    backend, (warning,) = choose(None)
    assert backend == "eager"
    assert "no library of the CPU operators" in warning
    assert "pip install -e ." in warning
    with pytest.raises(EngineError, match="no library of the CPU operators") as caught:
        choose("cpu")
    assert_complete(caught.value)


def test_doctor_knows_the_compiler(tmp_path, fake_compiler, monkeypatch) -> None:
    from specc.cli.doctor import examine

    def compiler() -> dict[str, str]:
        (check,) = (c for c in examine()["checks"] if c["name"] == "C++ compiler")
        return check

    assert compiler()["state"] == "ok"
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    assert compiler()["state"] == "missing"
    monkeypatch.setenv("CXX", str(fake_compiler("9.4.0")))
    assert compiler()["state"] == "unsupported"
    assert "9.4.0" in compiler()["detail"]
