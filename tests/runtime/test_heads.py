"""Engines whose draft reads the target's hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.compiler.build import build
from specc.config import CompileConfig
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.sampling.params import SamplingParams
from specc.speculation.plans import DynamicTree, SpecPlan
from tests import models
from tests.head_reference import Reference
from tests.heads import CASES, LAYERS, VOCAB, WIDTH, draw_tensors, write_head
from tests.lossless import Zoo
from tests.runtime.head_rig import HeadOracle, load, prompts_of, serve

BLOCK, CHUNK = 4, 7
CHAIN, TREE = SpecPlan.from_widths((1, 1, 1)), SpecPlan.from_widths((2, 2, 1))
DYNAMIC = SpecPlan.from_dynamic(DynamicTree(6, 3, 3))
SIZES = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
}  # fmt: skip
NAME = "safeailab-narrow"


def options(**changes: Any) -> CompileConfig:
    config = CompileConfig(
        plans=(CHAIN, TREE, DYNAMIC),
        max_batch_size=4,
        max_seq_len=64,
        block_size=BLOCK,
        # prompts of more than one chunk
        prefill_chunk=CHUNK,
        backend="eager",
        probe=False,
    )
    return replace(config, **changes)


@pytest.fixture(scope="module")
def target(zoo: Zoo) -> Path:
    return zoo.once("head-target", lambda path: models.save_tiny("llama", path, **SIZES))


@pytest.fixture(scope="module")
def reference_of(target: Path) -> Callable[[str], tuple[Any, Reference]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    def make(name: str) -> tuple[Any, Reference]:
        embedding = model.get_input_embeddings().weight.detach()
        return model, Reference(CASES[name], draw_tensors(CASES[name]), embedding)

    return make


@pytest.fixture(scope="module")
def compiled(zoo: Zoo, target: Path) -> Callable[..., Path]:
    """An engine with a head."""

    def make(name: str = NAME, label: str = "eager", **changes: Any) -> Path:
        head = zoo.once(f"head-{name}", lambda path: write_head(path, CASES[name]))

        def write(path: Path) -> None:
            build(target, head, path, options(**changes))

        return zoo.once(f"heads-{name}-{label}", write)

    return make


@pytest.mark.parametrize(
    "plan",
    [pytest.param(CHAIN, marks=pytest.mark.slow), TREE, DYNAMIC],
    ids=lambda plan: plan.name,
)
def test_logits_of_every_node(
    plan: SpecPlan, compiled: Callable[..., Path], reference_of: Callable[..., Any]
) -> None:
    """Chunks, requests that join, prefixes that are shared, acceptances and rejections."""
    core = EngineCore(load(compiled()), plan.name)
    oracle = HeadOracle(*reference_of(NAME))
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK), num_tokens=8, temperature=1.5)
    stats = core.scheduler.stats
    assert oracle.depths == set(range(plan.max_depth))
    assert oracle.num_nodes > 100
    assert oracle.num_rows > 300
    assert stats.num_cached_tokens > 2 * BLOCK
    assert stats.mean_acceptance_length > 1.0


def test_requests_that_had_to_give_way(
    compiled: Callable[..., Path], reference_of: Callable[..., Any]
) -> None:
    """With blocks for little more than one request: rows are computed again, of both models."""
    core = EngineCore(load(compiled(), kv_cache_tokens=76), TREE.name)
    oracle = HeadOracle(*reference_of(NAME))
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK), num_tokens=20, every=1)
    assert core.scheduler.stats.num_preemptions > 1
    assert oracle.num_nodes > 100


def test_a_head_that_did_not_draft_for_a_while(
    compiled: Callable[..., Path], reference_of: Callable[..., Any]
) -> None:
    """Steps without it, and then with it again: it reads what it has missed."""
    core = EngineCore(load(compiled()), TREE.name)
    oracle = HeadOracle(*reference_of(NAME))
    oracle.watch(core)
    request = core.requests.make(prompts_of(BLOCK)[2], SamplingParams(max_tokens=40, seed=1))
    core.scheduler.add(request)
    policies = {name: EngineCore(core.engine, name).scheduler.policy for name in ("off", TREE.name)}
    for i in range(24):
        core.scheduler.use(policies["off" if i % 12 < 8 else TREE.name])
        core.advance()
        oracle.check_rows(core.engine, request)
    assert oracle.num_nodes > 20


@pytest.mark.parametrize("plan", [TREE, DYNAMIC], ids=lambda plan: plan.name)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_are_those_without_drafts(
    plan: SpecPlan, temperature: float, compiled: Callable[..., Path]
) -> None:
    engine = Engine.load(compiled())
    found = {}
    for name in ("off", plan.name):
        core = EngineCore(engine, name)
        requests = [
            core.requests.make(
                prompt, SamplingParams(max_tokens=16, temperature=temperature, seed=i)
            )
            for i, prompt in enumerate(prompts_of(BLOCK, seed=9))
        ]
        for request in requests:
            core.scheduler.add(request)
        while core.scheduler.has_work:
            core.advance()
        found[name] = [request.output_token_ids for request in requests]
    assert found["off"] == found[plan.name]


@pytest.mark.slow
@pytest.mark.parametrize("plan", [TREE, DYNAMIC], ids=lambda plan: plan.name)
@pytest.mark.parametrize("block_size", [BLOCK, 0])
def test_compiled_programs(
    plan: SpecPlan, block_size: int, compiled: Callable[..., Path], reference_of: Callable[..., Any]
) -> None:
    """Rows of all tokens, and outputs; what passes compute is not seen there."""
    path = compiled(label=f"cpu-{block_size}", backend="cpu", block_size=block_size)
    core = EngineCore(load(path), plan.name)
    oracle = HeadOracle(*reference_of(NAME))
    found = serve(core, oracle, prompts_of(BLOCK), temperature=1.0)
    assert oracle.num_rows > 500
    oracle.reset()
    core = EngineCore(load(path), "off")
    plain = serve(core, oracle, prompts_of(BLOCK), temperature=1.0)
    assert [s.output_token_ids for s in found] == [s.output_token_ids for s in plain]
