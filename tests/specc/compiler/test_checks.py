"""What is refused before a model is loaded, and what a compilation takes from checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from specc.bench import step_bytes as bench_bytes
from specc.cli.main import app
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.dtypes import parse_dtype
from specc.errors import ConfigError, ModelNotFoundError, OutputError, SpeccError, WeightError
from specc.passes.frontend.model_source import ModelSource
from specc.speculation.plans import SpecPlan
from tests.models import build_model, save_tiny


def options(**changes) -> CompileConfig:
    fields = {"max_batch_size": 2, "max_seq_len": 64, "prefill_chunk": 4, "probe": False}
    return CompileConfig(**(fields | changes))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Llamas of one layer, stored in float32, bfloat16 and float16."""
    root = tmp_path_factory.mktemp("models")
    for name, dtype in (("full", None), ("brain", torch.bfloat16), ("half", torch.float16)):
        save_tiny("llama", root / name, num_hidden_layers=1)
        if dtype is not None:
            from safetensors.torch import load_file, save_file

            file = root / name / "model.safetensors"
            tensors = {key: value.to(dtype) for key, value in load_file(file).items()}
            save_file(tensors, file, metadata={"format": "pt"})
    return root


def refused(kind: type[SpeccError], output: Path, *args, **kwargs) -> SpeccError:
    """The error of a build, before any model is loaded; nothing is left behind."""
    phases: list[str] = []
    with pytest.raises(kind) as caught:
        build(*args[:2], output, *args[2:], listen=lambda e: phases.append(e.phase), **kwargs)
    assert set(phases) <= {"check models"}, phases
    return caught.value


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bf16", "bfloat16"), ("BF16", "bfloat16"), ("torch.bfloat16", "bfloat16"),
        ("fp16", "float16"), ("half", "float16"), ("float", "float32"), ("fp32", "float32"),
        ("auto", "auto"), ("float32", "float32"),
    ],
)  # fmt: skip
def test_spellings_of_dtypes(text, name):
    assert parse_dtype(text, "--dtype") == name
    assert options(dtype=text).dtype == name
    assert options(draft_dtype=(text,)).draft_dtype == (name,)


@pytest.mark.parametrize(
    ("text", "do"),
    [("bflaot16", "bfloat16"), ("fp61", "float16"), ("int8", "--quantize int8")],
)
def test_unknown_dtypes(text, do):
    with pytest.raises(ConfigError) as caught:
        options(draft_dtype=(text,))
    assert f"--draft-dtype {text}" in caught.value.found
    assert do in caught.value.do


@pytest.mark.parametrize("model", ["full", "brain"])
def test_auto_is_the_type_of_the_checkpoint(models, tmp_path, model):
    wanted = {"full": "float32", "brain": "bfloat16"}[model]
    compilation = build(models / model, None, tmp_path / "e", options(dtype="auto"))
    assert compilation.manifest.dtype == wanted
    assert compilation.warnings == []


def test_auto_where_the_backend_lacks_the_type(models, tmp_path):
    config = options(dtype="auto", draft_dtype=("auto",))
    compilation = build(models / "brain", models / "half", tmp_path / "e", config)
    assert [entry.dtype for entry in compilation.manifest.models] == ["bfloat16", "float32"]
    (warning,) = compilation.warnings
    assert warning.startswith("draft_0: its checkpoint is in float16")
    config = options(dtype="auto", backend="cuda")
    assert build(models / "half", None, tmp_path / "g", config).manifest.dtype == "float16"


def test_auto_of_a_module(tmp_path):
    module = build_model("llama", num_hidden_layers=1).to(torch.bfloat16)
    assert build(module, None, tmp_path / "e", options(dtype="auto")).manifest.dtype == "bfloat16"


def test_logits_that_do_not_fit(models, tmp_path):
    """Of 300,000 tokens in float32, or in bfloat16 of as many sequences again."""
    config = json.loads((models / "full" / "config.json").read_text()) | {"vocab_size": 300_000}
    for name, dtype, batch in (("full", "float32", 2), ("brain", "bfloat16", 4)):
        changed = tmp_path / name
        shutil.copytree(models / name, changed)
        (changed / "config.json").write_text(json.dumps(config))
        given = options(max_batch_size=batch, dtype=dtype, max_logits_mb=2)
        error = refused(ConfigError, tmp_path / "e", changed, None, given)
        assert error.found.startswith("--max-logits-mb 2")
        assert error.do == "pass --max-logits-mb 3, or lower --max-batch-size"


