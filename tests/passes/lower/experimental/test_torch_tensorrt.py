"""When torch-tensorrt may make engines, what it is called with, and what is made of its work.

torch-tensorrt needs a GPU to be imported: here is a stand-in that has what specc calls, under the
same names. The export and the converters have tests of their own.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from specc.artifact.cache_rows import CacheRows
from specc.cli.main import app
from specc.compiler import build as compiler
from specc.compiler.backends.registry import compiler_backend
from specc.config import CompileConfig
from specc.errors import ConfigError, TensorRTError
from specc.kernels import ops
from specc.passes.lower.experimental import torch_tensorrt as lower
from specc.passes.lower.experimental.export_with_weights import export_with_weights, input_sizes
from specc.passes.lower.tensorrt.shape_profile import ShapeProfile
from specc.refusals import Asked, refuse
from specc.tensorrt import library as tensorrt
from tests.onnx_models import lowered as lowered_once

# no GPU has run it, and no default path uses it
pytestmark = pytest.mark.slow

lowered = functools.cache(lowered_once)
ROWS = CacheRows(front=1, slots=60, scratch=19)
PROFILES = (
    ShapeProfile("prefill", (1, 1, 4), (1, 32, 32), (1, 1, 4)),
    ShapeProfile("tree × 7", (1, 4, 4), (7, 7, 7), (7, 7, 28)),
    ShapeProfile("off × 1", (1, 4, 4), (1, 1, 1), (1, 1, 4)),
)


@pytest.fixture(autouse=True)
def rtx(monkeypatch):
    monkeypatch.setenv(tensorrt.ENV, "tensorrt_rtx")


# when it may


@pytest.fixture
def machine(monkeypatch):
    """A machine that has all of it; tests take one thing away."""
    monkeypatch.setenv("SPECC_EXPERIMENTAL", "aot-inductor,torch-tensorrt")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch, "__version__", "2.13.1+cu130")
    full = tensorrt.TensorRTFacts("tensorrt", "11.0.0.114", False, True, ())
    monkeypatch.setattr(tensorrt, "facts", lambda: full)
    lower.check_machine()
    return monkeypatch


@pytest.mark.parametrize("value", ["", "1", "torch", "aot-inductor"])
def test_nobody_gets_it_unasked(value, machine):
    machine.setenv("SPECC_EXPERIMENTAL", value)
    with pytest.raises(TensorRTError, match="no GPU has shown") as error:
        lower.check_machine()
    assert "SPECC_EXPERIMENTAL=torch-tensorrt" in error.value.needed


def test_without_a_gpu(machine):
    machine.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TensorRTError, match="no GPU that torch can use"):
        lower.check_machine()


def test_without_the_package(machine):
    machine.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TensorRTError, match="no package torch_tensorrt") as error:
        lower.check_machine()
    assert "torch-tensorrt==2.13" in error.value.do


@pytest.mark.parametrize(
    ("package", "torch_version", "trt_version", "found"),
    [
        ("2.12.0", "2.12.0", "10.16.0", "torch-tensorrt 2.12.0"),
        ("2.11.0", "2.13.0", "10.15.1", "torch 2.13.0"),
        ("2.13.0", "2.11.0", "11.0.0", "torch 2.11.0"),
        ("2.13.0", "2.13.0", "10.15.1.29", "TensorRT 10.15.1.29"),
        ("2.11.0", "2.11.0", "11.0.0", "TensorRT 11.0.0"),
    ],
)
def test_versions_go_with_each_other(package, torch_version, trt_version, found, machine):
    machine.setattr("importlib.metadata.version", lambda name: package)
    machine.setattr(torch, "__version__", torch_version)
    full = tensorrt.TensorRTFacts("tensorrt", trt_version, False, True, ())
    machine.setattr(tensorrt, "facts", lambda: full)
    with pytest.raises(TensorRTError) as error:
        lower.check_machine()
    assert found in error.value.found


def test_tensorrt_rtx_is_another_thing(machine):
    rtx = tensorrt.TensorRTFacts("tensorrt_rtx", "11.0.0", True, False, ())
    machine.setattr(tensorrt, "facts", lambda: rtx)
    with pytest.raises(TensorRTError, match="TensorRT-RTX"):
        lower.check_machine()


def test_the_older_pair(machine):
    machine.setattr("importlib.metadata.version", lambda name: "2.11.0")
    machine.setattr(torch, "__version__", "2.11.0")
    full = tensorrt.TensorRTFacts("tensorrt", "10.15.1.29", False, True, ())
    machine.setattr(tensorrt, "facts", lambda: full)
    lower.check_machine()


@pytest.mark.parametrize(
    ("variable", "word"), [("", "no GPU has shown"), ("torch-tensorrt", "no GPU")]
)
def test_the_command_refuses_it_in_three_lines(variable, word, tiny_models, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECC_EXPERIMENTAL", variable)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = ["compile", "--target", str(tiny_models.target), "--backend", "torch-tensorrt"]
    result = CliRunner().invoke(app, [*args, "-o", str(tmp_path / "engine")])
    assert result.exit_code == 2, result.output
    lines = result.stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["found", "needed", "do"]
    assert word in lines[0]
    assert not list(tmp_path.iterdir())


def test_it_builds_for_the_gpu_that_is_there():
    backend = compiler_backend("torch-tensorrt")
    given = {"backend": backend.facts, "options": backend.options}
    asked = Asked(CompileConfig(compute_capability="8.9"), **given)
    with pytest.raises(ConfigError, match="--compute-capability"):
        refuse(asked)
    refuse(Asked(CompileConfig(decomposable_attention=True), **given))


def test_one_profile_spans_all():
    profile = lower.widest_profile(PROFILES, ROWS.total)
    assert (profile.batch, profile.nodes, profile.rows) == ((1, 4, 4), (1, 7, 32), (1, 7, 28))
    alone = lower.widest_profile(PROFILES[:1], ROWS.total)
    assert (alone.batch, alone.nodes, alone.rows) == (
        PROFILES[0].batch,
        PROFILES[0].nodes,
        PROFILES[0].rows,
    )
    with pytest.raises(TensorRTError, match="caches of 16 rows"):
        lower.widest_profile(PROFILES, 16)


# a stand-in for torch-tensorrt


class StandIn:
    """What specc calls of torch-tensorrt 2.13; the engine is the list of its outputs' names."""

    def __init__(self, monkeypatch):
        self.converters, self.calls, self.fails = {}, [], None
        conversion = ModuleType("torch_tensorrt.dynamo.conversion")
        inner = ModuleType("torch_tensorrt.dynamo.conversion._conversion")

        class TRTInterpreter:
            def __init__(self):
                self._output_names = []

            def output(self, target, args, kwargs):
                made = [SimpleNamespace(name=f"output{i}") for i in range(len(args[0]))]
                self._output_names += [x.name for x in made]
                return made

        def converter(target, *, supports_dynamic_shapes=False, priority=None):
            def register(function):
                entry = (function, supports_dynamic_shapes, priority)
                self.converters.setdefault(target, []).insert(0, entry)
                return function

            return register

        inner.TRTInterpreter = self.interpreter = TRTInterpreter
        conversion._conversion = self.inner = inner
        conversion.dynamo_tensorrt_converter = converter
        conversion.ConverterPriority = SimpleNamespace(HIGH="high")
        package, dynamo = ModuleType("torch_tensorrt"), ModuleType("torch_tensorrt.dynamo")
        package.dynamo, dynamo.conversion = dynamo, conversion
        package.Input = lambda **kwargs: SimpleNamespace(**kwargs)
        dynamo.convert_exported_program_to_serialized_trt_engine = self.convert
        for module in (package, dynamo, conversion, inner):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def convert(self, exported, *, arg_inputs, **options):
        self.calls.append((exported, arg_inputs, options))
        if self.fails:
            logging.getLogger("torch_tensorrt.dynamo._compiler").error(self.fails)
            raise UnboundLocalError("interpreter_result")
        interpreter = self.inner.TRTInterpreter()
        (output,) = exported.graph.find_nodes(op="output")
        made = interpreter.output("output", output.args, {})
        assert [x.name for x in made] == interpreter._output_names
        return json.dumps(interpreter._output_names).encode()


