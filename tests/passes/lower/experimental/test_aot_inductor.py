"""Engines of `--backend aot-inductor`: where they may be compiled, and what packages they get."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from specc.artifact.directory import read_manifest
from specc.cli.main import app
from specc.config import CompileConfig
from specc.errors import CompilerError, ConfigError
from specc.passes.lower.experimental import aot_inductor
from specc.passes.lower.experimental.inline_kernels import CacheSizes
from specc.speculation.plans import OFF, SpecPlan

# no GPU has run it, and no default path uses it
pytestmark = pytest.mark.slow

TREE = SpecPlan.from_widths((2, 1))


@pytest.fixture
def allowed(monkeypatch):
    monkeypatch.setenv("SPECC_EXPERIMENTAL", "aot-inductor")


@pytest.fixture
def a_gpu(allowed, monkeypatch):
    """What the compiler asks of a GPU before it compiles."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


@pytest.mark.parametrize("value", [None, "", "1", "aot"])
def test_nobody_gets_it_unasked(value, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if value is None:
        monkeypatch.delenv("SPECC_EXPERIMENTAL", raising=False)
    else:
        monkeypatch.setenv("SPECC_EXPERIMENTAL", value)
    with pytest.raises(CompilerError) as error:
        aot_inductor.check_machine()
    assert "no GPU has shown" in error.value.found
    assert "SPECC_EXPERIMENTAL=aot-inductor" in error.value.needed


def test_a_machine_without_gpu_is_refused_before_anything_is_read(allowed, tmp_path, monkeypatch):
    from specc.compiler.build import build

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = CompileConfig(backend="aot-inductor")
    with pytest.raises(CompilerError) as error:
        build(tmp_path / "absent", None, tmp_path / "engine", config)
    assert "no GPU" in error.value.found
    assert "--backend cuda" in error.value.do
    assert not list(tmp_path.iterdir())


def test_without_triton(a_gpu, monkeypatch):
    aot_inductor.check_machine()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CompilerError, match="no Triton"):
        aot_inductor.check_machine()


def test_drafts_that_read_hidden_states_are_refused():
    models = [
        (SimpleNamespace(name=name), SimpleNamespace(row_inputs=rows))
        for name, rows in (("target", ()), ("draft_0", ("feature_rows",)))
    ]
    with pytest.raises(CompilerError, match=r"a draft that reads hidden states \(draft_0\)"):
        aot_inductor.lower_aot_inductor(models, [OFF], None, None)


@pytest.mark.parametrize(
    ("variable", "word"), [("", "no GPU has shown"), ("aot-inductor", "torch can use")]
)
def test_the_command_refuses_it_in_three_lines(variable, word, tiny_models, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECC_EXPERIMENTAL", variable)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = ["compile", "--target", str(tiny_models.target), "--backend", "aot-inductor"]
    result = CliRunner().invoke(app, [*args, "-o", str(tmp_path / "engine")])
    assert result.exit_code == 2, result.output
    lines = result.stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["found", "needed", "do"]
    assert word in lines[0]
    assert not list(tmp_path.iterdir())


def test_other_unknown_backends_stay_unknown(allowed):
    from specc.compiler.backends.registry import choose_backend

    with pytest.raises(ConfigError):
        choose_backend("aot-cuda")


def test_a_failing_compilation_says_what_and_leaves_nothing(tiny_models, a_gpu, tmp_path):
    """The process that compiles finds no CUDA: whatever it prints last is in the error."""
    from specc.compiler.build import build

    config = CompileConfig(plans=(OFF,), max_seq_len=48, max_batch_size=1, backend="aot-inductor")
    with pytest.raises(CompilerError) as error:
        build(str(tiny_models.target), None, tmp_path / "engine", config)
    assert "compiling target for 1 tokens of 1 sequences failed" in error.value.found
    assert "CUDA" in error.value.found
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_every_pass_gets_a_package_and_the_index_says_which(
    tiny_models, a_gpu, tmp_path, monkeypatch
):
    from specc.compiler.build import build

    asked = []

    def compile_one(program, sizes, caches, package):
        asked.append((program["name"], sizes, caches))
        package.write_bytes(f"{program['name']} {sizes}".encode())

    monkeypatch.setattr(aot_inductor, "compile_package", compile_one)
    config = CompileConfig(
        plans=(TREE,), max_seq_len=48, max_batch_size=2, backend="aot-inductor", block_size=16
    )
    path = tmp_path / "engine"
    build(str(tiny_models.target), str(tiny_models.draft), path, config)
    assert len(asked) == len(set(asked)) == 4 + 4, "two passes each, for one and two sequences"
    assert {caches for _, _, caches in asked} == {CacheSizes(8, 16, 4)}, "48 + 5 rows a sequence"
    manifest = read_manifest(path)
    assert (manifest.backend, manifest.device) == ("cuda", "cuda")
    for model in manifest.models:
        index = json.loads((path / model.dir / "packages.json").read_text())
        assert index["capability"] == [9, 0]
        served = {}
        for entry in index["packages"]:
            assert entry["file"] in manifest.files
            served[(path / entry["file"]).read_text()] = entry["inputs"]
        sizes = [sizes for name, sizes, _ in asked if name == model.name]
        assert served.keys() == {f"{model.name} {x}" for x in sizes}
        for x in sizes:
            words = [x.tokens, x.words] if x.words else None
            tokens, rows = [x.tokens], [x.rows]
            assert served[f"{model.name} {x}"] == [
                tokens, tokens, [x.batch + 1], tokens, [x.batch], words, [x.batch, 4], rows,
            ]  # fmt: skip
        layers = [[8, 16, layer.num_kv_heads, layer.head_dim] for layer in model.layers]
        assert index["caches"] == [shape for shape in layers for _ in "kv"]
