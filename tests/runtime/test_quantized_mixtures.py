"""Mixtures whose experts are quantized: every plan has the tokens of off, and transformers' logits.

By `--quantize`, from checkpoints of floats, and by checkpoints that have integers of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specc.artifact.directory import read_manifest
from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.config import CompileConfig
from specc.runtime.backends.program_files import read_json
from tests import branded_checkpoints as branded
from tests import engines, models
from tests import quantized_checkpoints as made
from tests.mxfp4_experts import write_experts
from tests.quantized_checkpoints import Format, Written
from tests.runtime.test_quantized import (
    PLANS,
    TOLERANCE,
    check_logits,
    check_plans,
    reference_model,
)
from tests.runtime.test_quantized_checkpoints import reference

SLOW = pytest.mark.slow
FILE = "weights.safetensors"
# prompts and tokens: the oracle unpacks every expert at every call
FEW = (1, 8)


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Path]:
    """An engine of a checkpoint, with a noisy draft of the same architecture."""

    def build_one(name: str, target: Path, **options: Any) -> Path:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        draft = models.save_tiny(name, root / "draft", 0, models.draft_noise(name))
        options = {"backend": "eager", "dtype": "float32", "plans": PLANS} | options
        config = CompileConfig(max_seq_len=models.MAX_SEQ_LEN, probe=False, **options)
        return engines.build(target, draft, root / "engine", config)

    return build_one


def experts_of(engine: Path) -> dict[str, torch.Tensor]:
    """Parameter → [E, N, K] float32 that the engine's integers stand for."""
    held, found = load_file(engine / "target" / FILE), {}
    for entry in read_json(engine / "target" / "program.json")["inputs"]:
        if ".experts." not in entry.get("key", "") or "quantized_of" not in entry:
            continue
        name, _, layout = entry["key"].rpartition(":")
        found[name] = dequantize(
            held[entry["key"]], entry["quantized_of"], QuantizedLayout.named(layout)
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "quantize", "group", "dtype"),
    [
        ("mixtral", "int4", 32, "float32"),
        # experts of other sizes than blocks and groups
        pytest.param("qwen3_moe", "int4", None, "bfloat16", marks=SLOW),
        pytest.param("qwen3_moe", "int8", None, "float32", marks=SLOW),
        pytest.param("mixtral", "fp8", None, "float32", marks=SLOW),
        # parameters of columns, with biases, beside a shared expert
        pytest.param("gpt_oss", "int4", 32, "float32", marks=SLOW),
        pytest.param("gpt_oss", "int8", None, "bfloat16", marks=SLOW),
        pytest.param("qwen2_moe", "int4", 32, "float32", marks=SLOW),
    ],
)
def test_rounded_experts(build, tmp_path, name, quantize, group, dtype) -> None:
    target = models.save_tiny(name, tmp_path / "target")
    engine = build(name, target, quantize=quantize, quantize_group=group, dtype=dtype)
    assert len(experts_of(engine)) == 4
    check_logits(engine, reference_model(target, engine), dtype)
    check_plans(engine, PLANS, *FEW)
    # nothing of the experts is left in floats
    weights = load_file(engine / "target" / FILE)
    assert all(item.dim() < 3 for item in weights.values())
    memory = read_manifest(engine).memory_plan["target"].weights
    assert memory == sum(item.nbytes for item in weights.values())


def check_experts(written: Written, engine: Path, names: tuple[str, str, str]) -> None:
    """Every expert is the float32 checkpoint, bit for bit."""
    found = experts_of(engine)
    assert len(found) == 4
    for layer in range(2):
        prefix = next(name for name in written.weights if f"layers.{layer}." in name and
                      ".experts.0." in name).rpartition(".experts.")[0]  # fmt: skip
        own = [value for name, value in found.items() if f"layers.{layer}." in name]
        for expert in range(4):
            gate, up, down = (
                written.weights[f"{prefix}.experts.{expert}.{name}.weight"] for name in names
            )
            assert torch.equal(own[0][expert], torch.cat([gate, up]))
            assert torch.equal(own[1][expert], down)


MIXTRAL, QWEN = ("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")


@pytest.mark.default("mixtral-names0-form0-float32-int4-g32-zeros")
@pytest.mark.parametrize(
    ("name", "names", "form", "dtype", "layout"),
    [
        ("mixtral", MIXTRAL, made.gptq(4, 32, False), "float32", "int4-g32-zeros"),
        pytest.param("qwen3_moe", QWEN, made.packed(4, 32), "float32", "int4-g32", marks=SLOW),
        pytest.param("qwen3_moe", QWEN, made.awq(32), "bfloat16", "int4-g32-zeros", marks=SLOW),
        pytest.param("mixtral", MIXTRAL, made.packed(8, None), "float32", "int8", marks=SLOW),
        pytest.param("qwen3_moe", QWEN, made.float8_blocks(32), "float32", "fp8-g32", marks=SLOW),
        pytest.param("mixtral", MIXTRAL, made.packed_mxfp4(), "float32", "mxfp4", marks=SLOW),
        pytest.param("qwen3_moe", QWEN, branded.packed_nvfp4(), "float32", "nvfp4", marks=SLOW),
    ],
)
def test_integers_of_checkpoints(build, tmp_path, name, names, form: Format, dtype, layout) -> None:
    target = models.save_tiny(name, tmp_path / "target")
    only = lambda name: "_proj." in name or ".experts." in name  # noqa: E731
    written = made.write_checkpoint(target, tmp_path, form.config, form.writer, only)
    engine = build(name, written.quantized, dtype=dtype, weight_only=True)
    check_experts(written, engine, names)
    assert read_manifest(engine).models[0].quantization == layout
    check_logits(engine, reference(written), dtype, TOLERANCE)
    if (dtype, layout) != ("float32", "int4-g32-zeros"):
        check_plans(engine, PLANS, *FEW)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "backend"),
    [("float32", "eager"), pytest.param("bfloat16", "cpu", marks=SLOW)],
)
def test_experts_of_gpt_oss(build, tmp_path, dtype, backend) -> None:
    """mxfp4 as it is published: no expert becomes floats."""
    target = models.save_tiny("gpt_oss", tmp_path / "target")
    written = write_experts(target, tmp_path)
    engine = build("gpt_oss", written.quantized, dtype=dtype, backend=backend)
    found = experts_of(engine)
    assert {name for name in found} == set(written.weights)
    for name, value in found.items():
        assert torch.equal(value.transpose(1, 2), written.weights[name]), name
    assert read_manifest(engine).models[0].quantization == "mxfp4"
    check_logits(engine, reference(written), dtype, TOLERANCE)
    check_plans(engine, PLANS, *FEW)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "quantize", "dtype"),
    [("mixtral", "int4", "float32"), ("qwen3_moe", "int8", "bfloat16"),
     ("gpt_oss", "fp8", "float32")],
)  # fmt: skip
def test_compiled_engines(build, tmp_path, name, quantize, dtype) -> None:
    """The C++ operator in compiled programs."""
    target = models.save_tiny(name, tmp_path / "target")
    engine = build(name, target, quantize=quantize, dtype=dtype, backend="cpu")
    check_logits(engine, reference_model(target, engine), dtype)
    check_plans(engine)
