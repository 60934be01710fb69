"""Medusa heads in captured steps: what every node is drawn from, and outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.core import EngineCore
from specc.speculation.plans import SpecPlan
from tests import engines
from tests.lossless import Zoo
from tests.medusa_heads import MEDUSA_CASES, MedusaReference, draw_tensors, write_medusa
from tests.runtime.block_rig import MedusaOracle
from tests.runtime.draft_cases import write_target
from tests.runtime.head_rig import BLOCK, CHAIN, DYNAMIC, TREE, load, options, prompts_of, serve

NAME = "vllm"
SLOW = pytest.mark.slow
Make = Callable[..., tuple[Path, MedusaOracle]]


@pytest.fixture(scope="module")
def engine_of(zoo: Zoo) -> Make:
    """An engine for CUDA, which needs no GPU to compile, and what its heads compute."""
    target = write_target(zoo)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    def make(name: str = NAME) -> tuple[Path, MedusaOracle]:
        case = MEDUSA_CASES[name]
        heads = zoo.once(f"medusa-{name}", lambda path: write_medusa(path, case))
        config = options(backend="cuda")
        path = zoo.once(
            f"medusas-{name}-cuda", lambda made: engines.build(target, heads, made, config)
        )
        reference: Any = MedusaReference(case, draw_tensors(case))
        return path, MedusaOracle(model, reference)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        (NAME, TREE),
        pytest.param(NAME, CHAIN, marks=SLOW),
        pytest.param(NAME, DYNAMIC, marks=SLOW),
        pytest.param("vllm-one", TREE, marks=SLOW),
    ],
    ids=["tree", "chain", "dynamic", "one"],
)
def test_captured_steps(name: str, plan: SpecPlan, engine_of: Make, device: Any) -> None:
    """Steps are queued ahead of results; graphs run with the oracles of their operators.

    Outputs are those of off, whatever is proposed, so what nodes are drawn from is compared, too:
    in a run of its own, as steps that are looked into are two graphs.
    """
    path, oracle = engine_of(name)
    runs = [(plan.name, False), ("off", False), *([(plan.name, True)] if plan.is_static else [])]
    found = []
    for own, is_looked_into in runs:
        core = EngineCore(load(path, capture=CaptureLimits.lazy()), own)
        if is_looked_into:
            oracle.check_trees(core, plan)
        requests = serve(core, oracle, prompts_of(BLOCK)[1:4], temperature=1.0)
        found.append([request.output_token_ids for request in requests])
        assert core.engine.steps[own].is_captured(1)
    assert device.tapes
    assert all(one == found[0] for one in found)
    assert not plan.is_static or oracle.num_nodes > 5 * (plan.num_nodes - len(plan.tree.leaves))


@SLOW
@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=lambda plan: plan.name)
def test_logits_of_captured_steps(plan: SpecPlan, engine_of: Make, device: Any) -> None:
    path, oracle = engine_of()
    core = EngineCore(load(path, capture=CaptureLimits.lazy()), plan.name)
    oracle.check_trees(core, plan)
    serve(core, oracle, prompts_of(BLOCK), num_tokens=6, temperature=1.0)
    assert oracle.num_nodes > 10 * (plan.num_nodes - len(plan.tree.leaves))


@SLOW
def test_the_kernels(engine_of: Make, device: Any, triton_kernels: None) -> None:
    """With the Triton kernels, in their interpreter: one request, a few steps."""
    path, oracle = engine_of()
    limits = CaptureLimits(sizes=(1,), max_seconds=-1)
    core = EngineCore(load(path, capture=limits), TREE.name)
    oracle.check_trees(core, TREE)
    serve(core, oracle, prompts_of(BLOCK)[4:5], num_tokens=6)
    assert oracle.num_nodes > 4