exports = {}


@pytest.fixture
def stand_in(monkeypatch):
    def once(program, weights):
        # the same program each time: exporting takes seconds
        key = (program.name, id(program))
        if key not in exports:
            exports[key] = (export_with_weights(program, weights), program)
        return exports[key][0]

    monkeypatch.setattr(lower, "export_with_weights", once)
    return StandIn(monkeypatch)


@pytest.mark.slow
def test_the_call(stand_in, tmp_path):
    pair = lowered("mistral", ROWS, torch.float16)
    program = pair.padded
    profile = lower.widest_profile(PROFILES, ROWS.total)
    cache = tmp_path / "new" / "timing"
    data = lower.convert(program, pair.weights, profile, decomposable=True, timing_cache=cache)
    assert json.loads(data) == ["logits", *(f"{name}_out" for name in program.caches)]
    assert stand_in.inner.TRTInterpreter is stand_in.interpreter
    ((_, inputs, options),) = stand_in.calls
    shapes = {x.name: (tuple(x.min_shape), tuple(x.opt_shape), tuple(x.max_shape)) for x in inputs}
    assert list(shapes) == list(input_sizes(program))
    assert shapes["tokens"] == ((1, 1), (4, 7), (4, 32))
    assert shapes["logit_rows"] == ((1,), (7,), (28,))
    window = program.layers[0].window
    assert shapes[f"mask_window_{window}"] == ((1, 1, 1, 80), (4, 1, 7, 80), (4, 1, 32, 80))
    assert shapes["k_cache_0"] == ((1, 2, 80, 16), (4, 2, 80, 16), (4, 2, 80, 16))
    dtypes = {x.name: x.dtype for x in inputs}
    assert dtypes["tokens"] == torch.int64
    assert dtypes[f"mask_window_{window}"] == torch.bool
    assert dtypes["v_cache_1"] == torch.float16
    assert options["require_full_compilation"] is options["disable_tf32"] is True
    assert options["timing_cache_path"] == str(cache)
    assert stand_in.converters.keys() == {ops.cache_write, ops.masked_attention}
    assert all(x[0][1:] == (True, "high") for x in stand_in.converters.values())
    assert stand_in.converters[ops.masked_attention][0][0].keywords == {"decomposable": True}


