"""What an engine's ONNX files hold, and what they must not hold."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto
from torch import Tensor, nn

from specc.compiler import build as compiler
from specc.config import CompileConfig
from specc.errors import ConfigError, UnsupportedGraphError
from specc.kernels import ops
from specc.kernels.reference.core import grouped_mm_reference
from specc.passes.lower.onnx.lower import OnnxFile, lower_onnx, require_onnx
from specc.passes.lower.onnx.operators import OPSET, translations
from specc.passes.program import emit_call
from tests import models
from tests.onnx_models import ROWS, WEIGHTS, Lowered, lowered, write_onnx

ELEMENT_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
}
# constants of a graph: rotary frequencies, scales, shapes
SMALL_BYTES = 1024
# windows; what gpt2 has besides is run in tests/runtime/backends/onnx/test_engine.py
DEFAULT = ("gemma3",)
FULL_PRECISION = [
    pytest.param((name, torch.float32), marks=() if name in DEFAULT else pytest.mark.slow)
    for name in (*models.ARCHITECTURES, *models.ROTARY_VARIANTS, "gemma3-tied")
]
CASES = FULL_PRECISION + [
    pytest.param((name, dtype), marks=pytest.mark.slow)
    for name in ("mixtral", "gemma3-tied", "gpt2")
    for dtype in (torch.float16, torch.bfloat16)
]


class Written:
    """A model's file, and what it was written from."""

    def __init__(self, name: str, dtype: torch.dtype, path: Path) -> None:
        self.dtype = dtype
        self.pair: Lowered = lowered(name, ROWS, dtype)
        self.file: OnnxFile = write_onnx(self.pair, path)
        self.path = path / "model.onnx"
        # without what lies in other files
        self.model = onnx.load(self.path, load_external_data=False)
        self.graph = self.model.graph

    def nodes(self, op_type: str) -> list[onnx.NodeProto]:
        return [node for node in self.graph.node if node.op_type == op_type]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Written]:
    return Written(*request.param, tmp_path_factory.mktemp("onnx"))


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}


def shape_of(value: onnx.ValueInfoProto) -> list[int | str]:
    dims = value.type.tensor_type.shape.dim
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in dims]


def test_the_file_passes_the_checker(written: Written) -> None:
    onnx.checker.check_model(str(written.path), full_check=True)
    opsets = {item.domain: item.version for item in written.model.opset_import}
    assert opsets[""] == OPSET == written.file.opset == 24
    assert {node.domain for node in written.graph.node} == {""}, "standard operators alone"
    assert not written.model.functions
    assert written.model.producer_name == "specc"
    assert written.graph.name == written.pair.flat.name
    assert Counter(node.op_type for node in written.graph.node) == written.file.operators


def test_inputs_and_outputs(written: Written) -> None:
    program = written.pair.padded
    caches = list(program.caches)
    inputs = {value.name: value for value in written.graph.input}
    assert tuple(inputs) == written.file.inputs == (*program.runtime_inputs, *caches)
    outputs = {value.name: value for value in written.graph.output}
    assert tuple(outputs) == written.file.outputs
    assert tuple(outputs) == ("logits", *(f"{name}_out" for name in caches))
    shapes: dict[str, list[int | str]] = {
        "tokens": ["batch", "nodes"],
        "positions": ["batch", "nodes"],
        "write_index": ["batch"],
        "logit_rows": ["rows"],
    }
    for name in program.runtime_inputs[4:]:
        shapes[name] = ["batch", 1, "nodes", ROWS.total]
        assert inputs[name].type.tensor_type.elem_type == TensorProto.BOOL
    for name, (number, _) in program.caches.items():
        layer = program.layers[number]
        shapes[name] = ["batch", layer.num_kv_heads, ROWS.total, layer.head_dim]
        assert shape_of(outputs[f"{name}_out"]) == shapes[name]
        for value in (inputs[name], outputs[f"{name}_out"]):
            assert value.type.tensor_type.elem_type == ELEMENT_TYPES[written.dtype]
    assert {name: shape_of(value) for name, value in inputs.items()} == shapes
    assert shape_of(outputs["logits"]) == ["rows", models.VOCAB]
    for value in (*inputs.values(), *outputs.values()):
        assert value.doc_string
    for name, text in (("write_index", "drop such rows"), ("k_cache_0", "Keys of layer")):
        assert text in inputs[name].doc_string
    assert f"layer {program.layers[0].name} " in inputs["v_cache_0"].doc_string
    for name in program.runtime_inputs[4:]:
        window = name.removeprefix("mask_window_")
        assert ("sliding window" in inputs[name].doc_string) == (window != name)
        assert window == name or f"window of {window}." in inputs[name].doc_string
    assert "in place" in written.model.doc_string