def test_more_stages_than_layers(models, tmp_path):
    config = options(pipeline_parallel_size=3)
    error = refused(ConfigError, tmp_path / "engine", models / "full", None, config)
    assert error.found == "--pipeline-parallel-size 3, and a target of 1 layers"
    assert error.needed == "a layer or more in each stage: at most 1"


def test_stages_that_are_segments():
    with pytest.raises(ConfigError) as caught:
        options(pipeline_parallel_size=2, segments=True)
    assert caught.value.needed.startswith("one of the two: a stage is one program")


def test_the_context_is_longer_than_the_models(models, tmp_path):
    error = refused(
        ConfigError, tmp_path / "e", models / "full", None, options(max_seq_len=100_000)
    )
    assert "--max-seq-len 100000; the target model has 256 positions" in error.found


@pytest.mark.parametrize(
    ("option", "variable", "found", "do"),
    [
        ("gpu", None, "--backend gpu", "say --backend cuda"),
        ("tensorrt-llm", None, "--backend tensorrt-llm", "say --backend tensorrt"),
        (None, "eagre", "SPECC_BACKEND=eagre", "say SPECC_BACKEND=eager"),
    ],
)
def test_unknown_backends(models, tmp_path, monkeypatch, option, variable, found, do):
    if variable:
        monkeypatch.setenv("SPECC_BACKEND", variable)
    error = refused(ConfigError, tmp_path / "e", models / "full", None, options(backend=option))
    assert (error.found, error.do) == (found, do)


def test_an_output_that_is_no_engine(models, tmp_path):
    """Advice that would be refused next is no advice."""
    error = refused(OutputError, models / "half", models / "full", None, options())
    assert "is no engine" in error.found
    assert "pass --force" not in error.do


def test_an_empty_path(tmp_path):
    refused(ModelNotFoundError, tmp_path / "e", "", None, options())


def test_a_draft_that_is_absent(models, tmp_path):
    error = refused(ModelNotFoundError, tmp_path / "e", models / "full", tmp_path / "no", options())
    assert error.found.startswith("draft 0: ")


def test_a_draft_whose_weights_are_cut_short(models, tmp_path):
    path = shutil.copytree(models / "full", tmp_path / "cut")
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-100])
    error = refused(WeightError, tmp_path / "e", models / "full", path, options())
    assert "not fully covered" in error.found


def test_float16_for_a_cpu(models, tmp_path):
    refused(ConfigError, tmp_path / "e", models / "full", None, options(dtype="half"))


def test_a_directory_for_graphs_that_is_a_file(models, tmp_path):
    (tmp_path / "file").write_text("")
    dump = tmp_path / "file" / "graphs"
    error = refused(OutputError, tmp_path / "e", models / "full", None, options(), dump_graphs=dump)
    assert str(dump) in error.found


def test_a_plan_of_a_draft_that_is_not_there(models, tmp_path):
    plan = SpecPlan.from_widths((1,), ("draft_1",))
    full = models / "full"
    refused(ConfigError, tmp_path / "e", full, full, options(plans=(plan,)))


def test_where_a_model_comes_from(models, monkeypatch):
    """A relative path names nothing in another directory; a module has no path."""
    monkeypatch.chdir(models)
    for typed in ("full", f"../{models.name}/full"):
        source = ModelSource.load("target", typed, torch.float32)
        assert (source.label, source.location) == (typed, str(models / "full"))
    module = build_model("llama", num_hidden_layers=1)
    assert ModelSource.load("target", module, torch.float32).location is None


@pytest.mark.slow
def test_bench_against_transformers_from_another_directory(tiny_models, tmp_path, monkeypatch):
    measure = bench_bytes.measure_read_bandwidth
    monkeypatch.setattr(bench_bytes, "measure_read_bandwidth", lambda: measure(1_000_000))
    for directory in (tiny_models.target, tiny_models.draft):
        shutil.copytree(directory, tmp_path / "models" / directory.name)
    monkeypatch.chdir(tmp_path / "models")
    pair = [tiny_models.target.name, tiny_models.draft.name]
    manifest = build(*pair, tmp_path / "engine", options(plans=(SpecPlan.from_widths((1,)),)))
    assert [model.source for model in manifest.manifest.models] == pair
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "hello"}) + "\n")
    command = ["bench", "engine", "--against", "transformers", "--prompts", str(prompts)]
    command += ["--tokens", "4", "--rounds", "1", "--warmup", "0"]
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "transformers-assisted" in result.stdout
    (tmp_path / "models").rename(tmp_path / "elsewhere")
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert f"no checkpoint at {tmp_path / 'models' / pair[0]}" in result.stderr
    assert "--target-checkpoint DIR" in result.stderr