def test_a_failure_says_what_was_logged(stand_in):
    pair = lowered("mistral", ROWS, torch.float16)
    stand_in.fails = "no converter for aten.frobnicate"
    profile = lower.widest_profile(PROFILES, ROWS.total)
    with pytest.raises(TensorRTError, match=r"target: no converter for aten\.frobnicate"):
        lower.convert(pair.padded, pair.weights, profile)
    assert stand_in.inner.TRTInterpreter is stand_in.interpreter
    assert not logging.getLogger("torch_tensorrt").handlers


class FakeEngine:
    """An engine as `build_engine` asks it."""

    device_memory_size_v2 = 4096

    def __init__(self, names, alias):
        self.names, self.alias = names, alias
        self.num_io_tensors = len(names)

    def get_tensor_name(self, i):
        return self.names[i]

    def get_aliased_input_tensor(self, name):
        return self.alias(name)

    def create_engine_inspector(self):
        layers = json.dumps({"Layers": ["a bare name"]})
        return SimpleNamespace(get_engine_information=lambda form: layers)


@pytest.fixture
def loads(monkeypatch, stand_in):
    """Let a stand-in's engine be loaded; `alias` and `drop` are what it does wrong."""
    wrong = SimpleNamespace(alias=lambda name: name.removesuffix("_out"), drop=None, inputs=[])
    given = stand_in.convert

    def convert(exported, **options):
        wrong.inputs = [x.name for x in options["arg_inputs"]]
        return given(exported, **options)

    dynamo = sys.modules["torch_tensorrt.dynamo"]
    dynamo.convert_exported_program_to_serialized_trt_engine = convert

    def deserialize(data):
        names = [name for name in (*wrong.inputs, *json.loads(data)) if name != wrong.drop]
        return FakeEngine(names, wrong.alias)

    trt = SimpleNamespace(
        Runtime=lambda logger: SimpleNamespace(deserialize_cuda_engine=deserialize),
        LayerInformationFormat=SimpleNamespace(JSON=1),
    )
    monkeypatch.setattr(lower.tensorrt, "load", lambda: trt)
    monkeypatch.setattr(lower.tensorrt, "logger", lambda: None)
    monkeypatch.setattr(lower, "check_machine", lambda: None)
    monkeypatch.setattr(
        lower.tensorrt,
        "facts",
        lambda: tensorrt.TensorRTFacts("tensorrt", "11.0.0", False, True, ()),
    )
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return wrong


@pytest.mark.slow
def test_an_engine_of_other_names_or_with_a_copied_cache_is_refused(loads, tmp_path):
    pair = lowered("mistral", ROWS, torch.float16)
    plan = tmp_path / "plan"
    report = lower.build_engine(pair.padded, pair.weights, plan, PROFILES)
    assert report.lane == "torch-tensorrt"
    assert [x.mask for x in report.attentions] == ["mask_window_16"] * 2
    assert report.compute_capability == "9.0"
    assert report.num_bytes == plan.stat().st_size
    assert report.inputs == tuple(input_sizes(pair.padded))
    assert report.warnings == ("torch-tensorrt keeps no list of layers: fusion is unknown",)
    plan.unlink()
    loads.drop = "k_cache_1_out"
    with pytest.raises(TensorRTError, match="k_cache_1_out too many or too few"):
        lower.build_engine(pair.padded, pair.weights, plan, PROFILES)
    loads.drop, loads.alias = None, lambda name: ""
    with pytest.raises(TensorRTError, match="in the memory of no input"):
        lower.build_engine(pair.padded, pair.weights, plan, PROFILES)
    assert not plan.exists()
    wide = lowered("gemma3-tied", ROWS)
    with pytest.raises(TensorRTError, match="float32 attention"):
        lower.build_engine(wide.padded, wide.weights, plan, PROFILES)


@pytest.mark.slow
def test_an_engine_of_the_backend_tensorrt_comes_out(loads, tiny_models, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = CompileConfig(
        backend="torch-tensorrt",
        dtype="float16",
        max_seq_len=32,
        max_batch_size=2,
        prefill_chunk=16,
    )
    engine = tmp_path / "engine"
    manifest = compiler.build(tiny_models.target, None, engine, config).manifest
    assert manifest.backend == "tensorrt"
    for model in manifest.models:
        assert "logits" in json.loads((engine / model.plan_file).read_bytes())
        built = json.loads((engine / model.build_file).read_text())
        assert built["lane"] == "torch-tensorrt"
        assert built["inputs"][:4] == ["tokens", "positions", "write_index", "logit_rows"]
