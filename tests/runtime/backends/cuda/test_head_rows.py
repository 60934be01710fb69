"""Heads in captured steps: the rows that they keep, and outputs, whatever was queued ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specc.config import CompileConfig
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.core import EngineCore
from specc.speculation.plans import DynamicTree, SpecPlan
from tests import engines
from tests.head_reference import Reference
from tests.heads import CASES, draw_tensors, write_head
from tests.lossless import Zoo
from tests.runtime.draft_cases import write_target
from tests.runtime.head_rig import HeadOracle, load, prompts_of, serve

NAME, BLOCK = "safeailab", 4
PLANS = (SpecPlan.from_widths((2, 2, 1)), SpecPlan.from_dynamic(DynamicTree(6, 3, 3)))
# the default tier runs heads in test_heads.py, and captures what they read in test_tap_rows.py
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(zoo: Zoo) -> tuple[Path, HeadOracle]:
    """An engine for CUDA, which needs no GPU to compile."""
    target = write_target(zoo)
    head = zoo.once(f"head-{NAME}", lambda path: write_head(path, CASES[NAME]))
    config = CompileConfig(
        plans=PLANS, max_batch_size=4, max_seq_len=64, block_size=BLOCK, prefill_chunk=7,
        backend="cuda", probe=False,
    )  # fmt: skip
    path = zoo.once("heads-cuda", lambda made: engines.build(target, head, made, config))
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    embedding = model.get_input_embeddings().weight.detach()
    return path, HeadOracle(model, Reference(CASES[NAME], draw_tensors(CASES[NAME]), embedding))


@pytest.mark.parametrize("plan", [plan.name for plan in PLANS])
def test_rows_of_captured_steps(engine: Any, plan: str, device: Any) -> None:
    """Steps are queued ahead of results; graphs run with the oracles of their operators."""
    path, oracle = engine
    found = {}
    for name in (plan, "off"):
        core = EngineCore(load(path, capture=CaptureLimits.lazy()), name)
        requests = serve(core, oracle, prompts_of(BLOCK), temperature=1.0)
        found[name] = [request.output_token_ids for request in requests]
        assert device.tapes
        oracle.reset()
    assert found[plan] == found["off"]
    assert oracle.num_rows > 300


def test_rows_of_the_kernels(engine: Any, device: Any, triton_kernels: None) -> None:
    """All of it with the Triton kernels, in their interpreter: one request, a few steps."""
    path, oracle = engine
    oracle.reset()
    before = oracle.num_rows
    limits = CaptureLimits(sizes=(1,), max_seconds=-1)
    core = EngineCore(load(path, capture=limits), PLANS[0].name)
    serve(core, oracle, prompts_of(BLOCK)[4:5], num_tokens=6)
    assert oracle.num_rows > before + 20
