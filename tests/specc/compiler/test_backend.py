"""Which backend an engine gets, the compiler that it takes, and engines that cannot run here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
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
from specc.kernels import native
from specc.progress import ProgressEvent
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from specc.system.files import hash_file
from tests import fake_compiler as fakes
from tests.command_line import invoke
from tests.conftest import TinyModels
from tests.models import DRAFT_NOISE, save_tiny

PLANS = (SpecPlan.from_widths((2, 1)),)
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 2, 3], [65] * 20]
LIBRARY = f"native/{native.LIBRARY_NAME}"
FAIL = 'echo "x.cpp:1: error: no such thing" >&2; exit 1'


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


def replace_file(engine: Path, name: str, content: bytes) -> None:
    """Put other content in a file, and its hash in the manifest."""
    (engine / name).write_bytes(content)
    entry = {"sha256": hash_file(engine / name), "bytes": len(content)}
    edit_manifest(engine, lambda data: data["files"].update({name: entry}))


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def choose(wanted: str | None) -> tuple[str, list[str]]:
    """The name of the backend, and warnings."""
    backend, warnings = choose_backend(wanted)
    return backend.name, warnings


def assert_complete(error: CompilerError | ConfigError | EngineError) -> None:
    assert all((error.found, error.needed, error.do))


class TestChoice:
    def test_the_environment_chooses_where_the_user_does_not(self, monkeypatch):
        monkeypatch.setenv("CXX", "/nonexistent/g++")
        monkeypatch.setenv("SPECC_BACKEND", "eager")
        assert choose(None) == ("eager", [])
        monkeypatch.setenv("SPECC_BACKEND", "cpu")
        assert choose("eager") == ("eager", [])
        with pytest.raises(CompilerError):
            choose(None)

    @pytest.mark.parametrize("value", ["CPU", "gpu", "cpu ", "0"])
    def test_no_such_backend(self, value, monkeypatch):
        for wanted, variable in ((value, ""), (None, value)):
            monkeypatch.setenv("SPECC_BACKEND", variable)
            with pytest.raises(ConfigError, match="cpu or cuda or eager") as caught:
                choose(wanted)
            assert value in caught.value.found
            assert_complete(caught.value)

    def test_no_compiler(self, tmp_path, monkeypatch):
        for variables in ({"CXX": "/nonexistent/g++"}, {"PATH": str(tmp_path)}):
            with monkeypatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                backend, (warning,) = choose(None)
                assert backend == "eager"
                assert "no C++ compiler" in warning
                assert "apt-get install g++" in warning
                assert "--backend" not in warning
                with pytest.raises(CompilerError, match=r"g\+\+") as caught:
                    choose("cpu")
                assert "--backend eager" in caught.value.do
                assert_complete(caught.value)
                assert choose("eager") == ("eager", [])

    @pytest.mark.parametrize(
        ("name", "version", "found", "needed"),
        [
            ("g++", "g++ (Debian) 9.4.0", "gcc 9.4.0", "gcc 11 or newer"),
            ("clang++", "Debian clang version 11.0.1-2", "clang 11.0.1", "clang 14 or newer"),
            ("c++", "no number", "gcc 0", "gcc 11"),
        ],
    )
    def test_a_compiler_that_is_too_old(
        self, name, version, found, needed, fake_compiler, monkeypatch
    ):
        path = fake_compiler(version, name=name)
        monkeypatch.setenv("CXX", str(path))
        with pytest.raises(CompilerError) as caught:
            choose("cpu")
        assert f"{path} is {found}" in caught.value.found
        assert needed in caught.value.needed
        assert choose(None)[0] == "eager"
        assert found in choose(None)[1][0]

    @pytest.mark.parametrize(
        "version", ["g++ (Debian 12.2.0-14) 12.2.0", "g++ (GCC) 11.4.1 20230605 (Red Hat 11.4.1-2)"]
    )
    def test_a_compiler_is_enough(self, version, fake_compiler, monkeypatch):
        monkeypatch.setenv("CXX", str(fake_compiler(version)))
        assert choose(None) == choose("cpu") == ("cpu", [])
        assert choose("eager") == ("eager", [])

    def test_a_compiler_that_does_not_answer(self, fake_compiler, monkeypatch):
        path = fake_compiler("", "echo broken >&2; exit 1")
        monkeypatch.setenv("CXX", str(path))
        with pytest.raises(CompilerError, match=r"bin/g\+\+ --version failed"):
            choose("cpu")
        assert choose(None)[0] == "eager"


class TestCompile:
    def test_without_a_compiler(self, tiny_models, tmp_path, monkeypatch):
        monkeypatch.setenv("CXX", "/nonexistent/g++")
        compilation = compile_pair(tiny_models, tmp_path / "engine", None)
        (warning,) = compilation.warnings
        assert "/nonexistent/g++" in warning
        manifest = compilation.manifest
        assert (manifest.backend, manifest.native) == ("eager", None)
        assert not any(name.endswith((".pt2", ".so")) for name in manifest.files)
        assert Engine.load(tmp_path / "engine").backend == "eager"
        with pytest.raises(EngineError, match="backend cpu and an engine for backend eager") as e:
            Engine.load(tmp_path / "engine", backend="cpu")
        assert "--backend cpu" in e.value.do
        with pytest.raises(CompilerError):
            compile_pair(tiny_models, tmp_path / "other", "cpu")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["engine"]

    def test_a_compiler_that_fails(self, tmp_path, fake_compiler, monkeypatch):
        """It says that it is new enough; nothing is left in the cache."""
        monkeypatch.setenv("CXX", str(fake_compiler("g++ (x) 12.1.0", FAIL)))
        monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path / "cache"))
        with pytest.raises(CompilerError, match="no such thing") as caught:
            native.build()
        assert "--backend eager" in caught.value.do
        assert files_in(tmp_path / "cache") == []

    @pytest.mark.slow
    def test_a_compiler_that_fails_at_a_program(self, tmp_path, fake_compiler, monkeypatch):
        """It makes the library; nothing is left of the engine, and no program in the cache."""
        script = f'case "$*" in */inductor/*) {FAIL};; esac\n{fakes.FAKE_BUILD}'
        monkeypatch.setenv("CXX", str(fake_compiler("g++ (x) 12.1.0", script)))
        monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path / "cache"))
        place = tmp_path / "place"
        place.mkdir()
        target = save_tiny("opt", tmp_path / "target", num_hidden_layers=1)
        config = CompileConfig(max_seq_len=64, backend="cpu", probe=False)
        with pytest.raises(
            CompilerError, match=r"compiling target failed: (.|\n)*no such"
        ) as caught:
            compiler.build(target, None, place / "engine", config)
        assert "--backend eager" in caught.value.do
        assert list(place.iterdir()) == files_in(tmp_path / "cache" / "programs") == []

    def test_what_an_engine_for_cpu_holds(self, built):
        manifest = artifact.open_engine(built)
        assert manifest.backend == "cpu"
        assert manifest.native is not None
        assert manifest.native.library == LIBRARY
        assert manifest.native.isa_flags == native.isa_flags()
        wanted = {LIBRARY, "target/program.pt2", "draft-0/program.pt2"}
        assert wanted <= manifest.files.keys()
        report = (built / "report.json").read_text()
        assert '"LowerLinear"' in report
        assert '"compile programs"' in report

    def test_eager_graphs_of_an_engine_for_cpu(self, built):
        found = generate(built)
        assert found == generate(built, backend="eager") == generate(built, backend="cpu")

    @pytest.mark.parametrize("fault", ["a file", "of others"])
    def test_a_cache_that_cannot_be_used(self, fault, tiny_models, tmp_path, monkeypatch):
        """That is said before any work, not minutes later, when programs are to be kept there."""
        cache = tmp_path / "cache"
        if fault == "a file":
            cache.write_bytes(b"")
        else:
            cache.mkdir()
            cache.chmod(0o777)
        monkeypatch.setenv("SPECC_CACHE_DIR", str(cache))
        begun: list[ProgressEvent] = []
        config = CompileConfig(max_seq_len=64, backend="cpu")
        with pytest.raises(CompilerError) as caught:
            compiler.build(tiny_models.target, None, tmp_path / "e", config, listen=begun.append)
        assert str(cache) in caught.value.found
        assert_complete(caught.value)
        assert begun == []


class TestOpen:
    def test_another_cpu(self, engine, built):
        edit_manifest(engine, lambda data: data["native"]["isa_flags"].append("avx9999"))
        with pytest.raises(EngineError, match="lacks avx9999") as caught:
            Engine.load(engine)
        assert artifact.cpu_model() in caught.value.found
        assert "--backend eager" in caught.value.do
        assert generate(engine, backend="eager") == generate(built)

    def test_a_manifest_without_its_library(self, engine):
        edit_manifest(engine, lambda data: data.update(native=None))
        with pytest.raises(EngineError, match="backend cpu with native None"):
            Engine.load(engine)

    @pytest.mark.parametrize("name", [LIBRARY, "target/program.pt2"])
    def test_a_file_that_was_altered(self, engine, name):
        data = (engine / name).read_bytes()
        (engine / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(EngineError, match="sha256"):
            Engine.load(engine)

    def test_another_build_of_the_library(self, engine, built):
        Engine.load(built)
        replace_file(engine, LIBRARY, (engine / LIBRARY).read_bytes() + b"\0")
        with pytest.raises(EngineError, match="differs from the operators"):
            Engine.load(engine)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "size", [pytest.param(0, marks=pytest.mark.slow), 100], ids=["empty", "header"]
    )
    def test_a_library_that_is_none(self, engine, size):
        """In a process that has loaded none; what names no version is refused unopened."""
        data = (engine / LIBRARY).read_bytes()[:size]
        marked = shutil.copytree(engine, engine.with_name("marked"))
        replace_file(engine, LIBRARY, data)
        mark = f"specc-interface:{native.interface_hash()}\0"
        replace_file(marked, LIBRARY, data + mark.encode())
        first, second = load_elsewhere(engine, marked)
        assert "is of another version of specc (interface none)" in first
        assert "cannot be loaded" in second

    def test_a_package_that_was_cut(self, engine):
        data = (engine / "target/program.pt2").read_bytes()
        cut = [shutil.copytree(engine, engine.with_name(f"cut-{i}")) for i in range(3)]
        for path, share in zip(cut, (0.0, 0.5, 0.999), strict=True):
            replace_file(path, "target/program.pt2", data[: int(share * len(data))])
        for error in load_elsewhere(*cut):
            assert "program.pt2 cannot be loaded" in error

    @pytest.mark.slow
    def test_the_package_of_another_model(self, engine, tiny_models, tmp_path):
        """The target's has more weights than the draft."""
        small = save_tiny("opt", tmp_path / "small", num_hidden_layers=1)
        path = tmp_path / "pair"
        compile_pair(TinyModels(tiny_models.target, small), path, "cpu")
        Engine.load(path)
        target = (engine / "target/program.pt2").read_bytes()
        replace_file(path, "draft-0/program.pt2", target)
        assert "draft-0/program.pt2" in load_elsewhere(path)[0]


