"""Quantized checkpoints of hybrids, in the layouts in which they are published.

Convolutions, decays and their biases, and the narrow projections that make decays and steps, stay
as they are; the rest is quantized, or whole layers are not. The reference is transformers on the
float32 numbers that the integers stand for, and every plan has the tokens of off.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specc.config import CompileConfig
from specc.speculation.plans import OFF, SpecPlan
from tests import branded_checkpoints as branded
from tests import engines, models
from tests import quantized_checkpoints as made
from tests.quantized_checkpoints import Format, Written
from tests.runtime.test_quantized import TOLERANCE, check_logits, check_plans
from tests.runtime.test_quantized_checkpoints import check_integers, reference, stored_layouts

PLANS = (OFF, SpecPlan.from_widths((1, 1, 1, 1)), SpecPlan.from_widths((2, 2, 1)))
ATTENTION, MLP = r"self_attn\.[qkvo]_proj", r"(mlp|shared_expert|experts\.\d+)\.\w+_proj"
# of the gated delta rules, all but those of decays and shares
DELTA = r"linear_attn\.(in_proj_qkvz?|in_proj_z|out_proj)"
SLOW = pytest.mark.slow


def named(*patterns: str) -> Callable[[str], bool]:
    """Whether a weight's name has one of these before its end."""
    found = re.compile("|".join(rf"\b(?:{pattern})\.weight$" for pattern in patterns))
    return lambda name: found.search(name) is not None


def make(
    root: Path, name: str, form: Format, is_quantized: Callable[[str], bool], **options: Any
) -> tuple[Written, Path]:
    """A checkpoint and its engine, with a draft of attention layers."""
    target = models.save_tiny(name, root / "target")
    draft = models.save_tiny(name, root / "draft", 0, models.draft_noise(name))
    written = made.write_checkpoint(target, root, form.config, form.writer, is_quantized)
    options = {"backend": "eager", "dtype": "float32", "weight_only": True} | options
    config = CompileConfig(plans=PLANS, max_seq_len=models.MAX_SEQ_LEN, probe=False, **options)
    return written, engines.build(written.quantized, draft, root / "engine", config)


@pytest.mark.parametrize(
    ("name", "form", "quantized", "layout", "backend"),
    [
        # Qwen3-Next-80B-A3B-…-FP8
        pytest.param(
            "qwen3_next_hybrid", made.float8_blocks(32), (DELTA, ATTENTION, MLP), "fp8-g32",
            "cpu", marks=SLOW,
        ),
        # Qwen3.5-…-FP8
        pytest.param(
            "qwen3_5", made.float8_blocks(32), (DELTA, ATTENTION, MLP), "fp8-g32", "cpu", marks=SLOW
        ),
        pytest.param(
            "qwen3_5_moe", made.float8_blocks(32), (DELTA, ATTENTION, MLP), "fp8-g32", "cpu",
            marks=SLOW,
        ),
        # 4 bits for attention and MLPs alone
        pytest.param(
            "qwen3_5", made.packed(4, 32, False), (ATTENTION, MLP), "int4-g32-zeros", "eager",
            marks=SLOW,
        ),
        pytest.param(
            "qwen3_5", made.gptq(4, 32), (DELTA, ATTENTION, MLP), "int4-g32", "cpu", marks=SLOW
        ),
        pytest.param(
            "lfm2", made.awq(32), (r"conv\.\w+_proj", r"self_attn\.\w+_proj", r"feed_forward\.w\d"),
            "int4-g32-zeros", "cpu", marks=SLOW,
        ),
        pytest.param(
            "lfm2_moe", made.gptq(4, 32),
            (r"conv\.\w+_proj", r"self_attn\.\w+_proj", r"feed_forward\..*w\d"), "int4-g32",
            "eager", marks=SLOW,
        ),
        # Nemotron 3 Nano, FP8
        pytest.param(
            "nemotron_h", branded.modelopt_fp8(), (r"mixer\..*(in|out|up|down)_proj",), "fp8",
            "cpu", marks=SLOW,
        ),
        # Nemotron 3 Super, NVFP4
        pytest.param(
            "nemotron_h", branded.modelopt_mixed(), (r"mixer\..*(in|out|up|down)_proj",), "fp8",
            "cpu", marks=SLOW,
        ),
        pytest.param(
            "granite4_hybrid", made.gptq(4, 32), (r"mamba\.\w+_proj", ATTENTION), "int4-g32",
            "cpu", marks=SLOW,
        ),
        pytest.param(
            "falcon_h1", made.packed(8, None), (r"mamba\.\w+_proj", ATTENTION, r"\w+_proj"),
            "int8", "cpu", marks=SLOW,
        ),
        pytest.param(
            "bamba", made.float8_channels(), (r"mamba\.\w+_proj", ATTENTION, r"\w+_proj"), "fp8",
            "eager", marks=SLOW,
        ),
        pytest.param("mamba2", made.gptq(8, -1), (r"\w+_proj",), "int8", "cpu", marks=SLOW),
    ],
)  # fmt: skip
def test_published_layouts(
    tmp_path: Path, name: str, form: Format, quantized: tuple[str, ...], layout: str, backend: str
) -> None:
    written, engine = make(tmp_path, name, form, named(*quantized), backend=backend)
    assert set(stored_layouts(engine).values()) == {f"blocks-{layout}"}
    check_logits(engine, reference(written), "float32", TOLERANCE)
    check_plans(engine, PLANS, num_prompts=3, max_tokens=16)


@pytest.mark.parametrize("left", ["in_proj_z", pytest.param("in_proj_qkv", marks=SLOW)])
def test_projections_that_are_quantized_in_part(tmp_path: Path, left: str) -> None:
    """Of projections beside each other, one is in floats: they are not fused."""
    parts = [part for part in ("in_proj_qkv", "in_proj_z", "out_proj") if part != left]
    only = named(*(rf"linear_attn\.{part}" for part in parts), MLP)
    written, engine = make(tmp_path, "qwen3_5", made.packed(4, 32), only)
    check_integers(written, engine)
    assert not any("+" in key for key in stored_layouts(engine) if "linear_attn" in key)
    check_logits(engine, reference(written), "float32", TOLERANCE)