def test_weights_lie_in_the_engines_file_and_nowhere_else(written: Written) -> None:
    weights = written.pair.weights
    data = (written.path.parent / WEIGHTS).read_bytes()
    places = set()
    for tensor in written.graph.initializer:
        if tensor.name not in weights:
            assert tensor.data_location != TensorProto.EXTERNAL
            assert tensor.ByteSize() < SMALL_BYTES
            continue
        assert tensor.data_location == TensorProto.EXTERNAL
        assert not tensor.raw_data
        place = {item.key: item.value for item in tensor.external_data}
        assert place["location"] == WEIGHTS, "relative: the directory may be moved"
        begin, length = int(place["offset"]), int(place["length"])
        wanted = weights[tensor.name]
        assert tuple(tensor.dims) == tuple(wanted.shape)
        assert tensor.data_type == ELEMENT_TYPES[written.dtype]
        held = torch.frombuffer(bytearray(data[begin : begin + length]), dtype=written.dtype)
        assert torch.equal(held.view(wanted.shape), wanted)
        places.add((begin, length))
    names = [tensor.name for tensor in written.graph.initializer]
    assert len(names) == len(set(names))
    assert set(weights) == set(names) & set(weights), "each weight once, tied ones too"
    assert len(places) == len(weights)
    for node in written.nodes("Constant"):
        assert node.ByteSize() < SMALL_BYTES
    # the largest weight alone is of 24 KiB in 16 bits; names and shapes take the rest
    own = sum(tensor.ByteSize() for tensor in written.graph.initializer)
    assert own < SMALL_BYTES * len(names)
    # the file has no data after its graph either
    assert written.path.stat().st_size == written.model.ByteSize()


def test_nothing_names_this_machine(written: Written) -> None:
    data = written.path.read_bytes()
    root = Path(__file__).resolve().parents[4]
    for text in (str(root), str(written.path.parent), sys.prefix, str(Path.home()) + "/", ".py"):
        assert text.encode() not in data, text
    assert not written.model.metadata_props
    assert not written.graph.metadata_props
    values = (*written.graph.input, *written.graph.output, *written.graph.value_info)
    for item in (*written.graph.node, *written.graph.initializer, *values):
        assert not item.metadata_props, item.name


def test_caches_and_attentions(written: Written) -> None:
    """The forms that TensorRT's parser and onnxruntime both take, and no others."""
    program = written.pair.padded
    writers = written.nodes("TensorScatter")
    assert [node.input[0] for node in writers] == list(program.caches)
    for node in writers:
        assert attributes(node) == {"axis": 2, "mode": b"linear"}
        assert node.input[2] == "write_index"
        assert list(node.output) == [f"{node.input[0]}_out"]
    attentions = written.nodes("Attention")
    assert len(attentions) == len(program.layers)
    scales = [node.args[4] for node in program.calls(ops.masked_attention)]
    for number, (node, layer) in enumerate(zip(attentions, program.layers, strict=True)):
        assert list(node.input[1:4]) == [
            f"k_cache_{number}_out",
            f"v_cache_{number}_out",
            f"mask_window_{layer.window}" if layer.window else "mask",
        ]
        assert not any(node.input[4:]), "past, lengths"
        given = attributes(node)
        assert set(given) <= {"scale", "is_causal", "softcap", "qk_matmul_output_mode"}
        assert given["scale"] == pytest.approx(scales[number], rel=1e-6)
        assert not given.get("is_causal")
        assert not given.get("softcap")
        assert len([name for name in node.output if name]) == 1


