"""ONNX engines of quantized weights: logits of transformers, tokens of their own off.

The reference has the float32 weights that the engine's integers stand for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch

from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.artifact.rounding import quantize
from specc.config import CompileConfig
from specc.passes.lower.onnx.quantized import _packed, parts_of
from specc.passes.program import Weight
from specc.runtime.backends.onnx import program as onnx_program
from specc.runtime.backends.program_files import read_json
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import engines, models
from tests import quantized_checkpoints as made
from tests.runtime.test_quantized import reference_model
from tests.runtime.test_quantized_checkpoints import reference

PLANS = tuple(SpecPlan.from_widths(widths) for widths in ((), (1, 1, 1), (2, 1)))
NUM_TOKENS = 24
NUM_LAYERS = 1


def make(root: Path, quantize: str, group: int | None) -> tuple[Path, Path]:
    """(checkpoint, engine) of a tiny model with its noisy draft."""
    sizes = {"num_hidden_layers": NUM_LAYERS}
    target = models.save_tiny("llama", root / "target", **sizes)
    draft = models.save_tiny("llama", root / "draft", 0, models.DRAFT_NOISE["llama"], **sizes)
    config = CompileConfig(
        max_seq_len=models.MAX_SEQ_LEN, quantize=quantize, quantize_group=group,
        backend="onnx", probe=False, plans=PLANS,
    )  # fmt: skip
    return target, engines.build(target, draft, root / "engine", config)


def generate(engine: Engine, plan: str, prompts: Any) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = LLM(engine, plan=plan).generate([list(prompt) for prompt in prompts], params)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantize", "group"),
    [
        ("int4", 32),
        pytest.param("int8", None, marks=pytest.mark.slow),
        pytest.param("int8", 32, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_transformers_and_of_off(
    tmp_path: Path, quantize: str, group: int | None
) -> None:
    checkpoint, path = make(tmp_path, quantize, group)
    model = reference_model(checkpoint, path)
    engine, prompts = Engine.load(path), models.prompts()[:3]
    plain = generate(engine, "off", prompts)
    with torch.inference_mode():
        for prompt, found in zip(prompts, plain, strict=True):
            ids = torch.tensor([prompt])
            want = model.generate(
                ids, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
            )
            assert list(found) == want[0, len(prompt) :].tolist()
    for plan in PLANS[1:]:
        assert generate(engine, plan.name, prompts) == plain
    check_fused(path / "target" / "model.onnx")


def test_a_checkpoint_whose_columns_are_in_another_order(tmp_path: Path) -> None:
    """Its integers are kept, in the order of their groups, and rows are gathered to match."""
    target = models.save_tiny("llama", tmp_path / "target", num_hidden_layers=1)
    form = made.in_order(made.gptq(4, 32))
    written = made.write_checkpoint(target, tmp_path, form.config, form.writer)
    config = CompileConfig(plans=(), max_seq_len=64, backend="onnx", probe=False)
    path = engines.build(written.quantized, (), tmp_path / "engine", config)
    prompt = models.prompts()[0][:12]
    (found,) = generate(Engine.load(path), "off", [prompt])
    want = reference(written).generate(
        torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
    )
    assert list(found) == want[0, len(prompt) :].tolist()


def test_experts_stay_floats_where_none_multiplies_their_integers(tmp_path: Path) -> None:
    target = models.save_tiny("mixtral", tmp_path / "target", num_hidden_layers=1)
    config = CompileConfig(
        plans=(), max_seq_len=64, backend="onnx", probe=False, quantize="int4", quantize_group=32
    )
    path = engines.build(target, (), tmp_path / "engine", config)
    program = read_json(path / "target" / "program.json")
    held = {entry["key"]: "quantized_of" in entry for entry in program["inputs"] if "key" in entry}
    experts = {key: is_held for key, is_held in held.items() if ".experts." in key}
    assert list(experts.values()) == [False, False]
    # projections and the head are quantized
    assert sum(held.values()) == 3
    called = {node.get("target") for node in program["graph"]["nodes"]}
    assert not any("grouped_mm_q" in str(target) for target in called)
    prompt = models.prompts()[0][:12]
    (found,) = generate(Engine.load(path), "off", [prompt])
    want = reference_model(target, path).generate(
        torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
    )
    assert list(found) == want[0, len(prompt) :].tolist()


def check_fused(file: Path) -> None:
    """What the engine's integers became: products that read them, with rows in float32."""
    import onnx

    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(file.with_name("fused.onnx"))
    options.add_session_config_entry(onnx_program._ACCURACY, onnx_program._FLOATS)
    onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    fused = onnx.load(options.optimized_model_filepath, load_external_data=False)
    nodes = fused.graph.node
    products = [node for node in nodes if node.op_type == "MatMulNBits"]
    levels = [{a.name: a.i for a in node.attribute}["accuracy_level"] for node in products]
    assert len(levels) == NUM_LAYERS * 4 + 1
    assert set(levels) == {1}
    assert "DequantizeLinear" not in {node.op_type for node in nodes}


@pytest.mark.parametrize("name", ["int8", "int8-g32", "int4-g32", "int4-g64-zeros", "int8-zeros"])
def test_parts_are_the_weight(name: str) -> None:
    """Levels less zero points, times scales, by the places that the attributes say; and nibbles."""
    layout, shape = QuantizedLayout.named(name), (70, 100)
    torch.manual_seed(1)
    values = torch.randn(shape) + (1 if layout.has_zeros else 0)
    stored = quantize(values, layout)
    found = parts_of(stored, Weight(("w",), torch.float32, shape, quantized=layout), "target")
    scales, zeros = found.scales, found.zeros
    if found.attributes == {"axis": 1}:
        scales, zeros = scales[None], None if zeros is None else zeros[None]
        group = 100
    else:
        assert found.attributes["axis"] == 0
        group = found.attributes["block_size"]
    wide = lambda x: x.float().repeat_interleave(group, 0)[:100]  # noqa: E731
    levels = found.levels.float() - (0 if zeros is None else wide(zeros))
    assert torch.equal((levels * wide(scales)).T, dequantize(stored, shape, layout))
    if layout.bits == 4:
        flat = found.levels.contiguous().view(torch.uint8).flatten() & 15
        packed = _packed(found.levels)
        assert torch.equal(packed & 15, flat[::2])
        assert torch.equal(packed >> 4, flat[1::2])
