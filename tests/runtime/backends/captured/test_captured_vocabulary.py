"""Captured steps of a draft of other tokens: the target's outputs, and all is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from specc.config import CompileConfig
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.backends.captured.captures import CaptureWarning
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import engines, models
from tests.runtime.backends.captured.simulated_device import SimulatedDevice
from tests.vocabularies import save_planted

PLAN = SpecPlan.from_widths((2, 1))
PROMPTS = [[5, 6, 7, 8], [17] * 3]
NUM_TOKENS = 6

pytestmark = pytest.mark.filterwarnings(f"error::{CaptureWarning.__module__}.CaptureWarning")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("vocabulary")
    target = models.save_tiny("llama", root / "target", num_hidden_layers=1)
    draft = save_planted("llama", root / "draft", num_hidden_layers=1)
    config = CompileConfig(plans=(PLAN,), max_seq_len=32, max_batch_size=2, backend="cuda")
    return engines.build(target, draft, root / "engine", config)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_captured_steps_accept_all(
    path: Path, temperature: float, device: SimulatedDevice, triton_kernels: None
) -> None:
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=temperature, seed=seed)
        for seed in range(len(PROMPTS))
    ]
    limits = CaptureLimits(sizes=(2,), max_seconds=0)
    engine = Engine.load(path, capture=limits)
    wanted = LLM(path, plan="off", backend="eager").generate(PROMPTS, params)
    found = LLM(engine, plan=PLAN.name).generate(PROMPTS, params)
    for one, other in zip(found, wanted, strict=True):
        assert list(one.outputs[0].token_ids) == list(other.outputs[0].token_ids)
        stats = one.metrics
        num_cut = stats.num_spec_steps - stats.accepted_at_depth[PLAN.max_depth - 1]
        assert num_cut <= (stats.num_trimmed_tokens > 0)
