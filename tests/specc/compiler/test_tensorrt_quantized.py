"""`specc compile --backend tensorrt` of quantized weights; real builds, no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load_file

from specc.api import compile_with
from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.config import CompileConfig
from specc.errors import ConfigError, TensorRTError
from specc.runtime.backends.program_files import read_json
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from specc.tensorrt import library as trt
from tests import engines
from tests import quantized_checkpoints as made

TREE = SpecPlan.from_widths((2, 1))
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def rtx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trt.ENV, "tensorrt_rtx")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, save_llama: Any) -> Path:
    """A Llama whose heads are wide enough for a fused kernel."""
    path: Path = tmp_path_factory.mktemp("models") / "target"
    save_llama(path, 1, 1, hidden_size=64, head_dim=16, vocab_size=96)
    return path


def config(**options: Any) -> CompileConfig:
    given = {
        "plans": (), "dtype": "float16", "max_seq_len": 64, "max_batch_size": 2,
        "prefill_chunk": 32, "backend": "tensorrt", "compute_capability": "8.9", "probe": False,
    }  # fmt: skip
    return CompileConfig(**given | options)


def weights_of(file: Path) -> dict[str, np.ndarray]:
    """Key of each quantized weight → what its `DequantizeLinear` computes, [N, K] float32."""
    graph = onnx.load(file).graph
    held = {item.name: item for item in graph.initializer}
    found = {}
    for node in graph.node:
        if node.op_type == "DequantizeLinear":
            levels, scales = (numpy_helper.to_array(held[name]) for name in node.input)
            given = {item.name: item.i for item in node.attribute}
            scales = scales.astype(np.float32).reshape(-1, levels.shape[1])
            scales = scales.repeat(given.get("block_size", len(levels)), 0)
            assert given["axis"] == (0 if "block_size" in given else 1)
            key = node.input[0].removesuffix(".levels")
            found[key] = (levels.astype(np.float32) * scales).T
    return found


@pytest.mark.parametrize(
    ("quantize", "group", "dtype"),
    [
        ("int4", 32, "float16"),
        pytest.param("int8", None, "bfloat16", marks=pytest.mark.slow),
        pytest.param("fp8", None, "float16", marks=pytest.mark.slow),
    ],
)
def test_every_product_reads_integers(
    target: Path, tmp_path: Path, quantize: str, group: int | None, dtype: str
) -> None:
    options = config(quantize=quantize, quantize_group=group, dtype=dtype, plans=(TREE,))
    path = engines.build(target, target, tmp_path / "engine", options)
    stored = load_file(path / "target" / "weights.safetensors")
    weights = weights_of(path / "target" / "model.onnx")
    program = read_json(path / "target" / "program.json")["inputs"]
    quantized = {x["key"]: x["quantized_of"] for x in program if "quantized_of" in x}
    # q, k and v; o; gate and up; down; the head
    assert weights.keys() == quantized.keys()
    assert len(weights) == 5
    for key, value in weights.items():
        layout = QuantizedLayout.named(key.rpartition(":")[2])
        exact = dequantize(stored[key], quantized[key], layout)
        error = (torch.from_numpy(value) - exact).abs() / exact.abs().clamp(min=1e-9)
        # scales of int4 are in the type of the rows
        assert float(error.max()) <= (2.0**-11 if layout.bits == 4 else 0)
    layers = json.loads((path / "target" / "layers.json").read_text())
    assert layers["decoded"] == []
    assert all(entry["is_fused"] for entry in layers["attentions"])
    read = {node for layer in layers["layers"] for node in layer["nodes"]}
    graph = onnx.load(path / "target" / "model.onnx", load_external_data=False).graph
    found = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    assert [node.name in read for node in found] == [True] * 5
    check_types(graph, dtype)
    outputs = {
        plan: LLM(path, plan=plan, backend="eager").generate([[5, 6, 7]], PARAMS)[0].outputs[0]
        for plan in (TREE.name, "off")
    }
    assert outputs[TREE.name].token_ids == outputs["off"].token_ids


def check_types(graph: onnx.GraphProto, dtype: str) -> None:
    """Products by quantized weights are in the type of the rows, as they come."""
    makers = {name: node for node in graph.node for name in node.output}
    own = {"float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}[dtype]
    scales = {item.name: item.data_type for item in graph.initializer}
    count = 0
    for node in graph.node:
        weight = makers.get(node.input[1]) if node.op_type == "MatMul" else None
        if weight is not None and weight.op_type == "Cast":
            assert weight.attribute[0].i == own
            weight = makers[weight.input[0]]
        elif weight is not None and weight.op_type == "DequantizeLinear":
            assert scales[weight.input[1]] == own
        else:
            continue
        assert weight.op_type == "DequantizeLinear"
        maker = makers[node.input[0]]
        assert maker.op_type != "Cast" or maker.attribute[0].i == own
        count += 1
    assert count == 5


def checkpoint(target: Path, root: Path, form: made.Format) -> Path:
    return made.write_checkpoint(target, root, form.config, form.writer).quantized


def test_zero_points_are_refused_before_anything_is_built(target: Path, tmp_path: Path) -> None:
    """As of AWQ; and groups that leave a rest."""
    seen: list[Any] = []
    written = checkpoint(target, tmp_path, made.awq(32))
    with pytest.raises(ConfigError) as caught:
        compile_with(written, None, tmp_path / "engine", config(), listen=seen.append)
    assert "in int4 with zero points of its own, and backend tensorrt" in caught.value.found
    assert "onnx" in caught.value.needed
    options = config(quantize="int4", quantize_group=128)
    with pytest.raises(ConfigError, match="64 columns in groups of 128, the last one short"):
        compile_with(target, None, tmp_path / "engine", options, listen=seen.append)
    assert not any(event.phase.startswith(("write", "build")) for event in seen)
    assert not (tmp_path / "engine").exists()


def test_fp8_for_a_gpu_without_it_is_refused_before_anything_is_traced(
    target: Path, tmp_path: Path
) -> None:
    seen: list[Any] = []
    options = config(quantize="fp8", compute_capability="8.6")
    with pytest.raises(TensorRTError, match=r"fp8 for compute capability 8\.6"):
        compile_with(target, None, tmp_path / "engine", options, listen=seen.append)
    assert {event.phase for event in seen} == {"check models"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "is_decoded"), [(made.gptq(4, 32), False), (made.packed(8, 32), True)]
)
def test_checkpoints(target: Path, tmp_path: Path, form: made.Format, is_decoded: bool) -> None:
    """Their integers are kept; int8 in groups builds, and a warning says how it is read."""
    written = checkpoint(target, tmp_path, form)
    done = compile_with(written, None, tmp_path / "engine", config())
    told = [line for line in done.warnings if "become floats in every pass" in line]
    assert bool(told) == is_decoded
