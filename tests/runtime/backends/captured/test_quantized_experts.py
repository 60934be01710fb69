"""Mixtures whose experts are quantized capture, and read them as the engine's file has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specc.config import CompileConfig
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import engines, models
from tests.mxfp4_experts import write_experts
from tests.runtime.backends.captured.captured_engine import greedy_tokens
from tests.runtime.test_quantized import reference_model

PROMPTS = [[5, 6, 7, 8], [40, 41]]
NUM_TOKENS = 4
PLAN = SpecPlan.from_widths((2, 1))


def compiled(target: Path, drafts: list[Path], path: Path, **options: Any) -> Path:
    config = CompileConfig(
        plans=(PLAN,) if drafts else (), max_seq_len=32, max_batch_size=2, backend="cuda", **options
    )
    return engines.build(target, drafts, path, config)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """An engine of experts in mxfp4 as they are published, and what transformers makes of them."""
    root = tmp_path_factory.mktemp("gpt_oss")
    written = write_experts(models.save_tiny("gpt_oss", root / "target"), root)
    draft = models.save_tiny("gpt_oss", root / "draft", noise=0.05)
    engine = compiled(written.quantized, [draft], root / "engine", dtype="float32")
    return engine, greedy_tokens(written.exact, PROMPTS, NUM_TOKENS)


def generate(llm: LLM, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


def layouts_of(engine: Path) -> set[tuple[str, ...]]:
    """What the target's products with experts are told of their matrices."""
    program: dict[str, Any] = json.loads((engine / "target/program.json").read_text())
    calls = [x for x in program["graph"]["nodes"] if x.get("target") == "specc.experts.default"]
    return {tuple(call["args"][-2:]) for call in calls}


def test_experts_of_gpt_oss(gpt_oss) -> None:
    """No expert is a float, and graphs say what transformers says, operator by operator."""
    engine, wanted = gpt_oss
    assert layouts_of(engine) == {("mxfp4", "mxfp4")}
    assert all(item.dim() < 3 for item in load_file(engine / "target/weights.safetensors").values())
    assert generate(LLM(engine, plan="tree-2-1", backend="eager")) == wanted


@pytest.mark.slow
def test_captured_steps_of_gpt_oss(gpt_oss, device, triton_kernels) -> None:
    """With the interpreted kernels; no launch races."""
    from tests.kernels.cuda.races import watched

    engine, wanted = gpt_oss
    limits = CaptureLimits(sizes=(2,), max_seconds=0)
    with watched("tree-2-1") as launches:
        found = generate(LLM(Engine.load(engine, capture=limits), plan="tree-2-1"), 3)
    assert found == [tokens[:3] for tokens in wanted]
    assert {"experts_gate_up_kernel", "experts_down_kernel"} <= {x.name for x in launches}


def test_experts_of_gpt_oss_in_fragments(tmp_path: Path, device) -> None:
    """Captured steps of mxfp4 as tensor cores take it say what the oracle says of blocks."""
    sizes = {"hidden_size": 256, "intermediate_size": 320}
    written = write_experts(models.save_tiny("gpt_oss", tmp_path / "target", **sizes), tmp_path)
    options = {"dtype": "bfloat16", "weight_fragments": True}
    engine = compiled(written.quantized, [], tmp_path / "engine", **options)
    assert layouts_of(engine) == {("mxfp4-fragments-1", "mxfp4-fragments")}
    blocks = compiled(written.quantized, [], tmp_path / "blocks", dtype="bfloat16")
    assert layouts_of(blocks) == {("mxfp4", "mxfp4")}
    wanted = generate(LLM(blocks, backend="eager"))
    assert len({token for tokens in wanted for token in tokens}) > 2
    assert generate(LLM(engine, backend="eager")) == wanted
    assert generate(LLM(Engine.load(engine))) == wanted


@pytest.mark.parametrize(
    ("name", "quantize", "changes"),
    [
        ("mixtral", "int4", {"intermediate_size": 320}),
        ("qwen3_moe", "fp8", {"moe_intermediate_size": 160}),
    ],
)
def test_rounded_experts_in_fragments(
    tmp_path: Path, name: str, quantize: str, changes: Any, device
) -> None:
    """Captured steps say what the oracle says; the weights are those of blocks."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, **changes}
    target = models.save_tiny(name, tmp_path / "target", **sizes)
    (size,) = changes.values()
    held = []
    for fragments in (False, True):
        path = tmp_path / f"engine-{fragments}"
        options = {"dtype": "bfloat16", "quantize": quantize, "weight_fragments": fragments}
        engine = compiled(target, [], path, **options)
        ((gate_up, down),) = layouts_of(engine)
        kind = "int4-g64-zeros" if quantize == "int4" else quantize
        assert (gate_up, down) == (
            (f"{kind}-fragments-{size}", f"{kind}-fragments") if fragments else (kind, kind)
        )
        held.append(reference_model(target, engine).state_dict())
    assert all(torch.equal(value, held[1][key]) for key, value in held[0].items())
    wanted = generate(LLM(engine, backend="eager"))
    assert generate(LLM(Engine.load(engine))) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "quantize", "group"), [("mixtral", "int4", 32), ("qwen3_moe", "fp8", None)]
)
def test_rounded_experts(tmp_path: Path, name: str, quantize: str, group: int | None) -> None:
    """The tokens of transformers with what the integers stand for."""
    target = models.save_tiny(name, tmp_path / "target", num_hidden_layers=1)
    engine = compiled(
        target, [], tmp_path / "engine", quantize=quantize, quantize_group=group, dtype="float32"
    )
    (layouts,) = layouts_of(engine)
    assert all(layouts)
    model = reference_model(target, engine)
    model.save_pretrained(tmp_path / "reference")
    wanted = greedy_tokens(tmp_path / "reference", PROMPTS, NUM_TOKENS)
    assert generate(LLM(engine, backend="eager")) == wanted
