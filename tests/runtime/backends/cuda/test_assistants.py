"""Drafts over the target's cache in captured steps: what they read there is what formulas read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.core import EngineCore
from specc.speculation.plans import SpecPlan
from tests.draft_kinds.test_assistant import AssistantRig
from tests.lossless import Zoo
from tests.runtime.head_rig import BLOCK, CHAIN, DYNAMIC, load, prompts_of, serve

RIG = AssistantRig("plain")
TREE = SpecPlan.from_widths((3, 2, 1))
PLANS = (TREE, DYNAMIC, CHAIN)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(zoo: Zoo) -> Path:
    """An engine for CUDA, which needs no GPU to compile."""
    return RIG.engine(zoo, label="cuda", backend="cuda", plans=PLANS)


@pytest.mark.parametrize("plan", [plan.name for plan in PLANS])
def test_outputs_of_captured_steps(engine: Path, plan: str, device: Any, zoo: Zoo) -> None:
    """Steps are queued ahead of results; graphs run with the oracles of their operators."""
    oracle, found, lengths = RIG.oracle(zoo), {}, {}
    for name in (plan, "off"):
        core = EngineCore(load(engine, capture=CaptureLimits.lazy()), name)
        requests = serve(core, oracle, prompts_of(BLOCK), temperature=1.0)
        found[name] = [request.output_token_ids for request in requests]
        lengths[name] = core.scheduler.stats.mean_acceptance_length
        assert device.tapes
        oracle.reset()
    assert found[plan] == found["off"]
    # as many as an engine accepts whose passes are all compared
    core = EngineCore(load(RIG.engine(zoo, label="captured", plans=PLANS)), plan)
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK), temperature=1.0)
    assert core.scheduler.stats.mean_acceptance_length == pytest.approx(lengths[plan], rel=0.02)


def test_the_kernels(engine: Path, device: Any, triton_kernels: None, zoo: Zoo) -> None:
    """All of it with the Triton kernels, in their interpreter: one request, a few steps."""
    oracle, limits = RIG.oracle(zoo), CaptureLimits(sizes=(1,), max_seconds=-1)
    core = EngineCore(load(engine, capture=limits), TREE.name)
    (kernels,) = serve(core, oracle, prompts_of(BLOCK)[2:3], num_tokens=6)
    oracle.reset()
    core = EngineCore(load(RIG.engine(zoo, label="captured", plans=PLANS)), TREE.name)
    (eager,) = serve(core, oracle, prompts_of(BLOCK)[2:3], num_tokens=6)
    assert kernels.output_token_ids == eager.output_token_ids
