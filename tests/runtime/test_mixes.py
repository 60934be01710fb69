"""Engines of `--quantize q4_k_m` and the like: which weight has which format, and their tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specc.artifact.backends import facts_of
from specc.artifact.directory import read_manifest
from specc.artifact.mixes import MIXES
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.rounding import quantize
from specc.compile_request import CompileRequest
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.refusals import refuse
from specc.runtime.backends.program_files import read_json
from specc.speculation.plans import SpecPlan
from tests import models
from tests.command_line import assert_refused, invoke
from tests.runtime.test_quantized import check_logits, check_plans, reference_model

CHAIN = SpecPlan.from_widths((1, 1, 1, 1))


def engine_of(checkpoint: Path, output: Path, mix: str, backend: str = "eager") -> Path:
    config = CompileConfig(
        plans=(CHAIN,), backend=backend, max_seq_len=models.MAX_SEQ_LEN, quantize=mix, probe=False
    )
    build(checkpoint, checkpoint, output, config)
    return output


def layouts_of(engine: Path) -> dict[str, str]:
    inputs = read_json(engine / "target" / "program.json")["inputs"]
    return {
        entry["key"].rpartition(":")[0]: entry["layout"].removeprefix("blocks-")
        for entry in inputs
        if "quantized_of" in entry
    }


def test_an_engine_of_a_mix(tmp_path) -> None:
    """Rows of 96 columns have the formats of 32, and those of 256 theirs."""
    checkpoint = models.save_tiny(
        "llama", tmp_path / "target", intermediate_size=256, num_hidden_layers=3
    )
    engine = engine_of(checkpoint, tmp_path / "engine", "q4_k_m")
    found = layouts_of(engine)
    assert read_manifest(engine).models[0].quantization == "q4_k_m"
    down = [found[f"model.layers.{i}.mlp.down_proj.weight"] for i in range(3)]
    assert down == ["q4_k", "q4_k", "q6_k"]
    assert found["lm_head.weight"] == "q8_0"
    assert found["model.layers.2.self_attn.v_proj.weight"] == "q8_0"
    narrow = {name: layout for name, layout in found.items() if "layers.0" in name}
    assert set(narrow.values()) == {"q5_0", "q4_k"}
    # queries, keys and values are one projection where they have one format
    assert "+".join(f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv") in found
    held = load_file(engine / "target" / "weights.safetensors")
    whole = load_file(checkpoint / "model.safetensors")
    for names, name in found.items():
        weight = torch.cat([whole[x] for x in names.split("+")])
        want = quantize(weight, QuantizedLayout.named(name))
        assert torch.equal(held[f"{names}:{name}"], want), names
    check_logits(engine, reference_model(checkpoint, engine), "float32")
    check_plans(engine, (CHAIN,), num_prompts=2, max_tokens=12)


def test_the_formats_of_llama_cpp() -> None:
    """Of 32 layers, as `llama-quant.cpp` gives more bits: the first and last four, and a third."""
    mix, more = MIXES["q4_k_m"], []
    for layer in range(32):
        layout = mix.layout(f"model.layers.{layer}.self_attn.v_proj.weight", 4096, 32, False)
        more += [layer] if layout == "q6_k" else []
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert mix.layout("model.layers.0.self_attn.q_proj.weight", 4096, 32, False) == "q4_k"
    assert mix.layout("model.layers.0.mlp.down_proj.weight", 640, 32, False) == "q8_0"
    assert mix.layout("model.layers.5.mlp.down_proj.weight", 640, 32, False) == "q5_0"
    assert mix.layout("lm_head.weight", 4096, 32, True) == "q6_k"
    assert mix.layout("lm_head.weight", 100, 32, True) == "int8"


def test_what_is_refused() -> None:
    for name in ("cuda", "onnx"):
        facts = facts_of(name)
        with pytest.raises(ConfigError, match=f"q4_k_m with backend {name}") as caught:
            refuse(CompileRequest(CompileConfig(quantize="q4_k_m"), (), facts, facts.options))
        assert "cpu" in caught.value.needed
    with pytest.raises(ConfigError, match="quantize-group 32 and --quantize q4_k_m"):
        CompileConfig(quantize="q4_k_m", quantize_group=32)
    with pytest.raises(ConfigError, match="--calibration"):
        CompileConfig(quantize="q4_k_m", calibration=Path("texts.txt"))
    with pytest.raises(ConfigError) as caught:
        CompileConfig(quantize="q4_k_n")
    assert "q4_k_m" in caught.value.do
    found = invoke("bench", "--synthetic", "llama-3.2-1b", "--quantize", "q4_k_m")
    assert_refused(found, "--quantize q4_k_m with --synthetic", "one layout")
