"""What `specc triton` writes: whole or not at all, and as Triton reads it."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specc.cli.main import app
from specc.errors import ConfigError, EngineError, OutputError
from specc.sampling.params import SamplingParams
from specc.triton import repository as triton_repository
from specc.triton.config import TritonConfig
from specc.triton.repository import MODEL_PY, write_backend, write_model
from specc.triton.tensors import INPUTS, OUTPUTS


@pytest.fixture(scope="module")
def parse():
    """config.pbtxt as protobuf reads it: Triton's own messages."""
    from tests.runtime.triton.environment import unsupported
    from tests.runtime.triton.server import ROOT, import_client

    if unsupported() is not None:
        pytest.skip(str(unsupported()))
    if not (ROOT / ".installed").exists():
        pytest.fail("no Triton Inference Server: run make build/triton-server/.installed")
    import_client()
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    return lambda text: text_format.Parse(text, model_config_pb2.ModelConfig())


def files(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def test_config_is_what_triton_reads(tiny_engine, tmp_path, parse):
    config = TritonConfig(
        name="code-1",
        instances=2,
        kind="cpu",
        parameters={"plan": "off", "policy": 'a "quoted"\\\nvalue — ü'},
    )
    model = write_model(tiny_engine, tmp_path / "models", config)
    read = parse((model / "config.pbtxt").read_text())
    assert (read.name, read.backend, read.max_batch_size) == ("code-1", "python", 0)
    assert read.model_transaction_policy.decoupled
    assert [(i.name, f"TYPE_{t.kind}") for i, t in zip(read.input, INPUTS, strict=True)] == [
        (t.name, t.data_type) for t in INPUTS
    ]
    enum = read.input[0].DESCRIPTOR.fields_by_name["data_type"].enum_type
    for got, want in zip([*read.input, *read.output], [*INPUTS, *OUTPUTS], strict=True):
        assert enum.values_by_number[got.data_type].name == want.data_type
        assert tuple(got.dims) == want.dims
    assert all(tensor.optional for tensor in read.input)
    (group,) = read.instance_group
    assert (group.count, group.KIND_CPU) == (2, group.kind)
    parameters = {key: value.string_value for key, value in read.parameters.items()}
    assert parameters == {"engine": "engine", **config.parameters}


def test_gpus_are_instances(parse):
    read = parse(TritonConfig(gpus="0,1;2,3").to_pbtxt("engine"))
    (group,) = read.instance_group
    assert (group.count, group.kind) == (2, group.KIND_MODEL)
    assert read.parameters["gpu_device_ids"].string_value == "0,1;2,3"


def test_values_are_written_in_ascii():
    text = TritonConfig(parameters={"policy": 'a "quoted"\\\nvalue — ü'}).to_pbtxt("engine")
    written = r"a \042quoted\042\134\012value \342\200\224 \303\274"
    assert f'"policy" value {{ string_value: "{written}" }}' in text


def test_every_sampling_option_is_an_input():
    names = {tensor.name for tensor in INPUTS} | {"stop", "structured_outputs", "logit_bias"}
    # a request to Triton is one output
    absent = {"stop_strings", "n", "output_kind"}
    fields = set(SamplingParams.__dataclass_fields__) - absent
    assert fields <= names


@pytest.mark.parametrize("way", ["copy", "link", "reference"])
def test_the_engine_comes_along(tiny_engine, tmp_path, way, parse):
    model = write_model(tiny_engine, tmp_path / "models", TritonConfig(files=way))
    assert [p.name for p in (tmp_path / "models").iterdir()] == ["specc"]
    engine = [] if way == "reference" else [f"1/engine/{name}" for name in files(tiny_engine)]
    assert files(model) == sorted([*engine, "1/model.py", "config.pbtxt"])
    place = parse((model / "config.pbtxt").read_text()).parameters["engine"].string_value
    found = model / "1" / place / "manifest.json"
    assert found.read_bytes() == (tiny_engine / "manifest.json").read_bytes()
    assert found.samefile(tiny_engine / "manifest.json") == (way != "copy")


def test_the_backend_serves_models_without_code(tiny_engine, tmp_path, parse):
    model = write_model(
        tiny_engine, tmp_path / "m", TritonConfig(layout="backend", files="reference")
    )
    assert files(model) == ["config.pbtxt"]
    assert (model / "1").is_dir()
    assert parse((model / "config.pbtxt").read_text()).backend == "specc"
    backend = write_backend(tmp_path / "backends")
    assert files(backend) == ["model.py"]
    before = (backend / "model.py").stat().st_mtime_ns
    assert write_backend(tmp_path / "backends") == backend  # it is there already
    assert (backend / "model.py").stat().st_mtime_ns == before
    (backend / "model.py").write_text("# somebody else's")
    with pytest.raises(OutputError, match="exists"):
        write_backend(tmp_path / "backends")
    write_backend(tmp_path / "backends", force=True)
    assert (backend / "model.py").read_text() == MODEL_PY


def test_model_py_imports_only_the_runtime():
    imported = {
        getattr(node, "module", None) or node.names[0].name
        for node in ast.walk(ast.parse(MODEL_PY))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported == {"triton_python_backend_utils", "specc.runtime.triton.model"}


def test_nothing_is_overwritten_without_force(tiny_engine, tmp_path):
    write_model(tiny_engine, tmp_path, TritonConfig(files="reference"))
    with pytest.raises(OutputError, match="exists"):
        write_model(tiny_engine, tmp_path, TritonConfig())
    assert files(tmp_path / "specc") == ["1/model.py", "config.pbtxt"]
    write_model(tiny_engine, tmp_path, TritonConfig(), force=True)
    assert "1/engine/manifest.json" in files(tmp_path / "specc")
    assert [p.name for p in tmp_path.iterdir()] == ["specc"]
    # never something that is no model
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "data").write_text("mine")
    with pytest.raises(OutputError, match=r"holds no config\.pbtxt"):
        write_model(tiny_engine, tmp_path, TritonConfig(name="other"), force=True)
    assert files(tmp_path / "other") == ["data"]


def test_a_failed_write_leaves_the_old_model(tiny_engine, tmp_path, monkeypatch):
    write_model(tiny_engine, tmp_path, TritonConfig(files="reference"))
    before = files(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(triton_repository, "_write", full)
    with pytest.raises(OutputError, match="No space left"):
        write_model(tiny_engine, tmp_path, TritonConfig(), force=True)
    assert files(tmp_path) == before
    monkeypatch.undo()
    # and the rename: the old one comes back
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if "partial" in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OutputError, match="Input/output"):
        write_model(tiny_engine, tmp_path, TritonConfig(), force=True)
    assert files(tmp_path) == before


def test_links_need_one_file_system(tiny_engine, tmp_path, monkeypatch):
    def other(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other)
    with pytest.raises(OutputError, match="pass --copy"):
        write_model(tiny_engine, tmp_path, TritonConfig(files="link"))
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "../up"}, "--name"),
        ({"name": ""}, "--name"),
        ({"layout": "flat"}, "--layout"),
        ({"kind": "tpu"}, "--kind"),
        ({"instances": 0}, "instances=0"),
        ({"instances": 65}, "instances=65"),
        ({"gpus": "0,;1"}, "--gpus"),
        ({"gpus": "0", "kind": "cpu"}, "--kind cpu"),
        ({"gpus": "0;1;2", "instances": 2}, "--instances 2"),
    ],
)
def test_wrong_options_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        TritonConfig(**options)


