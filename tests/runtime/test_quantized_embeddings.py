"""Embeddings that are integers, in engines: stored once, and looked up as transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from specc.artifact.directory import read_manifest
from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.speculation.plans import OFF, SpecPlan
from tests import engines, models
from tests.runtime.test_quantized import check_logits, generate, reference_model

PLANS = (OFF, SpecPlan.from_widths((1, 1)), SpecPlan.from_widths((1, 1), ("self_x0",)))


@pytest.mark.parametrize(
    ("name", "dtype", "backend", "keys"),
    [
        ("gemma3-tied", "float32", "cpu", ["lm_head.weight:int8"]),
        pytest.param(
            "llama", "bfloat16", "cpu",
            ["lm_head.weight:int8", "model.embed_tokens.weight:int8"], marks=pytest.mark.slow,
        ),
        pytest.param(
            "gemma3-tied", "float32", "eager", ["lm_head.weight:int8"], marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_quantized_ends(
    tmp_path: Path, name: str, dtype: str, backend: str, keys: list[str]
) -> None:
    """Of the target and of its draft; a head that is tied to the embedding is one weight with it.

    A self-draft reads what the target does.
    """
    target = models.save_tiny(name, tmp_path / "target")
    draft = models.save_tiny(name, tmp_path / "draft", 0, models.DRAFT_NOISE[name])
    config = CompileConfig(
        max_seq_len=models.MAX_SEQ_LEN, quantize="int4", quantize_group=32, dtype=dtype,
        backend=backend, plans=PLANS, probe=False,
    )  # fmt: skip
    path = engines.build(target, draft, tmp_path / "engine", config)
    for model in read_manifest(path).models:
        held = load_file(path / model.weights_file)
        ends = [key for key in held if "lm_head" in key or "embed_tokens.weight" in key]
        assert sorted(ends) == keys
        assert model.embedding == "int8"
    check_logits(path, reference_model(target, path), dtype)
    engine, prompts = Engine.load(path), models.prompts()[-2:]
    plain, _ = generate(engine, "off", prompts, max_tokens=8)
    for plan in PLANS[1:]:
        assert generate(engine, plan.name, prompts, max_tokens=8)[0] == plain