def load_elsewhere(*engines: Path) -> list[str]:
    """Load in a process of their own, each of which must be an EngineError; returns their texts."""
    script = (
        "import json, sys\n"
        "from specc.errors import EngineError\n"
        "from specc.runtime.engine import Engine\n"
        "errors = []\n"
        "for engine in sys.argv[1:]:\n"
        "    try:\n        Engine.load(engine)\n"
        "    except EngineError as error:\n        errors.append(str(error))\n"
        "print(json.dumps(errors))\n"
    )
    command = [sys.executable, "-P", "-c", script, *map(str, engines)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, (result.returncode, result.stdout, result.stderr[-2000:])
    errors: list[str] = json.loads(result.stdout.splitlines()[-1])
    assert len(errors) == len(engines)
    return errors


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
        assert result.stderr.count("warning:") == 1
        assert "/nonexistent/g++" in result.stderr

    @pytest.mark.parametrize(
        ("backend", "word"), [("cpu", "/nonexistent/g++"), ("gpu", "cpu or cuda or eager")]
    )
    def test_refused(self, backend, word, tiny_models, tmp_path):
        result = self.compile(tiny_models, tmp_path / "engine", "--backend", backend)
        assert result.exit_code == 2, result.output
        lines = [line.partition(":")[0] for line in result.stderr.splitlines()]
        assert lines == ["found", "needed", "do"]
        assert word in result.stderr
        assert list(tmp_path.iterdir()) == []

    def test_an_engine_for_cpu(self, built):
        assert "backend cpu on cpu" in invoke("inspect", built).stdout
        result = invoke("run", built, "hello", "--max-tokens", 4, "--ignore-eos")
        assert result.exit_code == 0, result.stderr


def test_doctor_explains_the_fallback(tmp_path, fake_compiler, monkeypatch) -> None:
    from specc.cli.doctor import examine

    def compiler() -> dict[str, str]:
        (check,) = (c for c in examine()["checks"] if c["name"] == "C++ compiler")
        return check

    assert compiler()["state"] == "ok"
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    assert compiler()["state"] == "missing"
    assert "--backend eager" in compiler()["how"]
    monkeypatch.setenv("CXX", str(fake_compiler("9.4.0")))
    assert compiler()["state"] == "unsupported"
    assert "9.4.0" in compiler()["detail"]