def test_wrong_engines_and_plans_are_refused(tiny_engine, tmp_path):
    with pytest.raises(EngineError):
        write_model(tmp_path / "none", tmp_path / "m", TritonConfig())
    with pytest.raises(ConfigError, match="--plan chain-9"):
        write_model(tiny_engine, tmp_path / "m", TritonConfig(parameters={"plan": "chain-9"}))
    assert not (tmp_path / "m").exists()


def test_the_command(tiny_engine, tmp_path):
    run = CliRunner().invoke
    common = ["triton", str(tiny_engine), "-o", str(tmp_path / "models")]
    done = run(app, [*common, "--layout", "backend", "--link", "--json", "--plan", "off"])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert Path(printed["backend"]) == tmp_path / "backends" / "specc"
    assert f"--model-repository={tmp_path / 'models'}" in printed["start"]
    assert "--http-address=127.0.0.1" in printed["start"]
    config = (tmp_path / "models/specc/config.pbtxt").read_text()
    # what nobody asked for is left to the model
    assert 'key: "plan" value { string_value: "off" }' in config
    assert not any(word in config for word in ("max_waiting", "verify", "on_fault"))
    for options in (
        [],
        ["--copy", "--link"],
        ["--name", "b", "--backends", "x"],
        ["--threads", "0"],
    ):
        done = run(app, [*common, *options])
        assert done.exit_code == 2
        assert done.stderr.startswith("found:  ")
    done = run(app, [*common, "--force"])
    assert done.exit_code == 0
    assert "tritonserver --model-repository=" in done.stdout