@pytest.mark.parametrize("written", FULL_PRECISION, indirect=True)
def test_a_directory_that_was_moved(written: Written, tmp_path: Path) -> None:
    """The file finds the weights beside it; transformers computes the same."""
    home = written.path.parent
    moved = home.rename(tmp_path / "moved")
    try:
        session = onnxruntime.InferenceSession(
            str(moved / "model.onnx"), providers=["CPUExecutionProvider"]
        )
    finally:
        moved.rename(home)
    program, first = written.pair.padded, 7
    inputs = {
        "tokens": np.array([[3, 4]]),
        "positions": np.array([[0, 1]]),
        "write_index": np.array([first]),
        "logit_rows": np.array([1, 0]),
    }
    mask = np.zeros((1, 1, 2, ROWS.total), dtype=bool)
    mask[0, 0, :, first : first + 2] = np.tri(2)
    inputs |= {name: mask for name in program.runtime_inputs[4:]}
    for name, (number, _) in program.caches.items():
        layer = program.layers[number]
        shape = (1, layer.num_kv_heads, ROWS.total, layer.head_dim)
        inputs[name] = np.zeros(shape, dtype=np.float32)
    (found,) = session.run(["logits"], inputs)
    with torch.no_grad():
        wanted = written.pair.model(torch.tensor([[3, 4]]), use_cache=False).logits[0].flip(0)
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-4, atol=1e-4)


class Grouped(nn.Module):
    def forward(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return torch.ops.specc.grouped_mm(x, weight, ends)


@pytest.fixture(scope="module")
def grouped() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The translation of `specc::grouped_mm` in onnxruntime, for 4 experts."""
    example = torch.randn(6, 5), torch.randn(4, 5, 3), torch.tensor([1, 2, 3, 6]).int()
    rows = torch.export.Dim("rows", min=1, max=1 << 20)
    exported = torch.export.export(
        Grouped(), example, dynamic_shapes=({0: rows}, None, None), strict=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.onnx.export(
            exported,
            dynamo=True,
            opset_version=OPSET,
            custom_translation_table=translations(),
            verbose=False,
        )
    model = made.model_proto
    assert {node.domain for node in model.graph.node} == {""}
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [item.name for item in session.get_inputs()]

    def run(*values: Tensor) -> Tensor:
        given = dict(zip(names, (value.numpy() for value in values), strict=True))
        return torch.from_numpy(session.run(None, given)[0])

    return run


@pytest.mark.parametrize(
    "ends",
    [
        [2, 4, 6, 9],
        [0, 0, 0, 9],
        [9, 9, 9, 9],
        [0, 3, 3, 9],
        [3, 3, 9, 9],
        # rows that belong to no expert
        [1, 4, 4, 7],
        [0, 0, 0, 0],
    ],
    ids=str,
)
def test_experts(grouped: Callable[..., Tensor], ends: list[int]) -> None:
    x, weight = torch.randn(9, 5), torch.randn(4, 5, 3)
    sizes = torch.tensor(ends).int()
    wanted = grouped_mm_reference(x, weight, sizes)
    torch.testing.assert_close(grouped(x, weight, sizes), wanted)


MYSTERY = torch.library.Library("specc_test_lower_onnx", "DEF")
MYSTERY.define("mystery(Tensor x) -> Tensor")
MYSTERY.impl("mystery", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("specc_test_lower_onnx::mystery", torch.empty_like, lib=MYSTERY)


def test_an_operator_that_onnx_does_not_have(tmp_path: Path) -> None:
    pair = lowered("gpt2", ROWS, num_hidden_layers=1)
    graph = pair.padded.graph
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        mystery = torch.ops.specc_test_lower_onnx.mystery.default
        output.args = (emit_call(graph, mystery, output.args[0]),)
    path = tmp_path / "other.onnx"
    with pytest.raises(UnsupportedGraphError, match="target: ") as caught:
        lower_onnx(pair.padded, path, tmp_path / WEIGHTS)
    assert "specc_test_lower_onnx" in caught.value.found
    assert "mystery" in caught.value.found
    assert "--backend" in caught.value.do
    assert not path.exists()


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnx_ir"])
def test_missing_packages(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a model is loaded: this one does not exist."""
    require_onnx()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"no package {package}") as caught:
        require_onnx()
    assert caught.value.do.startswith('pip install "onnx')
    config = CompileConfig(backend="onnx")
    with pytest.raises(ConfigError, match=f"no package {package}"):
        compiler.build(tmp_path / "nothing", None, tmp_path / "engine", config)
    assert not (tmp_path / "engine").exists()


def test_an_onnx_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx.defs, "onnx_opset_version", lambda: 23)
    with pytest.raises(ConfigError, match="knows opset 23") as caught:
        require_onnx()
    assert "TensorScatter" in caught.value.needed
