"""Engines of quantized weights for TensorRT, on the recorder: whole generations, captured.

The reference has the float32 weights that the engine's integers stand for. The files are what
TensorRT is given, run in float32 by onnxruntime.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specc.artifact.quantized_layout import QuantizedLayout, dequantize, pack
from specc.artifact.rounding import quantize
from specc.errors import UnsupportedGraphError
from specc.passes.lower.onnx.quantized import parts_of, require_positive_scales
from specc.passes.program import Weight
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import models
from tests import quantized_checkpoints as made
from tests.runtime.backends.tensorrt.recorded_engines import (
    compile_recorded,
    load_poisoned,
    on_recorder,
)
from tests.runtime.test_quantized import reference_model
from tests.runtime.test_quantized_checkpoints import reference

PLANS = tuple(SpecPlan.from_widths(widths) for widths in ((), (1, 1, 1), (2, 1)))
NUM_TOKENS = 24
F16, BF16 = torch.float16, torch.bfloat16


def generate(engine: Any, plan: str, prompts: Any) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = LLM(engine, plan=plan).generate([list(prompt) for prompt in prompts], params)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def wanted(model: Any, prompt: Any) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    return tuple(found[0, len(prompt) :].tolist())


# the default tier has whole engines of such weights on onnxruntime
# (backends/onnx/test_quantized.py), and what TensorRT is given of them below
@pytest.mark.slow
@pytest.mark.parametrize(("quantize", "group"), [("int4", 32), ("int8", None), ("fp8", None)])
def test_tokens_are_those_of_transformers_and_of_off(
    tmp_path: Path, quantize: str, group: int | None
) -> None:
    sizes = {"num_hidden_layers": 1}
    target = models.save_tiny("llama", tmp_path / "target", **sizes)
    draft = models.save_tiny("llama", tmp_path / "draft", 0, models.DRAFT_NOISE["llama"], **sizes)
    path = compile_recorded(
        target, draft, tmp_path / "engine", quantize=quantize, quantize_group=group, plans=PLANS,
        max_batch_size=3, max_seq_len=models.MAX_SEQ_LEN,
    )  # fmt: skip
    model, prompts = reference_model(target, path), models.prompts()[:3]
    with on_recorder():
        engine = load_poisoned(path)
        plain = generate(engine, "off", prompts)
        assert plain == [wanted(model, prompt) for prompt in prompts]
        for plan in PLANS[1:]:
            assert generate(engine, plan.name, prompts) == plain


# the default tier has such weights below, and their checkpoints in tests/specc/artifact/decoders
@pytest.mark.slow
def test_a_checkpoint_in_blocks_of_fp8(tmp_path: Path) -> None:
    """Its levels and scales are kept; rows and columns of blocks, and a bias."""
    target = models.save_tiny("llama", tmp_path / "target", num_hidden_layers=1)
    form = made.float8_blocks(32)
    written = made.write_checkpoint(target, tmp_path, form.config, form.writer)
    path = compile_recorded(
        written.quantized, [], tmp_path / "engine", plans=(), max_seq_len=64, weight_only=True
    )
    prompt = models.prompts()[0][:12]
    with on_recorder():
        (found,) = generate(load_poisoned(path), "off", [prompt])
    assert found == wanted(reference(written), prompt)


@pytest.mark.parametrize("rows", [F16, BF16])
@pytest.mark.parametrize("name", ["int8", "int8-g32", "int4-g32", "fp8", "fp8-g64"])
def test_weights_in_the_type_of_rows(name: str, rows: torch.dtype) -> None:
    """Rounded once from float32; where int4 is multiplied with, scales are rounded before."""
    layout, shape = QuantizedLayout.named(name), (70, 96 if "32" in name else 128)
    torch.manual_seed(1)
    stored = quantize(torch.randn(shape), layout)
    found = parts_of(stored, Weight(("w",), rows, shape, quantized=layout), "target", rows)
    is_int4 = layout.bits == 4
    assert found.scales.dtype == (rows if is_int4 else torch.float32)
    levels = found.levels.float()
    if layout.is_float:
        levels = found.levels.contiguous().view(torch.float8_e4m3fn).float()
    group = layout.group or shape[1]
    scales = found.scales.reshape(-1, shape[0]).float().repeat_interleave(group, 0)
    exact = dequantize(stored, shape, layout)
    if is_int4:
        error = ((levels * scales).T - exact).abs() / exact.abs().clamp(min=1e-9)
        assert 0 < float(error.max()) <= torch.finfo(rows).eps / 2 * 1.001
    else:
        assert torch.equal((levels * scales).T, exact)


@pytest.mark.parametrize("name", ["int8", "int8-g32", "fp8", "fp8-g32"])
def test_scales_above_zero_stand_for_the_same_weights(name: str) -> None:
    """Which are the only ones that TensorRT takes of 8 bits; outputs of zeros have others."""
    layout, shape = QuantizedLayout.named(name), (40, 100)
    torch.manual_seed(2)
    groups = layout.num_groups(shape[1])
    levels = torch.randint(1, 126, shape).to(torch.uint8)
    scales = torch.randn(shape[0], groups)
    # a scale of 0 whose levels are something
    scales[3] = 0
    weight = Weight(("w",), F16, shape, quantized=layout)
    found = parts_of(pack(levels, scales, None, layout), weight, "target", F16)
    assert bool((found.scales > 0).all())
    values = found.levels.T.contiguous()
    values = values.view(torch.float8_e4m3fn).float() if layout.is_float else values.float()
    wide = found.scales.reshape(groups, shape[0]).T.repeat_interleave(layout.group or 100, 1)
    exact = dequantize(pack(levels, scales, None, layout), shape, layout)
    assert torch.equal(values * wide[:, :100], exact)


def test_a_level_without_an_opposite_keeps_its_scale() -> None:
    layout = QuantizedLayout.named("int8")
    levels, scales = torch.full((32, 40), 7).to(torch.uint8), torch.full((32, 1), -0.5)
    levels[5, 39] = 0
    weight = Weight(("w",), F16, (32, 40), quantized=layout)
    found = parts_of(pack(levels, scales, None, layout), weight, "target", F16)
    assert found.scales.tolist() == [-0.5 if n == 5 else 0.5 for n in range(32)]
    assert int(found.levels[39, 5]) == -128
    assert torch.equal(found.levels[0], torch.where(found.scales < 0, -121, 121).to(torch.int8))
    with pytest.raises(
        UnsupportedGraphError, match="target: w:int8 with a negative scale"
    ) as caught:
        require_positive_scales(found, weight, "target")
    assert "--backend cpu" in caught.value.do
    levels[5, 39] = 1
    found = parts_of(pack(levels, scales, None, layout), weight, "target", F16)
    require_positive_scales(found, weight, "target")


@pytest.mark.parametrize("name", ["int8", "int4-g32", "fp8"])
def test_weights_beyond_the_type_of_rows_are_refused(name: str) -> None:
    layout = QuantizedLayout.named(name)
    weight = Weight(("w",), F16, (32, 32), quantized=layout)
    values = torch.full((32, 32), -1.0)
    parts_of(quantize(values * 57000, layout), weight, "target", F16)
    stored = quantize(values * 66000, layout)
    with pytest.raises(UnsupportedGraphError, match=r"target: w:.* with a scale") as caught:
        parts_of(stored, weight, "target", F16)
    assert "--dtype bfloat16" in caught.value.do
    parts_of(stored, weight, "target", BF16)
